"""Trainings on four ranks of one card, as two nodes of two: without a patch, with it, and with late data.

Where the data of every collective come late, a kernel that did not wait for them would read what was there before.
MEGAZERO_RANKS_ON=cpu runs the same on gloo, without delays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.shared_card import together

DEVICE = os.environ.get("MEGAZERO_RANKS_ON", "cuda")
NEEDS_CARD = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
)
RANKS, SECONDS = 4, 240.0
CYCLES = 1_000_000  # 0.5 ms on an H100
COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
Words = Mapping[str, Any] | None  # what enable takes; None: without the patch
Train = Callable[[Any, Words], Any]
EXACT: Words = {"weights": "none", "gradients": "none"}
# By case, the words' place (0: without the patch) and whether data are late: what each rank says.
Runs = dict[tuple[str, int, bool], tuple[Any, ...]]


@contextmanager
def late() -> Iterator[None]:
    """Let each collective, on whichever stream, begin behind a pause."""

    def behind(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.cuda._sleep(CYCLES)
            return collective(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES if DEVICE == "cuda" else ():
            stack.enter_context(mock.patch.object(dist, name, behind(getattr(dist, name))))
        yield


def one_run(train: Train, case: Any, words: Words, delayed: bool) -> Any:
    with late() if delayed else nullcontext():
        return train(case, words)


def all_runs(train: Train, cases: Mapping[str, tuple[Any, Sequence[Words]]]) -> Runs:
    """Train every case without the patch, and with each of its words, on time and late."""
    keys, work = list[tuple[str, int, bool]](), list[Callable[[], Any]]()
    for name, (case, formats) in cases.items():
        for place, words in enumerate((None, *formats)):
            for delayed in (False, True) if place else (False,):
                keys.append((name, place, delayed))
                work.append(partial(one_run, train, case, words, delayed))
    ranks = together(RANKS, work, torch.device(DEVICE, 0), SECONDS)
    return dict(zip(keys, zip(*ranks, strict=True), strict=True))


def differ_when_late(runs: Runs, name: str) -> list[int]:
    """Return the places of the words under which a case ends otherwise when data are late."""
    return [place for case, place, delayed in runs if case == name and delayed
            and runs[case, place, True] != runs[case, place, False]]  # fmt: skip


def lose_little(losses: Sequence[float], plain: Sequence[float]) -> bool:
    """Tell whether losses by step are others than ``plain``, by less than that gains in its best step."""
    gain = max(before - after for before, after in zip(plain, plain[1:], strict=False))
    return 0 < max(abs(a - b) for a, b in zip(losses, plain, strict=True)) < gain
