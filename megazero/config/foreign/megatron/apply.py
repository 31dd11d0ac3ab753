"""This module takes Megatron's flags into a layer: what each one sets, one note on what changes nothing, errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megazero.config.foreign.megatron.mapped import CONDITIONAL, DERIVED, TYPED
from megazero.config.foreign.megatron.table import MAP, REFUSE, Row, rows
from megazero.config.options.fields import Option, show
from megazero.config.run import all_options

if TYPE_CHECKING:  # layers.py reads this module
    from megazero.config.read.sources import Layer

COUNTS = {"0": "no value", "1": "one value", "?": "at most one value", "+": "at least one value"}


def take(layer: Layer, row: Row, typed: str, words: Sequence[str]) -> None:
    """Take one flag, as it was typed and with its values. What it sets is settled by ``conclude``."""
    fits = {"0": not words, "1": len(words) == 1, "?": len(words) < 2, "+": bool(words), "*": True}
    if not fits[row.words] and row.kind != REFUSE:
        layer.errors.append(f"{typed} takes {COUNTS[row.words]}, got {' '.join(words) or 'none'}")
        return
    meaning = row.meaning(list(words))
    if row.kind == REFUSE or meaning is None:
        shown = typed if row.kind == REFUSE else f"{typed} {' '.join(words)}"
        layer.refused.setdefault(row.cure, []).append(shown)
    elif row.kind == MAP and row.words == "?" and not words:
        layer.notes.append(f"{typed} has no value and is left out")
    elif row.kind == MAP:
        for name, value in meaning.items():
            layer.implied.append((name, words[0] if value == TYPED else value, " ".join([typed, *words])))
    else:
        layer.facts.append(row.name)


def conclude(layer: Layer) -> None:
    """Settle what the flags of Megatron in this layer mean, after all of it is read."""
    for cure, typed in layer.refused.items():
        flags = "Megatron's flag" if len(typed) == 1 else "Megatron's flags"
        verb = "is" if len(typed) == 1 else "are"
        layer.errors.append(f"{', '.join(dict.fromkeys(typed))} {verb} {flags}, not built here: {cure}")
    meanings = dict.fromkeys(line for each in _last(layer) for line in _settle(layer, *each))
    if meanings:
        layer.notes.append(f"Megatron's names: {'; '.join(meanings)}")
    layer.refused.clear()
    layer.implied.clear()


def _last(layer: Layer) -> Iterable[tuple[str, Any, str]]:
    """Return what mapped flags give to options. Of a flag that stands twice the last one counts, with a note."""
    last: dict[tuple[str, str], tuple[str, Any, str]] = {}
    for name, value, typed in layer.implied:
        key = (name, typed.split()[0])
        if key in last and last[key][1] != value:
            layer.notes.append(f"{typed} replaces the earlier {last[key][2].partition(' ')[2]}")
        last[key] = (name, value, typed)
    return last.values()


def _settle(layer: Layer, name: str, raw: Any, typed: str) -> Iterator[str]:
    """Put the value of a mapped flag, unless the option itself says another one. Yields what the flag means."""
    option = derived_options()[name] if name in DERIVED else all_options()[name]
    given = layer.values.pop(name, None)
    layer.put(option, raw, typed)
    value = layer.values.get(name, given)
    if given is not None and given != value:
        layer.errors.append(
            f"{typed} is {spelled(option, value)}, but {spelled(option, given)} is given; leave one of them out"
        )
        layer.failed.add(name)
    elif value is not None and name not in DERIVED:
        yield f"{typed} is {spelled(option, value)}"


def spelled(option: Option, value: Any) -> str:
    """Return an option with its value as it is typed."""
    if option.kind == "bool":
        return option.flag if value else f"--{option.negative_key}"
    return f"{option.flag} {show(value)}"


def derived_options() -> Mapping[str, Option]:
    """Return the values that only Megatron has, from which derived.py makes options."""
    return {name: Option(name, "derived", "int", None, "", low=1) for name in DERIVED}


def accepted_note(names: Sequence[str]) -> list[str]:
    """Return one note on all flags that change nothing here, grouped by the reason."""
    reasons: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        reasons.setdefault(rows()[name].text, []).append(f"--{name}")
    groups = (f"{', '.join(flags)} ({reason})" for reason, flags in reasons.items())
    return [f"these flags of Megatron change nothing here: {'; '.join(groups)}"] if reasons else []


def unmet_conditions(names: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return an error for each accepted flag that would change something with these values of options."""
    found = ((name, CONDITIONAL[name]) for name in dict.fromkeys(names) if name in CONDITIONAL)
    return [
        f"--{name} is Megatron's flag, not built here: {cure}"
        for name, (option, legal, _, cure) in found
        if values.get(option) not in legal
    ]
