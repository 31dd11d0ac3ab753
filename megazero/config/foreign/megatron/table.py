"""The one table of Megatron's flags that are no options of megazero: what each means here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from megazero.config.foreign.megatron.accepted import ACCEPTED
from megazero.config.foreign.megatron.limited import LIMITED
from megazero.config.foreign.megatron.mapped import BY_VALUE, CONDITIONAL, RENAMED, SWITCHES, TYPED, Sets
from megazero.config.foreign.megatron.other_programs import OTHER_PROGRAMS
from megazero.config.foreign.megatron.refused import REFUSED

MAP, ACCEPT, REFUSE = "MAP", "ACCEPT", "REFUSE"


@dataclass(frozen=True)
class Row:
    """This is one flag of Megatron.

    ``kind`` is MAP (to options of megazero), ACCEPT (it changes nothing here) or REFUSE (it is not built here).
    ``words`` says how many values follow: 0, 1, ? (none or one), * (any number) or + (at least one).
    ``text`` is the reason of ACCEPT. ``cure`` is what to do instead of REFUSE, or of values that are not taken.
    ``sets`` are the options of MAP. ``values`` are the values that are taken, with the options that they set; the key
    TYPED stands for all others. Empty, any value is taken.
    """

    name: str
    kind: str
    words: str = "0"
    text: str = ""
    cure: str = ""
    sets: Sets = field(default_factory=dict)
    values: Mapping[str, Sets] = field(default_factory=dict)

    def meaning(self, words: list[str]) -> Sets | None:
        """Return the options that the flag sets with these values, or None if they are not taken."""
        if not self.values:
            return self.sets
        taken = [self.values.get(word, self.values.get(TYPED)) for word in words]
        return None if None in taken or not taken else taken[0]


@lru_cache(maxsize=1)
def rows() -> Mapping[str, Row]:
    """Return the row of each name, which is a flag without its dashes."""
    table: dict[str, Row] = {}
    for row in _rows():
        assert row.name not in table, f"{row.name} stands twice in the table"
        table[row.name] = row
    return MappingProxyType(table)


def _rows() -> Iterator[Row]:
    for reason, names in ACCEPTED:
        yield from (Row(name, ACCEPT, words, text=reason) for name, words in _names(names))
    for written, (values, reason, cure) in LIMITED.items():
        ((name, words),) = _names(written)
        legal: Mapping[str, Sets] = dict.fromkeys(values.split(), {})
        yield Row(name, ACCEPT, words, text=reason, cure=cure, values=legal)
    for name, (_, _, reason, cure) in CONDITIONAL.items():
        yield Row(name, ACCEPT, text=reason, cure=cure)
    for written, option in RENAMED.items():
        ((name, words),) = _names(written)
        yield Row(name, MAP, "1" if words == "0" else words, sets={option: TYPED})
    for name, sets in SWITCHES.items():
        yield Row(name, MAP, sets=sets)
    for name, (by_value, cure) in BY_VALUE.items():
        yield Row(name, MAP, "1", cure=cure, values=by_value)
    for cure, names in (*REFUSED, *OTHER_PROGRAMS):
        yield from (Row(name, REFUSE, words, cure=cure) for name, words in _names(names))


def _names(text: str) -> Iterator[tuple[str, str]]:
    """Yield each name of a text with how many values follow it."""
    for written in text.split():
        name, _, words = written.partition("=")
        yield name, words or "0"
