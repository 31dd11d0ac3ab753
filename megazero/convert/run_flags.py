"""The flags of a run whose model is that of a published config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import yaml

from megazero.config.model.architecture import from_hf_config
from megazero.config.model.published import CONFIG_FILE
from megazero.config.model.section import ModelConfig
from megazero.config.read.files import read_json
from megazero.convert.card import flag_lines
from megazero.data.tokenizer_files import find_tokenizer


def run_options(folder: Path, accept: Collection[str] = ()) -> dict[str, object]:
    """Return the options that the folder decides, by name: the model's, and its tokenizer's if it has one.

    folder: it holds config.json, or is config.json. Raises ValueError for a model that the decoder does not have.
    """
    file = folder if folder.is_file() else folder / CONFIG_FILE
    model = from_hf_config(read_json(file, "it says what the model is"), accept)
    options = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return {**options, **find_tokenizer(file.parent)}


def flag_text(folder: Path, accept: Collection[str] = ()) -> str:
    """Return the options as flags, one a line, to be continued by those of the data and the training."""
    options = run_options(folder, accept)
    return " \\\n".join(flag_lines(str(options["model_family"]), options))


def yaml_text(folder: Path, accept: Collection[str] = ()) -> str:
    """Return the options as a file for --config."""
    options = {name: value for name, value in run_options(folder, accept).items() if value is not None}
    decided = {field.name for field in dataclasses.fields(ModelConfig)}
    data = {name: options.pop(name) for name in options.keys() - decided}
    return yaml.safe_dump({"model": options, **({"data": data} if data else {})}, sort_keys=False).rstrip()
