"""A completion sets options by others: a pure function that is given what it says it reads, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config.options.fields import MANY
from megazero.config.read.beginning import Beginning
from megazero.config.read.sources import Layer
from megazero.config.run import World, all_options

Values = Mapping[str, Any]  # by option name; what is not said is absent


@dataclass(frozen=True)
class Known:
    """What a completion knows beside options.

    beginning: what the folders of --load and --save say, or None before they are read. path, saved: the checkpoint of
    a run that goes on, and its options by name; None and {} where a new run begins.
    """

    said: Layer
    world: World | None = None
    beginning: Beginning | None = None
    path: Path | None = None
    saved: Values = field(default_factory=dict)

    @classmethod
    def of(cls, said: Layer, world: World | None, beginning: Beginning | None) -> Known:
        """Return what is known of a run with the values of ``said``."""
        manifest = beginning.manifest if beginning else None
        if beginning is None or manifest is None or not beginning.goes_on(said.values):
            return cls(said, world, beginning)
        saved = (pair for section in manifest.configuration.values() for pair in section.items())
        now = {name: _as_now(name, value) for name, value in saved}
        return cls(said, world, beginning, beginning.path, now)


def _as_now(name: str, value: Any) -> Any:
    """Return a checkpoint's value: a tuple for a list of JSON, and for one value where several may stand now."""
    option = all_options().get(name)
    several = option is not None and option.kind in MANY and value is not None
    return tuple(value if isinstance(value, list) else [value]) if several else value


class Completed(NamedTuple):
    """What a completion sets, by name (None unsets), and lines for the user.

    loaded: names whose values --load gave. failed: names by which nothing may be judged.
    """

    values: Values = MappingProxyType({})
    notes: Sequence[str] = ()
    errors: Sequence[str] = ()
    loaded: Collection[str] = ()
    failed: Collection[str] = ()


class Completion(NamedTuple):
    """A step on the way to a configuration: what it reads, what it may set, and how."""

    complete: Callable[[Values, Known], Completed]
    reads: Collection[str]
    writes: Collection[str] = ()


def complete_by(completions: Iterable[Completion], known: Known) -> Completed:
    """Return what was said, completed by each in turn, with all that they say."""
    values = dict(known.said.values)
    notes, errors, loaded, failed = list[str](), list[str](), set[str](), {*known.said.failed}
    for each in completions:
        found = each.complete({name: values[name] for name in each.reads if name in values}, known)
        others = found.values.keys() - {*each.writes}
        assert not others, f"{each.complete} sets {others}"
        values |= found.values
        for name in [name for name, value in found.values.items() if value is None]:
            del values[name]
        notes += found.notes
        errors += found.errors
        loaded.update(found.loaded)
        failed.update(found.failed)
    return Completed(values, notes, errors, loaded, failed)


def section_names(section: str) -> tuple[str, ...]:
    """Return the names of a section's options."""
    return tuple(name for name, opt in all_options().items() if opt.section == section)


def set_since(before: Values, now: Values) -> dict[str, Any]:
    """Return what differs from ``before``: None is unset."""
    names = {**before, **now}
    return {name: now.get(name) for name in names if name not in before or before[name] != now.get(name)}
