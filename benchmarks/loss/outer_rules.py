"""Which rule of the outer optimizer loses least after a warm start: rates and momenta, AdamW inside.

    python -m benchmarks.loss.outer_rules [--seeds 1] [--seconds 500]

Two replicas in one process and in plain torch, which is what the engine's ranks compute (tests/dist/outer). They meet
in each of the first WARM steps; then they part, and every branch meets every so many steps by a rule of its own. All
have the same samples, learning rates and end, so a branch is compared with the one that meets in every step. Each
branch is a line of loss_outer_rules.jsonl; the next call goes on. Prints the table.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

from benchmarks import harness
from benchmarks.loss import data
from benchmarks.loss.rounding.training import Batch, State, Training
from benchmarks.loss.run import CHUNK, Settings, learning_rate
from benchmarks.results import RESULTS
from benchmarks.steps import llama
from megazero.models import Decoder

FILE = "loss_outer_rules.jsonl"
REPLICAS, WARM = 2, 256
INTERVALS = (8, 32)
RATES, MOMENTA = (0.3, 0.5, 0.7, 1.0), (0.0, 0.5, 0.9)
# 640 steps apart: 80 meetings every 8 steps, 20 every 32. micro_batch: samples of a replica.
SETTINGS = Settings(hidden=128, ffn=352, heads=2, micro_batch=2, steps=WARM + 640, warmup=64, dtype="fp32")


@dataclass(frozen=True)
class Branch:
    """What goes on from the warm start of a seed. interval 1: replicas meet in every step, before the update.
    momentum: Nesterov's."""

    seed: int
    interval: int = 1
    rate: float = 1.0
    momentum: float = 0.0


def branches(seeds: Sequence[int]) -> Iterator[Branch]:
    """Yield the branches of each seed, first the one that all others are compared with."""
    for seed in seeds:
        yield Branch(seed)
        for interval, rate, momentum in product(INTERVALS, RATES, MOMENTA):
            yield Branch(seed, interval, rate, momentum)


class Replicas:
    """Two models of one start, and the samples that each reads."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.each: list[Training] = []
        for _ in range(REPLICAS):
            model = Decoder(llama(SETTINGS), device="cpu", dtype=torch.float32)
            model.initialize(seed)
            self.each.append(Training(model, 1, exact=SETTINGS.hidden))
        self.rate = learning_rate(SETTINGS)
        stride = REPLICAS * SETTINGS.micro_batch
        self.samples = data.train_samples(folder, SETTINGS.sequence, seed, SETTINGS.steps * stride)

    def together(self, steps: range) -> None:
        """Train the first model on the samples of all, whose gradients meet in every step."""
        one = self.each[0]
        for step in steps:
            one.update(
                one.gradient_of(self.batch(step, number) for number in range(REPLICAS)), self.rate(step)
            )

    def apart(self, start: State, branch: Branch) -> None:
        """Train from ``start`` to the end by the branch's rule; all end with the common weights."""
        for one in self.each:
            one.restore(start)
        anchor = start[0].clone()
        rule = torch.optim.SGD([anchor], branch.rate, branch.momentum, nesterov=branch.momentum > 0)
        for step in range(WARM, SETTINGS.steps):
            for number, one in enumerate(self.each):
                one.update(one.gradient_of([self.batch(step, number)]), self.rate(step))
            if (step + 1) % branch.interval == 0:
                self.meet(anchor, rule)

    def meet(self, anchor: torch.Tensor, rule: torch.optim.Optimizer) -> None:
        """Step the anchor by the replicas' mean difference to it, and let every replica go on from it."""
        anchor.grad = anchor - torch.stack([one.master for one in self.each]).mean(0)
        rule.step()
        for one in self.each:
            one.master.copy_(anchor)
            one.weights.copy_(anchor)

    def batch(self, step: int, number: int) -> Batch:
        """Return a replica's tokens and labels of a step, int64 [samples, sequence]."""
        first, count = step * REPLICAS + number, SETTINGS.micro_batch
        rows = [self.samples[at] for at in range(first * count, (first + 1) * count)]
        tokens, labels = (torch.stack([torch.from_numpy(row[k].copy()) for row in rows]) for k in data.KEYS)
        return tokens, labels


def table(losses: Mapping[Branch, float]) -> str:
    """Return how far each branch lies above the one that meets in every step, in percent; the mean of its seeds."""
    seeds = sorted({branch.seed for branch in losses})
    rules = list(product(INTERVALS, MOMENTA))

    def gap(rate: float, interval: int, momentum: float) -> str:
        own = (losses[Branch(s, interval, rate, momentum)] / losses[Branch(s)] for s in seeds)
        return f"{100 * (fmean(own) - 1):+.2f}"

    rows = [[f"{rate:g}", *(gap(rate, *rule) for rule in rules)] for rate in RATES]
    return harness.table(["`--outer-lr`", *(f"every {i}, momentum {m:g}" for i, m in rules)], rows)


def found(store: harness.Store) -> dict[Branch, float]:
    """Return the losses that are there."""
    names = Branch.__dataclass_fields__
    return {Branch(**{name: row[name] for name in names}): row["loss"] for row in store.records()}


def main(arguments: Sequence[str] | None = None) -> None:
    options = harness.parser(
        __doc__,
        work=(Path("runs/loss"), "the text"),
        results=(RESULTS, "folder of the finished branches"),
        seeds=([1], "of weights and samples"),
        seconds=(math.inf, "no branch begins after so many"),
    ).parse_args(arguments)
    store, began = harness.Store(options.results / FILE), time.monotonic()
    store.claim()
    text = data.prepare(options.work, SETTINGS.text, SETTINGS.vocabulary)
    tokens, labels = data.evaluation_samples(text, SETTINGS.sequence, range(SETTINGS.evaluation))
    held = list(zip(tokens.split(CHUNK), labels.split(CHUNK), strict=True))
    losses, warm = found(store), dict[int, tuple[Replicas, State]]()
    wanted = list(branches(options.seeds))
    for branch in (each for each in wanted if each not in losses):
        if time.monotonic() - began > options.seconds:
            return
        if branch.seed not in warm:
            replicas = Replicas(text, branch.seed)
            replicas.together(range(WARM))
            warm[branch.seed] = replicas, replicas.each[0].state()
        replicas, start = warm[branch.seed]
        if branch.interval == 1:
            replicas.each[0].restore(start)
            replicas.together(range(WARM, SETTINGS.steps))
        else:
            replicas.apart(start, branch)
        losses[branch] = replicas.each[0].loss(held)
        store.append(asdict(branch) | {"loss": losses[branch], "corpus": data.corpus(text)})
        print(f"{branch}: {losses[branch]:.4f} after {time.monotonic() - began:.0f} s", flush=True)
    print(table({branch: losses[branch] for branch in wanted}))


if __name__ == "__main__":
    harness.start(main)
