"""Iterations that are left out of the training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megazero.config.options.fields import SHORT, Resume, option

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class SkippingConfig:
    """Iterations whose samples are consumed without an update."""

    STRICT: ClassVar[bool] = True
    SMALL: ClassVar = SHORT
    RESUME: ClassVar = Resume.BY_NAME

    skip_train_iteration_range: tuple[str, ...] = option(
        (),
        "iterations to leave out, such as 101-200 251: their samples are consumed without an update, the learning "
        "rate's schedule waits, and what is due at one of them (an evaluation, a save) comes after the last",
        aliases=("iterations-to-skip",),
    )


def iteration_ranges(words: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return (first, last) of each range of iterations, in order, with ranges that touch made one.

    Raises ValueError, which names the word and the rule.
    """
    return joined(map(_range, words))


def joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return (first, last) of each range in order, with ranges that touch made one."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def _range(word: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(word)
    if found is None:
        raise ValueError(f"{word} is neither an iteration nor FIRST-LAST, such as 101-200")
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last:
        raise ValueError(
            f"{word}: iterations count from 1, and the last is not before the first; nearest: "
            f"{max(1, min(first, last))}-{max(1, first, last)}"
        )
    return first, last


def range_around(ranges: Iterable[tuple[int, int]], iteration: int) -> tuple[int, int] | None:
    """Return the range that ``iteration`` is in, or None."""
    return next((each for each in ranges if each[0] <= iteration <= each[1]), None)


def due(interval: int | None, since: int, iteration: int) -> bool:
    """Tell whether a multiple of ``interval`` is among the iterations after ``since``, up to ``iteration``.

    All that comes at intervals asks this: a multiple may be among iterations that are passed over. None, 0: never.
    """
    return iteration // interval > since // interval if interval else False
