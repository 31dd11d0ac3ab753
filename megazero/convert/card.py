"""A model in words: the model card of an exported checkpoint, and the flags of a run with a published model.

The card says which run the model is from, how it was trained, and what lies in the folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

import yaml

from megazero.checkpoint.manifest import FileEntry
from megazero.config.model.architecture import from_hf_config
from megazero.config.model.published import CONFIG_FILE, find_tokenizer
from megazero.config.model.section import complete
from megazero.config.options.data_inputs import FILE_OPTIONS
from megazero.config.options.fields import stand_in, typed
from megazero.config.options.needs import lacks
from megazero.config.read.files import read_json
from megazero.config.run import RunConfig, all_options
from megazero.config.validate import facts
from megazero.convert.importing import HUB_NAME
from megazero.convert.source import Source
from megazero.families import FAMILIES

# They say where files lay on the machine of the training, and nothing about the model.
_PLACES = (*FILE_OPTIONS, "save", "load", "log_dir", "data_cache_path", "tensorboard_dir")


def card(source: Source, files: Mapping[str, FileEntry], note: str | None = None) -> str:
    """Return README.md of the folder: a model card as Hugging Face reads it. files: those of the folder, by name.

    note: on the folder's tokenizer.
    """
    state = source.state
    samples, length = state.get("consumed_samples", 0), source.model.seq_length
    losses = state.get("losses", {})
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in source.tensors})
    base = state.get("base", state.get("imported", "not recorded")) or "random weights"
    facts = {
        "base model": base,
        "run": state.get("run_id") or "unnamed",
        "iteration": f"{source.manifest.step:,}",
        "samples": f"{samples:,}",
        "tokens": f"{state.get('tokens', samples * length):,}",
        "training loss": _loss(losses.get("lm_loss")),
        "validation loss": _loss(losses.get("eval_lm_loss")),
        "weights": "those of the forward passes"
        if source.weights == "trained"
        else "the optimizer's master weights",
        "dtype": ", ".join(dtypes),
        "parameters": f"{sum(t.nbytes // t.dtype.itemsize for t in source.tensors):,}",
    }
    facts |= {name: f"{value:.4g}" for name, value in losses.items() if "lm_loss" not in name}
    front = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if HUB_NAME.fullmatch(hub := base.split()[-1]):  # also of a run that began from another run of it
        front |= {"base_model": hub}
    front |= state.get("license", {})
    lines = ["---", yaml.safe_dump(front, sort_keys=False).rstrip(), "---", "", "# Model card", ""]
    lines += ["Trained with megazero and exported from its checkpoint.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", f"Tokenizer: {note}."] if note else []
    said = {name: value for name, value in source.values.items() if name not in _PLACES}
    lines += ["", "## Flags that are not at their default", "", "```"]
    lines += [*flag_lines(source.model.model_family, said), "```", ""]
    lines += ["## Files", "", "| file | bytes | crc32 |", "|---|---|---|"]
    lines += [f"| {name} | {entry.size:,} | {entry.crc32:08x} |" for name, entry in sorted(files.items())]
    return "\n".join([*lines, ""])


def _loss(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.4f}"


def run_options(folder: Path, accept: Collection[str] = ()) -> dict[str, object]:
    """Return the options that the folder decides, by name: the model's, and its tokenizer's if it has one.

    folder: it holds config.json, or is config.json. Raises ValueError for a model that the decoder does not have.
    """
    file = folder if folder.is_file() else folder / CONFIG_FILE
    model = from_hf_config(read_json(file, "it says what the model is"), accept)
    options = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return {**options, **find_tokenizer(file.parent)}


def by_section(options: Mapping[str, object]) -> str:
    """Return options by name, those that are not None, as a file for --config."""
    sections: dict[str, dict[str, object]] = {}
    for name, value in options.items():
        if value is not None:
            plain = list(value) if isinstance(value, tuple) else value
            sections.setdefault(all_options()[name].section, {})[name] = plain
    return yaml.safe_dump(sections, sort_keys=False).rstrip()


def flag_lines(family: str, values: Mapping[str, object]) -> list[str]:
    """Return options by name as they are typed, one a line: the family, and what differs from its defaults."""
    return [typed(all_options()[name], value) for name, value in changed(family, values).items()]


def with_effect(options: Mapping[str, object]) -> dict[str, object]:
    """Return options by name without those that have no effect beside the others.

    Megatron's checkpoints keep every argument, given or not: Muon's, too, of a run with Adam.
    """
    needed = {name: stand_in(option) for name, option in all_options().items() if option.needed}
    config = RunConfig.of({**needed, **complete(options)})
    known = {**config.values(), **facts(config)}
    return {name: value for name, value in options.items() if not lacks(all_options()[name], known)}


def changed(family: str, values: Mapping[str, object]) -> dict[str, object]:
    """Return the options, by name, that differ from the family's defaults, and the family."""
    defaults = FAMILIES[family].defaults
    return {
        name: value
        for name, value in values.items()
        if name == "model_family"
        or (value is not None and value != defaults.get(name, all_options()[name].default))
    }
