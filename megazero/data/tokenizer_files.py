"""A tokenizer's files travel with the checkpoints of its model, under the names that Hugging Face gives them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megazero.data.tokenizer import Tokenizer, load_tokenizer

# The files that a tokenizer is made from, by its type and the option that names them.
MODEL_FILES: Mapping[str, Mapping[str, str]] = {
    "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "HuggingFaceTokenizer": {"tokenizer_model": "tokenizer.json"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
}
# What lies beside it and says how the model is used: it goes along, byte for byte.
BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
TOKENIZER_FILES = (*(name for files in MODEL_FILES.values() for name in files.values()), *BESIDE)


def read_tokenizer_files(kind: str | None, given: Mapping[str, str | Path | None]) -> dict[str, bytes]:
    """Return the files of a tokenizer by the name they have in a checkpoint; none for a null tokenizer.

    kind, given: as ``load_tokenizer`` takes them, by option; each is a file, or a folder that holds it.
    """
    files: dict[str, bytes] = {}
    for option, name in MODEL_FILES.get(kind or "", {}).items():
        wanted = given.get(option)
        if not wanted:
            return {}
        path = Path(wanted) / name if Path(wanted).is_dir() else Path(wanted)
        beside = [path.with_name(other) for other in BESIDE]
        files |= {name: path.read_bytes(), **{f.name: f.read_bytes() for f in beside if f.is_file()}}
    return files


def held_tokenizer(kind: str | None, folder: Path, files: Collection[str]) -> dict[str, Path]:
    """Return the tokenizer's files in a checkpoint's folder by option; none if its ``files`` do not have them."""
    names = MODEL_FILES.get(kind or "", {})
    complete = all(name in files for name in names.values())
    return {option: folder / name for option, name in names.items()} if complete else {}


def find_tokenizer(folder: Path) -> dict[str, str]:
    """Return the options of the tokenizer in a published folder: its type and its files. None if it has none.

    A tokenizer.json comes before what it is made from: it says how the published model was used.
    """
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    for kind in ("SentencePieceTokenizer", "GPT2BPETokenizer"):
        files = {option: folder / name for option, name in MODEL_FILES[kind].items()}
        if all(file.is_file() for file in files.values()):
            return {"tokenizer_type": kind, **{option: str(file) for option, file in files.items()}}
    return {}


def load_run_tokenizer(
    values: Mapping[str, Any], held: Mapping[str, Path], given: Mapping[str, str | Path | None]
) -> Tokenizer:
    """Load the tokenizer of a saved configuration, given by option name, whose vocabulary is known.

    Its files are those ``given`` by option, else those ``held`` in the checkpoint, else where they were in training.
    """
    kind = values["tokenizer_type"]
    if kind in (None, "NullTokenizer"):
        return load_tokenizer("NullTokenizer", vocab_size=values["vocab_size"] - 1)
    files = {**held, **{name: path for name, path in given.items() if path}}
    every: dict[str, Any] = {**tokenizer_options(values), **files}
    return load_tokenizer(kind, **every)


def tokenizer_options(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the options that name a tokenizer's files, of options by name."""
    return {name: values[name] for name in ("tokenizer_model", "vocab_file", "merge_file")}
