"""This module says what was probably meant by a flag that does not exist.

It looks among megazero's flags, Megatron's (megatron/table.py), DeepSpeed's keys and torchtitan's names, and answers
with what that name is here. It is read only after an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from heapq import nlargest

from megazero.config.foreign.elsewhere import HUGGING_FACE, deepspeed_names, torchtitan_names
from megazero.config.foreign.megatron.apply import derived_options, spelled
from megazero.config.foreign.megatron.mapped import DERIVED, TYPED, UNFUSED_GELU, UNFUSED_GELU_MEANS
from megazero.config.foreign.megatron.table import ACCEPT, REFUSE, rows
from megazero.config.read.sources import all_switches
from megazero.config.run import all_options

WORD = 1.6  # cost of a word too many or too few, in letters
CANDIDATES = 40  # names that share the most pairs of letters, for which costs are computed
MOST_COST = 3  # a word and a letter; less than another word in the place of one
MOST = 3  # names that are shown where several are equally near


def suggestion(key: str, prefix: str = "--", extra: Sequence[str] = ()) -> str:
    """Return '; nearest: X' with what X is, or '' where no name is near. ``extra`` has further legal names."""
    own = dict.fromkeys((*all_switches(), *extra))  # in one order
    programs = {
        "DeepSpeed": deepspeed_names(),
        "torchtitan": torchtitan_names(),
        "Hugging Face": HUGGING_FACE,
    }
    found = nearest(key, [*own, *rows(), *(name for names in programs.values() for name in names)])
    meant: list[str] = []
    for name in found:
        if name in own:
            meant.append(prefix + name)
        elif name in rows():
            meant.append(f"{prefix}{name} ({_meaning(name)})")
        else:
            meant += [
                _elsewhere(name, program, names) for program, names in programs.items() if name in names
            ][:1]
    return f"; nearest: {' or '.join(dict.fromkeys(meant))}" if meant else ""


def _meaning(name: str) -> str:
    """Say what a flag of Megatron is here."""
    row = rows()[name]
    if row.kind == REFUSE:
        return f"Megatron's, not built here: {row.cure}"
    if row.kind == ACCEPT:
        return "Megatron's, changes nothing here"
    if UNFUSED_GELU in row.sets:
        return f"Megatron's, here {UNFUSED_GELU_MEANS}"
    options = {**all_options(), **derived_options()}
    sets = row.sets or next(each for each in row.values.values() if each)
    said = [
        options[name].flag if value == TYPED else spelled(options[name], value)
        for name, value in sets.items()
        if value == TYPED or name not in DERIVED
    ]
    return f"Megatron's, here {' '.join(said)}"


def _elsewhere(name: str, program: str, names: Mapping[str, str]) -> str:
    written = name.replace("-", "_")
    if names[name]:
        return f"{all_options()[names[name]].flag} ({program}'s {written})"
    where = "a key of --deepspeed-config" if program == "DeepSpeed" else "nothing here is like it"
    return f"{program}'s {written} ({where})"


def nearest(word: str, known: Collection[str]) -> list[str]:
    """Return the known names that ``word`` is most probably a misspelling of: none, or at most MOST.

    The cost of a name is the number of letters that were added, dropped, replaced or swapped, or WORD for a word that
    was added or dropped.
    """
    word = word.lower()
    if word in known:
        return [word]
    pairs = _pairs(word)
    shared = {name: len(pairs & _pairs(name)) / (len(word) + len(name)) for name in set(known)}
    likely = nlargest(CANDIDATES, sorted(shared), key=shared.__getitem__)
    costs = {name: cost(word, name) for name in likely}
    least = min(costs.values(), default=0.0)
    if least > min(0.3 * len(word), MOST_COST):
        return []
    best = [name for name in likely if costs[name] == least]
    order = {name: place for place, name in enumerate(known)}
    return sorted(best, key=order.__getitem__)[:MOST]


def cost(word: str, name: str) -> float:
    """Return how much has to be changed in ``name`` to make ``word`` of it."""
    parts = [text.replace(".", "-").split("-") for text in (word, name)]
    return min(float(_letters(word, name)), _words(*parts))


@cache
def _pairs(text: str) -> frozenset[str]:
    padded = f"-{text.replace('.', '-')}-"
    return frozenset(padded[i : i + 2] for i in range(len(padded) - 1))


def _letters(a: str, b: str) -> int:
    """Return the restricted Damerau-Levenshtein distance (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row, before = before, [i], row
        for j, y in enumerate(b, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                best = min(best, last[j - 2] + 1)
            row.append(best)
    return row[-1]


def _words(a: Sequence[str], b: Sequence[str]) -> float:
    """Return the distance in words: one too many or too few costs WORD, another one costs its letters."""
    row: list[float] = [j * WORD for j in range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        before, row = row, [i * WORD]
        for j, y in enumerate(b, 1):
            same: Iterable[float] = (before[j] + WORD, row[j - 1] + WORD, before[j - 1] + _letters(x, y))
            row.append(min(same))
    return row[-1]
