"""Takes Megatron's flags into a layer: what each one sets, one note on what changes nothing, errors.

megatron.tsv says what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from megazero.config.foreign.derived import DERIVED
from megazero.config.foreign.table import ACCEPT, MAP, REFUSE, TYPED, Row, rows
from megazero.config.options.fields import Option, convert, fault, of_script, show
from megazero.config.options.fields import typed as spelled
from megazero.config.read.sources import Conditional, Layer, all_switches
from megazero.config.run import all_options

FILE = "megatron.tsv"
COUNTS = {
    "": "no value",
    "X": "one value",
    "[X]": "at most one value",
    "X ...": "at least one value",
    "[X ...]": "any values",
}


OPEN = {"attention_backend": "auto"}  # values that leave it to what else is said
# By option and flag of Megatron: the value that the flag gives, and what was typed after it.
Implied = dict[tuple[str, str], tuple[Any, str]]


def flags() -> Mapping[str, tuple[Row, ...]]:
    """Return the rows of each flag that is no option of megazero, without its dashes."""
    return _apart()[0]


def other_values() -> Mapping[str, tuple[Row, ...]]:
    """Return the rows of options' values that Megatron spells otherwise or alone has, by the option's key."""
    return _apart()[1]


@lru_cache(maxsize=1)
def _apart() -> tuple[Mapping[str, tuple[Row, ...]], Mapping[str, tuple[Row, ...]]]:
    table, own = rows(FILE), all_switches()
    return {n: r for n, r in table.items() if n not in own}, {n: r for n, r in table.items() if n in own}


def kind(name: str) -> str:
    """Return what the first row of a flag does with it: MAP, ACCEPT or REFUSE."""
    return flags()[name][0].kind


def take(layer: Layer, words: Iterable[tuple[str, str, Sequence[str]]]) -> None:
    """Take flags of Megatron into a layer after its own words: (name, as it was typed, the words after it)."""
    respell(layer)
    refused: dict[str, list[str]] = {}
    implied: Implied = {}
    for name, flag, values in words:
        meant = flags()[name]
        if not _fits(meant[-1].value, len(values)) and kind(name) != REFUSE:
            got = " ".join(values) or f"none{of_script(flag)}"
            layer.errors.append(f"{flag} takes {COUNTS[meant[-1].value]}, got {got}")
            continue
        row = _meaning(meant, values)
        if row.kind == REFUSE:
            refused.setdefault(row.text, []).append(" ".join([flag, *values]) if len(meant) > 1 else flag)
        elif row.kind == ACCEPT:
            layer.accepted.append(name)
            if row.options:
                layer.conditions.append(Conditional(name, " ".join([flag, *values]), row.options))
        elif row.value == "[X]" and not values:
            layer.notes.append(f"{flag} has no value and is left out")
        else:
            _imply(layer, implied, row, flag, " ".join(values))
    layer.errors += [_not_built(typed, cure) for cure, typed in refused.items()]
    said = [
        line
        for (option, flag), (value, typed) in implied.items()
        for line in _put(layer, option, value, f"{flag} {typed}".rstrip())
    ]
    if said:
        layer.notes.append(f"Megatron's names: {'; '.join(dict.fromkeys(said))}")


def respell(layer: Layer) -> None:
    """Replace values that Megatron spells otherwise by those of megazero, with a note. Errors for those not built."""
    for name, value in list(layer.values.items()):
        option = all_options().get(name)
        if option is None or not fault(option, value):
            continue
        row = next((row for row in other_values().get(option.key, ()) if row.value == show(value)), None)
        if row is not None and row.kind == MAP:
            layer.values[name] = convert(option, row.options[name])
            layer.notes.append(f"{option.flag} {value} is {row.options[name]}")
            for other in row.options.keys() - {name}:
                layer.notes += _put(layer, other, row.options[other], f"{option.flag} {value}")
        elif row is not None:
            del layer.values[name]
            layer.failed.add(name)
            layer.errors.append(f"{option.flag} {show(value)} is Megatron's, not built here: {row.text}")


def _fits(form: str, count: int) -> bool:
    return {"": count == 0, "X": count == 1, "[X]": count < 2, "X ...": count > 0, "[X ...]": True}[form]


def _meaning(meant: Sequence[Row], values: Sequence[str]) -> Row:
    """Return the row of these values: the first refused one, or that of the first value."""
    named = {value: row for row in reversed(meant) for value in row.value.split(",")}
    other = next((row for row in meant if row.value in COUNTS), meant[-1])
    found = [named.get(value, other) for value in values] or [meant[0]]
    return next((row for row in found if row.kind == REFUSE), found[0])


def _imply(layer: Layer, implied: Implied, row: Row, flag: str, typed: str) -> None:
    """Keep the values that a mapped flag gives to options. If it stands twice, the last one counts, with a note."""
    for name, text in row.options.items():
        value = typed if text == TYPED else text
        before, before_typed = implied.get((name, flag), (value, ""))
        if before != value:
            layer.notes.append(f"{flag} {typed} replaces the earlier {before_typed}")
        implied[name, flag] = value, typed


def _put(layer: Layer, name: str, raw: Any, whole: str) -> Iterator[str]:
    """Put the value of a mapped flag, unless the option itself says another one. Yields what the flag means."""
    option = derived_options()[name] if name in DERIVED else all_options()[name]
    given = layer.values.pop(name, None)
    given = None if given == OPEN.get(name) else given
    layer.put(option, raw, whole)
    value = layer.values.get(name, given)
    if given is not None and given != value:
        layer.errors.append(
            f"{whole} is {spelled(option, value)}, but {spelled(option, given)} is given; leave one of them out"
        )
        layer.failed.add(name)
    elif value is not None and name not in DERIVED:
        yield f"{whole} is {spelled(option, value)}"


def derived_options() -> Mapping[str, Option]:
    """Return the values that only Megatron has, from which derived.py makes options."""
    kinds = dict.fromkeys(DERIVED, "int") | {"window_size": "ints"}
    return {name: Option(name, "derived", kind, None, "", low=1) for name, kind in kinds.items()}


def accepted_note(names: Sequence[str]) -> list[str]:
    """Return one note on all flags that change nothing here, grouped by the reason."""
    reasons: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        reasons.setdefault(flags()[name][0].text, []).append(f"--{name}")
    groups = (f"{', '.join(typed)} ({reason})" for reason, typed in reasons.items())
    return [f"these flags of Megatron change nothing here: {'; '.join(groups)}"] if reasons else []


def unmet_conditions(conditions: Sequence[Conditional], values: Mapping[str, Any]) -> list[str]:
    """Return an error for each accepted flag that would change something with these values of options."""
    unmet: dict[str, list[str]] = {}
    for name, typed, needs in conditions:
        for option, legal in needs.items():
            if show(values.get(option, all_options()[option].default)) not in str(legal).split(","):
                unmet.setdefault(flags()[name][-1].text, []).append(typed)
    return [_not_built(typed, cure) for cure, typed in unmet.items()]


def _not_built(typed: Sequence[str], cure: str) -> str:
    one = len(typed) == 1
    return (
        f"{', '.join(dict.fromkeys(typed))} {'is' if one else 'are'} Megatron's flag{'' if one else 's'}, not built "
        f"here: {cure}"
    )
