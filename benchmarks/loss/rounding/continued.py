"""Training on from the real model: exact steps warm AdamW's moments, then each format goes on from one state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.loss.rounding.formats import EXACT, ROUNDINGS, Hop
from benchmarks.loss.rounding.text import Samples
from benchmarks.loss.rounding.training import Batch, State, Training

# In order of value: what does not fit into the time is left out from the end.
FORMATS = (
    EXACT, "INT4 64", "INT4 64 + H64", "INT4 2048", "INT4 128 + H128", "INT4 128", "INT4 2048 + H128",
    "INT8 128", "3 bits 64 + H64",
)  # fmt: skip
WARM_RATE = 1 / 30  # of the rate
COUNTED = 4  # steps that are timed, to plan
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """senders: nodes. batches: passes of a sender in a step, of ``batch`` sequences of ``length`` tokens.

    warm: exact steps before the branches, at ``WARM_RATE``: they warm the moments and leave the learning to the
    branches. rate: constant after ``ramp`` steps. SmolLM2-135M was trained at up to 3e-3 with 1M tokens a
    step; by the square root of the batch that is 5e-4 at 32k. exact: parameters of at most so many elements are
    sent exactly. held: sequences that are evaluated on, every ``every`` steps. least, most: steps of a branch.
    """

    senders: int = 4
    batches: int = 1
    batch: int = 8
    length: int = 1024
    warm: int = 200
    rate: float = 3e-4
    ramp: int = 10
    exact: int = 16384
    held: int = 64
    every: int = 10
    least: int = 50
    most: int = 300
    seeds: tuple[int, ...] = (1, 2)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.senders * self.batches * self.batch * self.length


class Continued:
    """Trains branches on from one state."""

    def __init__(self, training: Training, samples: Samples, sizes: Sizes) -> None:
        self.training, self.samples, self.sizes = training, samples, sizes
        tokens, labels = samples.held(sizes.held)
        self.held = list(zip(tokens.split(sizes.batch), labels.split(sizes.batch), strict=True))

    def step(self, hop: Hop, order: Sequence[int], step: int, rate: float) -> None:
        """Make a step on the samples that ``order`` has for it."""
        sizes = self.sizes
        gradients = torch.stack(
            [
                self.training.gradient_of(self._batches(order, step * sizes.senders + sender))
                for sender in range(sizes.senders)
            ]
        )
        self.training.update(hop.mean(gradients), rate)

    def _batches(self, order: Sequence[int], turn: int) -> Iterator[Batch]:
        count = self.sizes.batch
        for number in range(turn * self.sizes.batches, (turn + 1) * self.sizes.batches):
            yield self.samples.at(order[(number * count + i) % len(order)] for i in range(count))

    def warm(self) -> State:
        hop, order = Hop(ROUNDINGS[EXACT], self.training.layout), self.samples.order(0)
        used = self.sizes.warm * self.sizes.tokens // self.samples.length
        self.order = order[used % len(order) :] if used < len(order) else order  # what warming did not read
        for step in range(self.sizes.warm):
            self.step(hop, order, step, WARM_RATE * self.sizes.rate)
        return self.training.state()

    def branch(self, state: State, name: str, seed: int, steps: int) -> Row:
        """Train one format on from ``state``; every format of a seed reads the same samples."""
        sizes, training = self.sizes, self.training
        training.restore(state)
        hop = Hop(ROUNDINGS[name], training.layout)
        generator = torch.Generator().manual_seed(seed)
        order = self.order[torch.randperm(len(self.order), generator=generator).numpy()]
        began, curve = time.monotonic(), [[0, training.loss(self.held)]]
        for step in range(steps):
            self.step(hop, order, step, sizes.rate * min(1.0, (step + 1) / sizes.ramp))
            if (step + 1) % sizes.every == 0 or step + 1 == steps:
                curve.append([step + 1, training.loss(self.held)])
        return {
            "what": "continued", "format": name, "seed": seed, "bytes": ROUNDINGS[name].bytes, "steps": steps,
            "tokens": sizes.tokens, "rate": sizes.rate, "warm": sizes.warm, "curve": curve,
            "seconds": time.monotonic() - began,
        }  # fmt: skip

    def costs(self, state: State) -> tuple[float, float]:
        """Return the seconds of a step and of an evaluation."""
        self.branch(state, FORMATS[2], 0, 1)  # compiles kernels
        hop = Hop(ROUNDINGS[FORMATS[2]], self.training.layout)
        began = time.monotonic()
        for step in range(COUNTED):
            self.step(hop, self.order, step, 0.0)
        self.training.loss(self.held[:1])  # waits
        stepped = time.monotonic()
        self.training.loss(self.held)
        return (stepped - began) / COUNTED, time.monotonic() - stepped


def plan(
    seconds: float, step: float, evaluation: float, sizes: Sizes, formats: Sequence[str]
) -> tuple[tuple[str, ...], int]:
    """Return the formats that fit into the time, from the first, and the steps of each branch.

    They are as many as leave ``least`` steps to each branch, and at least three.
    """
    for count in range(len(formats), 0, -1):
        each = seconds / (count * len(sizes.seeds)) - evaluation
        steps = int(each / (step + evaluation / sizes.every))
        if steps >= sizes.least or count <= 3:
            break
    steps = min(sizes.most, steps) // sizes.every * sizes.every
    return tuple(formats[:count]), max(sizes.every, steps)


def rows(
    training: Training,
    samples: Samples,
    sizes: Sizes,
    seconds: float,
    formats: Sequence[str] = FORMATS,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Row]:
    """Yield a row for each branch, until the time is over."""
    began = clock()
    continued = Continued(training, samples, sizes)
    state = continued.warm()
    step, evaluation = continued.costs(state)
    chosen, steps = plan(0.97 * (seconds - (clock() - began)), step, evaluation, sizes, formats)
    print(f"{step:.3f} s a step; {steps} steps of {', '.join(chosen)}", flush=True)
    slowest = 0.0
    for seed in sizes.seeds:
        for name in chosen:
            if clock() - began + slowest > seconds:
                return
            row = continued.branch(state, name, seed, steps)
            slowest = max(slowest, row["seconds"])
            yield row
