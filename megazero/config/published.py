"""A run that starts from a folder of Hugging Face has the folder's model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megazero.config.architecture import from_hf_config
from megazero.config.fields import show
from megazero.config.files import read_json
from megazero.config.run import all_options

CONFIG_FILE = "config.json"
# Options of the model that are the run's own, whatever the folder says.
_OWN = (
    "seq_length",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "pad_vocab_size_to",
)
_FRESH = (
    "--load {}: the weights come from there; optimizer states, schedule and data start fresh (--finetune)"
)


def take_published(said: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the options by name with those of the model under --load hf:DIR, if there is one, and --finetune.

    Also return notes, and an error line for each option that was said and is another, or for a folder that cannot be
    read.
    """
    values, load = dict(said), said.get("load")
    if not is_published(load):
        return values, [], []
    try:
        config = read_json(published_folder(load) / CONFIG_FILE, "it says what the model is")
        model = from_hf_config(config, tuple(said.get("accept_field") or ()))
    except (ValueError, OSError) as error:
        return values, [], [f"--load {load}: {error}"]
    errors = []
    turned = (
        model.position_embedding_type != "learned_absolute"
    )  # such positions go as far as they are asked to
    for field in dataclasses.fields(model):
        name, value = field.name, getattr(model, field.name)
        given = said.get(name)
        if name in _OWN or value is None or (name == "max_position_embeddings" and turned and given):
            continue
        if given is not None and given != value:
            wanted = f"{all_options()[name].flag} {show(given)}"
            errors.append(
                f"{wanted} is not the model of --load {load}, which has {show(value)}; leave it out"
            )
        values[name] = value
    values["finetune"] = True
    return values, [_FRESH.format(load)], errors


def is_published(load: str | None) -> bool:
    """Tell whether --load names a folder of Hugging Face."""
    return load is not None and load.startswith("hf:")


def published_folder(load: str | None) -> Path:
    """Return the folder of ``hf:DIR``."""
    assert load is not None and is_published(load)
    return Path(load.removeprefix("hf:"))
