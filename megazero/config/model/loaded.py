"""A run that starts from weights has their model: a checkpoint's, to continue it, or a Hugging Face folder's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megazero.config.model.architecture import from_hf_config, is_architecture, otherwise
from megazero.config.model.published import (
    CONFIG_FILE,
    find_tokenizer,
    held_tokenizer,
    is_published,
    published_folder,
    unread_tokenizer,
)
from megazero.config.model.section import as_trained, complete
from megazero.config.options.data_inputs import FILE_OPTIONS
from megazero.config.options.fields import typed
from megazero.config.read.beginning import Beginning
from megazero.config.read.files import read_json
from megazero.config.run import all_options
from megazero.products import PLAIN

# Parameters have the same shapes whatever these say: a new run from the weights (--finetune) may change them.
SHAPELESS = ("rotary_", "yarn_", "norm_epsilon")
_FRESH = (
    "--load {}: the weights come from there; optimizer states, schedule and data start fresh (--finetune)"
)
_NAMED = 3  # options that a note names; LOG_DIR/config.yaml has all


@dataclass(frozen=True)
class Loaded:
    """The model that --load names.

    architecture: options by name that the run must have. defaults: options that it may override.
    tokenizer: the options of its tokenizer, unless the run names one. note: what the folder lacks. dtype: of its
    weights, where the folder says it.
    """

    where: str
    architecture: Mapping[str, Any]
    defaults: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    note: str | None = None
    dtype: str | None = None


def take_architecture(
    said: Mapping[str, Any], beginning: Beginning
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the options by name, completed with the architecture of what --load names, if that exists.

    Also return notes, on what was taken over among others, and an error line for each option that was given another
    value than the model has, or for a folder that cannot be read. A Hugging Face folder implies --finetune.
    Raises OSError if the storage does not answer.
    """
    values, load = dict(said), said.get("load")
    notes, errors = list[str](), list[str]()
    try:
        if beginning.error:
            raise ValueError(beginning.error)
        loaded = _published(said) if is_published(load) else _checkpoint(beginning)
    except ValueError as error:
        return values, [], [f"--load {load}: {error}"]
    if loaded is None:
        return values, [], []
    if is_published(load):
        values["finetune"] = True
        notes += [] if beginning.again else [_FRESH.format(load), *_other_dtype(loaded.dtype, said)]
    notes += [loaded.note] if loaded.note else []
    options, architecture, defaults = all_options(), dict(loaded.architecture), dict(loaded.defaults)
    if said.get("tokenizer_type") == "NullTokenizer" and "vocab_size" in architecture:
        architecture["vocab_size"] -= 1  # the run adds the end of document to what is given
    if not any(said.get(name) for name in ("tokenizer_type", *FILE_OPTIONS)):
        defaults |= loaded.tokenizer
    saved = {**architecture, **{n: v for n, v in defaults.items() if said.get(n) is None}}
    values |= saved
    for name in otherwise(architecture, said):
        wanted, has = (typed(options[name], each) for each in (said[name], architecture[name]))
        if values.get("finetune") and name.startswith(SHAPELESS):
            notes.append(f"{wanted} replaces {has} of {loaded.where}")
            values[name] = said[name]
            continue
        errors.append(
            f"{wanted} is not the model of {loaded.where}, which has {has}; leave it out to continue that model, or "
            "name another folder"
        )
    would_be = {name: options[name].default for name in saved} | complete(said)
    taken = [typed(options[n], v) for n, v in saved.items() if said.get(n) is None and would_be[n] != v]
    if taken:
        more = f" and {len(taken) - _NAMED} more" if len(taken) > _NAMED else ""
        notes.append(f"from {loaded.where}: {' '.join(taken[:_NAMED])}{more}")
    return values, notes, errors


def _checkpoint(beginning: Beginning) -> Loaded | None:
    """Return the model of a checkpoint, and the tokenizer that it holds."""
    path, manifest = beginning.path, beginning.manifest
    if path is None or manifest is None:
        return None
    saved = _architecture(_trained(manifest.configuration.get("model", {})))
    kind = manifest.configuration.get("data", {}).get("tokenizer_type")
    held = held_tokenizer(kind, path, manifest.files)
    tokenizer = {"tokenizer_type": kind, **{name: str(file) for name, file in held.items()}} if held else {}
    return Loaded(f"the checkpoint in {path}", saved, {}, tokenizer)


def _trained(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a stored section as it was trained: an option that is younger than it had its default."""
    options = all_options()
    defaults = {name: opt.default for name, opt in options.items() if opt.section == "model"}
    known = {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items() if name in defaults}
    return defaults | complete(as_trained(known)) if known else {}


def _published(said: Mapping[str, Any]) -> Loaded:
    """Return the model of a folder of Hugging Face: its longest sequence, too, unless the run says another."""
    folder = published_folder(said["load"])
    config = read_json(folder / CONFIG_FILE, "it says what the model is")
    model = asdict(from_hf_config(config, tuple(said.get("accept_field") or ())))
    longest = {"max_position_embeddings": model["max_position_embeddings"]}
    tokenizer, note = find_tokenizer(folder), unread_tokenizer(folder)
    dtype = config.get("dtype") or config.get("torch_dtype")
    return Loaded(f"the Hugging Face folder {folder}", _architecture(model), longest, tokenizer, note, dtype)


def _other_dtype(dtype: str | None, said: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if a folder's weights are of another dtype than the run."""
    run = said.get("params_dtype") or all_options()["params_dtype"].default
    own = next((word for word, name in PLAIN.items() if name == dtype), run)
    if own != run:
        yield f"the folder is {dtype}, this run {run}: --{own} trains in the folder's dtype"


def _architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a model section is architecture and known here. Unset is a value, but for a vocabulary."""
    positions = model.get("position_embedding_type")
    return {
        name: value
        for name, value in model.items()
        if name in all_options()
        and is_architecture(name, positions)
        and (value is not None or name != "vocab_size")
    }
