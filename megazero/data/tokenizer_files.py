"""A tokenizer's files travel with the checkpoints of its model, under the names that Hugging Face gives them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

# The file that a tokenizer is made from, by its type.
MODEL_FILES = {"SentencePieceTokenizer": "tokenizer.model", "HuggingFaceTokenizer": "tokenizer.json"}
# What lies beside it and says how the model is used: it goes along, byte for byte.
BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
TOKENIZER_FILES = (*MODEL_FILES.values(), *BESIDE)


def read_tokenizer_files(kind: str | None, model: str | Path | None) -> dict[str, bytes]:
    """Return the files of a tokenizer by the name they have in a checkpoint; none for a null tokenizer.

    kind, model: as ``load_tokenizer`` takes them; the model is a file, or a folder that holds it.
    """
    name = MODEL_FILES.get(kind or "")
    if name is None or not model:
        return {}
    path = Path(model) / name if Path(model).is_dir() else Path(model)
    beside = [path.with_name(other) for other in BESIDE]
    return {name: path.read_bytes(), **{file.name: file.read_bytes() for file in beside if file.is_file()}}


def held_tokenizer(kind: str | None, folder: Path, files: Collection[str]) -> Path | None:
    """Return the tokenizer's model in a checkpoint's folder, or None if its ``files`` do not have it."""
    name = MODEL_FILES.get(kind or "")
    return folder / name if name is not None and name in files else None


def find_tokenizer(folder: Path) -> tuple[str | None, str | None]:
    """Return type and model of the tokenizer in a published folder, as ``load_tokenizer`` takes them; or None, None.

    A tokenizer.json comes before a SentencePiece model: it says how the published model was used.
    """
    if (folder / MODEL_FILES["HuggingFaceTokenizer"]).is_file():
        return "HuggingFaceTokenizer", str(folder)
    model = folder / MODEL_FILES["SentencePieceTokenizer"]
    return ("SentencePieceTokenizer", str(model)) if model.is_file() else (None, None)
