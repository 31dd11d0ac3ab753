"""--deepspeed-config reads DeepSpeed's JSON. Its keys mean something here, have no effect, or are not built."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megazero.bounded import load_json, read_bytes
from megazero.config.errors import WRONG_PATH
from megazero.config.foreign.table import ACCEPT, MAP, REFUSE, Row, rows
from megazero.config.nearest import did_you_mean
from megazero.config.options.fields import show
from megazero.config.read.sources import Layer
from megazero.config.run import all_options

FILE = "deepspeed.tsv"
CONVERT = "convert"  # a heading of it
ALWAYS_ON = (
    "sparse_attention",
    "compression_training",
    "zero_optimization.zeropp_loco_param",
)  # blocks without a switch
SET_ASIDE = ("optimizer", "scheduler")
# One rule says who decides: what DeepSpeed's engine does, its file decides, by DeepSpeed's own defaults where a key
# is not there. What Megatron makes and passes to it, the optimizer and its schedule, flags decide.
DECIDES = "the file decides what DeepSpeed's engine does, and Megatron's flags do not"
CLIP = 1.0  # of gradient_clipping, since June 2026; before it was 0
# Of the block fp16: key -> (our field, DeepSpeed's own default).
LOSS_SCALE: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "fp16.loss_scale": ("loss_scale", 0),
        "fp16.initial_scale_power": ("initial_loss_scale", 16),
        "fp16.loss_scale_window": ("loss_scale_window", 1000),
        "fp16.hysteresis": ("hysteresis", 2),
        "fp16.min_loss_scale": ("min_loss_scale", 1),
    }
)
SECTIONS = ("zero_optimization", "bf16", "fp16", "data_types")
# What asks for nothing where fp16 is off.
FP16_TUNING = (
    *LOSS_SCALE,
    *("fp16.auto_cast", "fp16.consecutive_hysteresis", "fp16.fp16_master_weights_and_grads"),
)
OLD_NAMES: Mapping[str, str] = MappingProxyType({"bfloat16": "bf16"})


def keys() -> Mapping[str, Row]:
    """Return the row of each key that is known."""
    return {name: row for name, (row,) in rows(FILE).items()}


def read_deepspeed(path: str) -> Layer:
    """Return a layer of the values that the file sets. Faults are collected in its errors and never raised."""
    layer = Layer(path)
    content = _load(layer, path)
    if content is None:
        return layer
    said = dict(_flat(layer, content))
    for key, value in said.items():
        _put(layer, key, value, said)
    _clip(layer, said)
    _group(layer, said)
    if "zero_shard" in layer.values:  # MiCS is a form of stage 3
        layer.values.pop("zero_stage", None)
    return layer


def _flat(layer: Layer, content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each key, with its section's name before it. How fp16 scales its loss is left out where fp16 is off."""
    for written, value in content.items():
        key = OLD_NAMES.get(written, written)
        if key not in SECTIONS:
            yield key, value
        elif isinstance(value, dict):
            silent = FP16_TUNING if key == "fp16" and value.get("enabled", False) is False else ()
            yield from ((f"{key}.{k}", v) for k, v in value.items() if f"{key}.{k}" not in silent)
        elif value not in (None, False):
            layer.errors.append(f"{layer.source}: {written} takes an object, got {value!r}")


def _asks(key: str, value: Any) -> bool:
    """Tell whether a key asks for something, by DeepSpeed's defaults. A block without its switch is off."""
    if not isinstance(value, dict):
        return value not in (False, None)
    if key in ALWAYS_ON:
        return bool(value)
    switch = value.get("device", value.get("enabled"))
    return switch not in (False, None, "none")


def _group(layer: Layer, said: Mapping[str, Any]) -> None:
    """Write one line for all keys that have one cause."""
    known = {key: keys()[key] for key in said if key in keys()}
    without = [key for key in known if _without_effect(known[key])]
    if without:
        layer.notes.append(
            f"{layer.source}: no effect here, where it is always so or is decided elsewhere "
            f"(docs/reference/flags.md): "
            f"{', '.join(without)}"
        )
    causes: dict[str, list[str]] = {}
    for key, row in known.items():
        if row.kind == REFUSE and said[key] != "auto" and _asks(key, said[key]):
            causes.setdefault(row.text, []).append(key)
    for cure, asked in causes.items():
        verb = "is" if len(asked) == 1 else "are"
        layer.errors.append(f"{layer.source}: {', '.join(asked)} {verb} not supported: {cure}")
    automatic = [key for key, value in said.items() if value == "auto" and key not in without]
    if automatic:
        mapped = (keys()[key].options for key in automatic if key in keys())
        flags = [all_options()[name].flag for options in mapped for name in options]
        use = f" and use {', '.join(flags)}" if flags else ""
        layer.errors.append(
            f"{layer.source}: {', '.join(automatic)} cannot be 'auto', which Hugging Face's Trainer fills in: write "
            f"the value, or leave the key out{use}"
        )


def _without_effect(row: Row) -> bool:
    return row.kind == ACCEPT and not row.value


