"""What is left out of the training: iterations that are named, and the samples that led to a spike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megazero.config.options.fields import option

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class SkippingConfig:
    """Iterations whose samples are consumed without an update: those named, and those undone after a spike."""

    STRICT: ClassVar[bool] = True

    skip_train_iteration_range: tuple[str, ...] = option(
        (),
        "iterations to leave out, such as 101-200 251: their samples are consumed without an update, the learning "
        "rate's schedule waits, and what is due at one of them (an evaluation, a save) comes after the last",
        aliases=("iterations-to-skip",),
    )
    rollback_on_spike: bool = option(
        False,
        "after a spike (or a loss or norm that is not finite), go back to the newest checkpoint from before "
        "it, which is never deleted, and leave out the iterations from there to the end of the spike",
    )
    max_rollbacks: int = option(3, "rollbacks after which the next spike ends the run with an error", low=1)
    spike_window: int = option(
        100,
        "good iterations whose median loss and norm are the usual ones; while there are fewer, nothing is a spike",
        low=1,
    )
    spike_loss_bound: float = option(0.5, "nats by which a spike's loss is above the usual one", above=0)
    spike_norm_bound: float = option(
        10.0, "times by which a spike's gradient norm (before clipping) is above the usual one", above=1
    )
    spike_iterations: int = option(
        10,
        "iterations in a row beyond either bound that make a spike; a run recovers from shorter ones",
        low=1,
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
