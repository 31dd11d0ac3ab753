"""Training on from the real model: exact steps warm AdamW's moments, then each format goes on from one state."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.loss.rounding.formats import GRADIENTS, Hop, bytes_of
from benchmarks.loss.rounding.text import Samples
from benchmarks.loss.rounding.training import Training

WARM_RATE = 1 / 30  # of the rate
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """senders: nodes, each with ``batch`` sequences of ``length`` tokens a step.

    warm: exact steps before the branches, at ``WARM_RATE``: they warm the moments and leave the learning to the
    branches. steps: of a branch. rate: constant after ``ramp`` steps. SmolLM2-135M was trained at up to 3e-3 with 1M
    tokens a step; by the square root of the batch that is 5e-4 at 32k. exact: parameters of at most so many elements
    are sent exactly. held: sequences that are evaluated on, every ``every`` steps.
    """

    senders: int = 4
    batch: int = 8
    length: int = 1024
    warm: int = 200
    steps: int = 60
    rate: float = 3e-4
    ramp: int = 10
    exact: int = 16384
    held: int = 64
    every: int = 10
    seeds: tuple[int, ...] = (1, 2)


def rows(
    training: Training, samples: Samples, sizes: Sizes, formats: Sequence[str] = tuple(GRADIENTS)
) -> Iterator[Row]:
    """Yield a row for each seed and format. Every format of a seed reads the same samples. Who has no time for more
    stops to ask."""
    held, every, a_step = samples.held(sizes.held, sizes.batch), samples.order(0), sizes.senders * sizes.batch

    def step(hop: Hop, order: Sequence[int], number: int, rate: float) -> None:
        gradients = []
        for first in range(number * a_step, (number + 1) * a_step, sizes.batch):
            batch = samples.at(order[(first + i) % len(order)] for i in range(sizes.batch))
            gradients.append(training.gradient_of([batch]))
        training.update(hop.mean(torch.stack(gradients)), rate)

    for number in range(sizes.warm):
        step(Hop(None, training.layout), every, number, WARM_RATE * sizes.rate)
    state, used = training.state(), sizes.warm * a_step
    unread = every[used % len(every) :] if used < len(every) else every
    for seed in sizes.seeds:
        order = unread[torch.randperm(len(unread), generator=torch.Generator().manual_seed(seed)).numpy()]
        for name in formats:
            training.restore(state)
            hop, began = Hop(GRADIENTS[name], training.layout), time.monotonic()
            curve = [[0, training.loss(held)]]
            for number in range(sizes.steps):
                step(hop, order, number, sizes.rate * min(1.0, (number + 1) / sizes.ramp))
                if (number + 1) % sizes.every == 0:
                    curve.append([number + 1, training.loss(held)])
            yield {
                "what": "continued", "format": name, "seed": seed, "bytes": bytes_of(GRADIENTS[name]),
                "steps": sizes.steps, "tokens": a_step * sizes.length, "rate": sizes.rate, "warm": sizes.warm,
                "curve": curve, "seconds": time.monotonic() - began,
            }  # fmt: skip