def _load(layer: Layer, path: str) -> dict[str, Any] | None:
    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        layer.errors.extend(
            f"{path}: {n} stands there twice" for n in sorted({n for n in names if names.count(n) > 1})
        )
        return dict(pairs)

    try:
        content = load_json(read_bytes(path), object_pairs_hook=no_twins)
    except WRONG_PATH as error:
        layer.errors.append(f"--deepspeed-config {path} cannot be read: {error.strerror or error}")
        return None
    except ValueError as error:
        layer.errors.append(f"--deepspeed-config {path} is not JSON: {error}")
        return None
    if not isinstance(content, dict):
        layer.errors.append(f"--deepspeed-config {path} holds no JSON object")
        return None
    return content


def _put(layer: Layer, key: str, value: Any, said: Mapping[str, Any]) -> None:
    where, row = f"{layer.source}: {key}", keys().get(key)
    if value == "auto" or (row is not None and (row.kind == REFUSE or _without_effect(row))):
        return  # _group
    if row is None:
        layer.errors.append(f"{where} is not supported{did_you_mean(key, keys())}; leave it out")
    elif value is None:  # as if it were not there
        return
    elif row.kind == MAP:
        option = all_options()[next(iter(row.options))]
        layer.put(option, _whole(value) if option.kind == "int" else value, where)
    elif row.kind == CONVERT:
        _convert(layer, row, _whole(value), said)
    elif value == row.value:
        layer.notes.append(f"{where}: {row.text}")
    else:
        layer.errors.append(
            f"{where} cannot be {value!r}: {row.text}; leave it out or set {json.dumps(row.value)}"
        )


def _whole(value: Any) -> Any:
    """Return whole numbers as JSON files have them, 5e7 and "5e8", as int. Anything else is returned as it is."""
    try:
        number = float(value) if isinstance(value, str | float) else None
    except ValueError:
        return value
    return int(number) if number is not None and number.is_integer() else value


def _convert(layer: Layer, row: Row, value: Any, said: Mapping[str, Any]) -> None:
    key = row.name
    where = f"{layer.source}: {key}"
    put: Callable[[str, Any], None] = lambda name, v: layer.put(all_options()[name], v, where)  # noqa: E731
    if key.endswith(".enabled"):
        if not isinstance(value, bool):
            layer.errors.append(f"{where} takes true or false, got {value!r}")
        elif value:
            put("params_dtype", key.removesuffix(".enabled"))
            if key == "fp16.enabled":
                _loss_scale(layer, said)
    elif key in LOSS_SCALE:
        if said["fp16.enabled"] is not True:  # else they are read with it
            layer.notes.append(f"{where} {show(value)} is left out: fp16.enabled is not true")
    elif key == "gradient_clipping":
        pass  # _clip reads it, also where the file lacks it
    elif key == "fp16.auto_cast":
        layer.notes.append(f"{where} {row.text}")
    elif key in SET_ASIDE:
        if value:
            layer.notes.append(f"{where} is {row.text}")
    elif not isinstance(value, int) or isinstance(value, bool):
        layer.errors.append(f"{where} takes a whole number, got {value!r}")
    elif key == "gradient_accumulation_steps":
        if value < 1:
            layer.errors.append(f"{where} {value} must be at least 1; nearest: 1")
        layer.values["gradient_accumulation_steps"] = value
    elif key.endswith("mics_shard_size"):
        if value > 0:  # -1, DeepSpeed's default, is off
            put("zero_shard", [value] * 3)
    elif key.endswith("zero_hpz_partition_size"):
        if value != 1:  # 1, DeepSpeed's default, is off
            put("zero_hpz_partition_size", value)
    else:
        width = 2 if True in (said.get("bf16.enabled"), said.get("fp16.enabled")) else 4
        layer.notes.append(
            f"{where}: {value} elements of {width} bytes are --zero-prefetch-bytes {value * width}"
        )
        put("zero_prefetch_bytes", value * width)


def _clip(layer: Layer, said: Mapping[str, Any]) -> None:
    """Take over how far gradients are clipped."""
    value, where = said.get("gradient_clipping"), f"{layer.source}: gradient_clipping"
    if value == "auto":
        return
    if value is None:
        value = CLIP
        layer.notes.append(
            f"{where} is not there: gradients are clipped at {CLIP}, DeepSpeed's default since June 2026. Before it "
            'was none: write "gradient_clipping": 0 to repeat such a run'
        )
    layer.put(all_options()["clip_grad"], value, where)
    if "clip_grad" in layer.values:
        layer.final["clip_grad"] = DECIDES


def _loss_scale(layer: Layer, said: Mapping[str, Any]) -> None:
    """Take over the whole block about the loss scale, with DeepSpeed's defaults for the keys that it leaves out."""
    for key, (name, default) in LOSS_SCALE.items():
        value, where = said.get(key, default), f"{layer.source}: {key}"
        if value == "auto":
            value = default
        if key == "fp16.initial_scale_power":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 127:
                layer.errors.append(f"{where} takes a whole number from 0 to 127, got {value!r}")
                continue
            value = 2.0**value
        layer.put(all_options()[name], value, where)
        if name in layer.values:
            layer.final[name] = DECIDES
