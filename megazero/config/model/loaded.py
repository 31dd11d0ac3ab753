"""A run that starts from weights has their model: a checkpoint's, to continue it, or a Hugging Face folder's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megazero.checkpoint.directory import Look, described, latest, named, stated
from megazero.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    manifest_text,
    parse_manifest,
    read_manifest,
    to_json,
)
from megazero.config.model.architecture import from_hf_config, is_architecture
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
from megazero.config.read.files import read_json
from megazero.config.run import all_options

# Parameters have the same shapes whatever these say: a new run from the weights (--finetune) may change them.
SHAPELESS = ("rotary_", "yarn_", "norm_epsilon")
_FRESH = (
    "--load {}: the weights come from there; optimizer states, schedule and data start fresh (--finetune)"
)


# Commands with equal values of these begin at the same place in the same way, whatever their ranks and layout.
BEGINNING = ("load", "ckpt_step", "finetune", "load_optim", "load_rng")


class Chosen(NamedTuple):
    """The checkpoint that --load means, or None.

    named: its folder or --ckpt-step names it. again: this command has begun before and saved it since.
    """

    path: Path | None
    named: bool = False
    again: bool = False


def checkpoint_to_load(values: Mapping[str, Any], look: Look = described) -> Chosen:
    """Return the checkpoint that a run with these options by name begins from.

    A restart continues from its own newest checkpoint, wherever the command began: a requeued job does not go back to
    --ckpt-step or to another folder a second time. Otherwise the folder of --load or --ckpt-step names the
    checkpoint; else it is the newest that ``look`` accepts. Raises CheckpointError if there is none of that step.
    """
    load, save, step = values.get("load"), values.get("save"), values.get("ckpt_step")
    if load is None:
        return Chosen(None)
    own = latest(save, look=look) if save else None
    by_name = not is_published(load) and (step is not None or named(load) is not None)
    if own is not None and _begins_alike(values, read_manifest(own), by_name):
        return Chosen(own, again=True)
    if is_published(load):
        return Chosen(None)
    one = named(load, step)
    return Chosen(one, named=True) if one is not None else Chosen(latest(load, look=look))


@dataclass(frozen=True)
class Beginning:
    """What the folders of --load and --save say of where a run begins, as one rank has read them.

    path, manifest: the checkpoint that --load means, or None. again: this command has begun before and saved it
    since. consumed: its samples, which only a ramp-up asks for. error: why --load means none.
    """

    path: Path | None = None
    manifest: Manifest | None = None
    again: bool = False
    consumed: int = 0
    error: str = ""

    @property
    def told(self) -> bytes:
        """What other ranks are told, of which ``of`` makes it again: JSON."""
        text = manifest_text(self.manifest).decode() if self.manifest else None
        return json.dumps(
            [self.path and f"{self.path}", text, self.again, self.consumed, self.error]
        ).encode()

    @classmethod
    def of(cls, told: bytes) -> Beginning:
        path, text, *others = json.loads(told)
        if path is None:
            return cls(None, None, *others)
        return cls(Path(path), parse_manifest(text.encode(), Path(path) / MANIFEST_FILE), *others)

    def goes_on(self, values: Mapping[str, Any]) -> bool:
        """Tell whether the checkpoint's run goes on; else a new one begins (--finetune)."""
        return self.path is not None and (self.again or not values.get("finetune"))


def find_beginning(values: Mapping[str, Any]) -> Beginning:
    """Read what a run with these options by name begins from. Raises OSError if the storage does not answer."""
    try:
        chosen = checkpoint_to_load(values)
        if chosen.path is None:
            return Beginning()
        consumed = stated(chosen.path).get("consumed_samples", 0) if values.get("rampup_batch_size") else 0
        return Beginning(chosen.path, read_manifest(chosen.path), chosen.again, consumed)
    except ValueError as error:
        return Beginning(error=f"{error}")


def _begins_alike(values: Mapping[str, Any], saved: Manifest, by_name: bool) -> bool:
    """Tell whether this command saved the checkpoint: the run began at the same place in the same way.

    by_name: the command names a checkpoint. Given again with another optimizer, or with other iterations left out, it
    goes back to that one; a command that takes the newest continues.
    """
    said = {**values, "finetune": bool(values.get("finetune")) or is_published(values.get("load"))}
    decide = [
        o
        for o in all_options().values()
        if o.name in BEGINNING or by_name and o.section in ("optimizer", "skipping")
    ]
    now = {o.name: o.default if said.get(o.name) is None else said[o.name] for o in decide}
    stored = {o.name: saved.configuration.get(o.section, {}).get(o.name, o.default) for o in decide}
    return to_json(now, "the command") == to_json(stored, "a configuration")  # where tuples are lists


@dataclass(frozen=True)
class Loaded:
    """The model that --load names.

    architecture: options by name that the run must have. rather: options that it has unless it gives others.
    tokenizer: the options of its tokenizer, unless the run names one. note: what the folder lacks.
    """

    where: str
    architecture: Mapping[str, Any]
    rather: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    note: str | None = None


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
        notes += [] if beginning.again else [_FRESH.format(load)]
    notes += [loaded.note] if loaded.note else []
    options, architecture, rather = all_options(), dict(loaded.architecture), dict(loaded.rather)
    if said.get("tokenizer_type") == "NullTokenizer" and "vocab_size" in architecture:
        architecture["vocab_size"] -= 1  # the run adds the end of document to what is given
    if not any(said.get(name) for name in ("tokenizer_type", *FILE_OPTIONS)):
        rather |= loaded.tokenizer
    for name, value in architecture.items():
        if said.get(name) in (None, value):
            values[name] = value
            continue
        wanted, has = (typed(options[name], each) for each in (said[name], value))
        if values.get("finetune") and name.startswith(SHAPELESS):
            notes.append(f"{wanted} replaces {has} of {loaded.where}")
            continue
        errors.append(
            f"{wanted} is not the model of {loaded.where}, which has {has}; leave it out to continue that model, or "
            "name another folder"
        )
        values[name] = value
    saved = {**architecture, **{n: v for n, v in rather.items() if said.get(n) is None}}
    values |= {name: value for name, value in saved.items() if said.get(name) is None}
    would_be = {name: options[name].default for name in saved} | complete(said)
    taken = [typed(options[n], v) for n, v in saved.items() if said.get(n) is None and would_be[n] != v]
    if taken:
        notes.append(f"from {loaded.where}: {' '.join(taken)}")
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
    return Loaded(f"the Hugging Face folder {folder}", _architecture(model), longest, tokenizer, note)


def _architecture(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a model section is architecture and known here."""
    positions = model.get("position_embedding_type")
    return {
        name: value
        for name, value in model.items()
        if value is not None and name in all_options() and is_architecture(name, positions)
    }
