"""What an option needs to have an effect: the words of ``option(..., needs=...)``, and of a class's ``NEEDS``.

A need is 'name' or 'name: words for people'. The name is that of an option, or of a fact (validate.py: facts). A need
holds where the option is set ('save', 'not finetune') or has a value ('outer_bits < 32', 'optimizer = adamw|muon',
'lr_decay_style != constant'); an option without a value meets no comparison. Of needs with 'or' between them one is
enough. An error names the first need of an option that is not met.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from megazero.config.options.fields import Option, typed

_NEED = re.compile(r"(not )?(\w+)(?: (>|<|!?=) (\S+))?")
_WORDS = {">": "above ", "<": "below ", "=": "", "!=": "other than "}


class Need(NamedTuple):
    """The option or fact that a need names, what holds of its value, and what a user would add."""

    name: str
    holds: Callable[[Any], bool]
    words: str


@cache
def read_need(text: str) -> tuple[tuple[Need, ...], str]:
    """Return the needs of a text, of which one is enough, and what would meet it."""
    wanted, _, cure = text.partition(": ")
    found = tuple(_need(each) for each in wanted.split(" or "))
    return found, cure or found[0].words


def _need(text: str) -> Need:
    match = _NEED.fullmatch(text)
    assert match, f"{text!r} is no need"
    negated, name, comparison, wanted = match.groups(default="")
    values = frozenset(wanted.split("|"))
    bound = float(wanted) if comparison in (">", "<") else 0.0

    def equal(value: Any) -> bool:
        return value in values or isinstance(value, tuple) and not values.isdisjoint(value)

    holds: dict[str, Callable[[Any], bool]] = {
        "": operator.not_ if negated else bool,
        ">": lambda value: value is not None and (max(value) if isinstance(value, tuple) else value) > bound,
        "<": lambda value: value is not None and value < bound,
        "=": equal,
        "!=": lambda value: value is not None and not equal(value),
    }
    said = f" {_WORDS[comparison]}{' or '.join(wanted.split('|'))}" if comparison else ""
    return Need(name, holds[comparison], f"--{name.replace('_', '-')}{said}")


def lacks(opt: Option, known: Mapping[str, Any]) -> str:
    """Return what would give the option an effect, or '' if it has one.

    known: options and facts by name. Needs that are not among them are taken as met.
    """
    for needs, cure in map(read_need, opt.needs):
        if all(need.name in known for need in needs) and not any(n.holds(known[n.name]) for n in needs):
            return cure
    return ""


def without_effect(
    options: Iterable[Option],
    values: Mapping[str, Any],
    facts: Mapping[str, Any],
    defaults: Mapping[str, Any],
    broken: Collection[str] = (),
) -> Iterator[tuple[Option, str]]:
    """Yield each option that was changed although it lacks what it needs, with a line that says it.

    ``defaults`` has those that are not the option's own, because a family decides them. ``broken`` has the names that
    were reported already: nothing is judged by them.
    """
    known = {**{name: value for name, value in values.items() if name not in broken}, **facts}
    for opt in options:
        value = values[opt.name]
        if opt.name in broken or value in (opt.default, defaults.get(opt.name, opt.default)):
            continue
        if cure := lacks(opt, known):
            yield opt, f"{typed(opt, value)} has no effect without {cure}; leave it out or add that"
