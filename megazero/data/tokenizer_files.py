"""A tokenizer's files travel with the checkpoints of its model, under the names that Hugging Face gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megazero.checkpoint.manifest import read_manifest
from megazero.config.model.published import MODEL_FILES, held_tokenizer
from megazero.config.options.data_inputs import FILE_OPTIONS
from megazero.config.options.fields import typed
from megazero.config.run import all_options
from megazero.data.tokenizer import Tokenizer, load_tokenizer
from megazero.data.tokenizer_settings import BESIDE

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
    return {name: values[name] for name in FILE_OPTIONS}


def held_flags(path: Path) -> str:
    """Return the flags that name the tokenizer in a checkpoint's folder, or "" if there is none."""
    manifest = read_manifest(path)
    kind = manifest.configuration.get("data", {}).get("tokenizer_type")
    held = {"tokenizer_type": kind, **held_tokenizer(kind, path, manifest.files)}
    return " ".join(typed(all_options()[name], f"{value}") for name, value in held.items() if len(held) > 1)
