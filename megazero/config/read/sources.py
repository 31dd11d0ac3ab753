"""A layer holds the values that one source gives (flags, a YAML file, a DeepSpeed file). Layers are merged here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config.options.fields import Option, convert, show
from megazero.config.run import all_options

# At most one of each group may come from one source; a stronger source replaces the whole group of a weaker one.
EXCLUSIVE = (
    ("zero_shard", "zero_preset", "zero_stage", "zero_hpz_partition_size"),
    ("train_iters", "train_samples"),
    ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    ("global_batch_size", "gradient_accumulation_steps"),
    ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
)


# What a value from a stronger source replaces in weaker ones.
REPLACES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: group for group in EXCLUSIVE for name in group}
    | {"micro_batch_size": ("micro_batch_size", "gradient_accumulation_steps")}
)


@dataclass(frozen=True)
class Switch:
    """A name that may follow '--' or stand in YAML.

    ``sets`` is the value that it means, or None if a value follows.
    """

    option: Option
    sets: Any = None


@lru_cache(maxsize=1)
def all_switches() -> Mapping[str, Switch]:
    """Return the switch of each key (a flag without '--'), for every option of training."""
    return switches(all_options().values())


def switches(options: Iterable[Option]) -> Mapping[str, Switch]:
    """Return the switch of each key, for these options."""
    table: dict[str, Switch] = {}
    for opt in options:
        if opt.kind == "bool":
            table[opt.key], table[opt.negative_key] = Switch(opt, True), Switch(opt, False)
        else:
            table[opt.key] = Switch(opt)
        table.update({key: Switch(opt, value) for key, value in opt.consts.items()})
        table.update({key: Switch(opt) for key in opt.aliases})
        if opt.may_be_none:
            table[opt.negative_key] = Switch(opt, [])
    return MappingProxyType(table)


class Unknown(NamedTuple):
    """A name that is no option. ``prefix`` is what stood before it: dashes, or where in a file it stands.

    ``said`` are the words after it; False and None are YAML's, for what is off and what is left unset.
    ``others`` are names that are legal in the same place beside those of options.
    """

    key: str
    prefix: str
    said: Sequence[str] | bool | None
    others: Sequence[str] = ()


class Conditional(NamedTuple):
    """A flag of Megatron, with the words after it, that changes nothing here while options have one of the values in
    ``needs``, which commas set apart."""

    name: str
    typed: str
    needs: Mapping[str, str | bool]


@dataclass
class Layer:
    """What one source says: values by field name, errors and notes.

    ``final`` has the values that stronger sources do not override, by field name, each with the reason.
    ``unknown`` are the words that are no options here, which parse.py settles. ``accepted`` are the flags of Megatron
    among them that change nothing here, ``conditions`` those of them that change nothing with some values alone.
    ``unread``: the source is a file that cannot be read, so what is missing may stand there.
    """

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    unknown: list[Unknown] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    conditions: list[Conditional] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    final: dict[str, str] = field(default_factory=dict)
    unread: bool = False

    def put(self, opt: Option, raw: Any, name: str) -> None:
        """Convert and keep a value. A second, different one for the same field wins and is noted."""
        try:
            value = convert(opt, raw)
        except ValueError as error:
            self.errors.append(f"{name} {error}")
            self.failed.add(opt.name)
            return
        if opt.name in self.values and self.values[opt.name] != value:
            if opt.consts:
                said = " and ".join(f"--{v}" for v in sorted({str(self.values[opt.name]), str(value)}))
                self.errors.append(f"{said} exclude each other; leave one out")
                self.failed.add(opt.name)
                return
            self.notes.append(f"{name} {show(value)} replaces the earlier {show(self.values[opt.name])}")
        self.values[opt.name] = value


def merge(layers: Sequence[Layer]) -> Layer:
    """Make one layer out of several, which come weakest first. A note says what a stronger layer overrides."""
    out = Layer("merged")
    origin: dict[str, str] = {}
    for layer in layers:
        for name, value in layer.values.items():
            if name in out.final:
                if value != out.values[name]:
                    out.notes.append(
                        f"{name.replace('_', '-')} {show(value)} from {layer.source} gives way to "
                        f"{show(out.values[name])} from {origin[name]}: {out.final[name]}"
                    )
                continue
            for other in REPLACES.get(name, (name,)) if value is not None else (name,):
                if other in out.values and origin[other] != layer.source:
                    old = out.values.pop(other)
                    if (other, old) != (name, value):
                        out.notes.append(
                            f"{name.replace('_', '-')} {show(value) or 'none'} from {layer.source} overrides "
                            f"{other.replace('_', '-')} {show(old)} from {origin[other]}"
                        )
            out.values[name], origin[name] = value, layer.source
        out.final |= layer.final
        out.accepted += [flag for flag in layer.accepted if flag not in out.accepted]
        out.conditions += layer.conditions
        out.errors += layer.errors
        out.notes += layer.notes
        out.failed |= layer.failed
        out.unread = out.unread or layer.unread
    out.failed -= set(out.values)
    return out
