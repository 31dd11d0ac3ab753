"""Folders as Hugging Face publishes models, as --load names them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

CONFIG_FILE = "config.json"
# The files that a tokenizer is made from, by its type and the option that names them.
MODEL_FILES: Mapping[str, Mapping[str, str]] = {
    "HuggingFaceTokenizer": {"tokenizer_model": "tokenizer.json"},
    "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
}
# Files of tokenizers that are not read, and what they are.
_UNREAD = {
    "vocab.txt": "a WordPiece vocabulary",
    "tekken.json": "Mistral's Tekken",
    "*.tiktoken": "tiktoken's ranks",
}


def is_published(load: str | None) -> bool:
    """Tell whether --load names a folder of Hugging Face."""
    return load is not None and load.startswith("hf:")


def published_folder(load: str) -> Path:
    """Return the folder of ``hf:DIR``."""
    return Path(load.removeprefix("hf:"))


def find_tokenizer(folder: Path) -> dict[str, str]:
    """Return the options of the tokenizer in a published folder: its type and its files; {} if there is none.

    A tokenizer.json is preferred to what it was made from: the published model was used with it.
    """
    for kind, names in MODEL_FILES.items():
        files = {option: folder / name for option, name in names.items()}
        if all(file.is_file() for file in files.values()):
            return {"tokenizer_type": kind, **{option: str(file) for option, file in files.items()}}
    return {}


def held_tokenizer(kind: str | None, folder: Path, files: Collection[str]) -> dict[str, Path]:
    """Return the tokenizer's files in a checkpoint's folder by option; none if its ``files`` do not have them."""
    names = MODEL_FILES.get(kind or "", {})
    complete = all(name in files for name in names.values())
    return {option: folder / name for option, name in names.items()} if complete else {}


def unread_tokenizer(folder: Path) -> str | None:
    """Return a note if the folder's only tokenizer is of a kind that is not read, else None."""
    found = [f"{path.name}, {what}" for name, what in _UNREAD.items() for path in sorted(folder.glob(name))]
    if not found or find_tokenizer(folder):
        return None
    return (
        f"'{folder}' has {found[0]}, which is not supported: the model comes without a tokenizer. A tokenizer.json, "
        "as transformers' save_pretrained may write it, would be read"
    )
