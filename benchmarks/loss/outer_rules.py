"""Which rule of the outer optimizer, and which format of differences, loses least after a warm start; AdamW inside.

    python -m benchmarks.loss.outer_rules [--seeds 1] [--seconds 500]

Replicas in one process and in plain torch, which is what the engine's ranks compute (tests/dist/outer). They meet
in each of the first WARM steps; then they part, and every branch meets every so many steps by a rule of its own. All
have the same samples, learning rates and end, so a branch is compared with the one that meets in every step. Each
branch is a line of loss_outer_rules.jsonl; the next call goes on. Prints the tables: of rates and momenta, which
--seeds are of, and of FORMS.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

import torch

from benchmarks import harness
from benchmarks.loss import data
from benchmarks.loss.intervals import effects
from benchmarks.loss.rounding.training import Batch, State, Training
from benchmarks.loss.run import CHUNK, Settings, learning_rate
from benchmarks.results import RESULTS
from benchmarks.steps import llama
from megazero.comm.codec import Blockwise, Codec
from megazero.comm.topk import TopK
from megazero.models import Decoder

FILE = "loss_outer_rules.jsonl"
REPLICAS, WARM = 2, 256
INTERVALS = (8, 32)
RATES, MOMENTA = (0.3, 0.5, 0.7, 1.0), (0.0, 0.5, 0.9)
# 640 steps apart: 80 meetings every 8 steps, 20 every 32. micro_batch: samples of one of two replicas.
SETTINGS = Settings(hidden=128, ffn=352, heads=2, micro_batch=2, steps=WARM + 640, warmup=64, dtype="fp32")
SIZES = {"0.7M": SETTINGS, "1.3M": replace(SETTINGS, hidden=192, ffn=512, heads=3)}
# What differences are sent in, and the share of what that lost which is added to the next ones.
SENT: Mapping[str, tuple[Codec, float]] = {"INT4": (Blockwise(4), 1.0), "top 64": (TopK(), TopK.FEEDBACK)}

# Sizes, intervals and seeds at which forms are compared.
FORMS = (("0.7M", 32, (1, 2, 3)), ("0.7M", 8, (1,)), ("1.3M", 32, (1,)))


@dataclass(frozen=True)
class Branch:
    """What goes on from the warm start of a seed. interval 1: replicas meet in every step, before the update.
    momentum: Nesterov's. form: of SENT, or exact. apart: norms and directions of differences are averaged apart."""

    seed: int
    interval: int = 1
    rate: float = 1.0
    momentum: float = 0.0
    form: str = ""
    replicas: int = REPLICAS
    apart: bool = False
    size: str = "0.7M"


def branches(seeds: Sequence[int]) -> Iterator[Branch]:
    """Yield the branches of each seed, first the one that all others are compared with."""
    for seed in seeds:
        yield Branch(seed)
        for interval, rate, momentum in product(INTERVALS, RATES, MOMENTA):
            yield Branch(seed, interval, rate, momentum)


def forms() -> Iterator[tuple[Branch, Branch]]:
    """Yield branches, of all their seeds, that differ in what is sent or in how it is averaged, each with the one
    that it is compared with."""
    for replicas in (2, 4):
        mean = Branch(1, 32, 0.7, 0.5, replicas=replicas)
        yield mean, mean
        yield replace(mean, apart=True), mean
        yield replace(mean, rate=1.0), mean
    for size, interval, seeds in FORMS:
        for seed in seeds:
            four = Branch(seed, interval, 0.7, 0.5, "INT4", size=size)
            yield four, four
            yield replace(four, form="top 64", rate=1.0, momentum=0.0), four
    yield Branch(1, 8, 0.7, 0.5, "top 64"), Branch(1, 8, 0.7, 0.5, "INT4")


class Replicas:
    """Models of one start, and the samples that each reads."""

    def __init__(self, folder: Path, seed: int, count: int, settings: Settings) -> None:
        self.settings, self.count = settings, REPLICAS * settings.micro_batch // count
        self.each: list[Training] = []
        for _ in range(count):
            model = Decoder(llama(settings), device="cpu", dtype=torch.float32)
            model.initialize(seed)
            self.each.append(Training(model, 1, exact=settings.hidden))
        self.rate = learning_rate(settings)
        self.samples = data.train_samples(
            folder, settings.sequence, seed, settings.steps * self.count * count
        )

    def together(self, steps: range) -> None:
        """Train the first model on the samples of all, whose gradients meet in every step."""
        one, numbers = self.each[0], range(len(self.each))
        for step in steps:
            one.update(one.gradient_of(self.batch(step, number) for number in numbers), self.rate(step))

    def apart(self, start: State, branch: Branch) -> None:
        """Train from ``start`` to the end by the branch's rule; all end with the common weights."""
        for one in self.each:
            one.restore(start)
        anchor = start[0].clone()
        rule = torch.optim.SGD([anchor], branch.rate, branch.momentum, nesterov=branch.momentum > 0)
        _, coded = self.each[0].layout.regions[0]
        owed = anchor.new_zeros(len(self.each), coded)
        for step in range(WARM, self.settings.steps):
            for number, one in enumerate(self.each):
                one.update(one.gradient_of([self.batch(step, number)]), self.rate(step))
            if (step + 1) % branch.interval == 0:
                self.meet(anchor, rule, branch, owed)

    def meet(
        self, anchor: torch.Tensor, rule: torch.optim.Optimizer, branch: Branch, owed: torch.Tensor
    ) -> None:
        """Step the anchor by the replicas' mean difference to it, and let every replica go on from it.

        owed: [replicas, n], what rounding has lost of the first n elements, which the branch's form takes.
        """
        moved = anchor - torch.stack([one.master for one in self.each])
        if branch.form:
            send(moved[:, : owed.shape[1]], owed, *SENT[branch.form])
        anchor.grad = mean_of(moved, branch.apart)
        rule.step()
        for one in self.each:
            one.master.copy_(anchor)
            one.weights.copy_(anchor)

    def batch(self, step: int, number: int) -> Batch:
        """Return a replica's tokens and labels of a step, int64 [samples, sequence]."""
        first, count = step * len(self.each) + number, self.count
        rows = [self.samples[at] for at in range(first * count, (first + 1) * count)]
        tokens, labels = (torch.stack([torch.from_numpy(row[k].copy()) for row in rows]) for k in data.KEYS)
        return tokens, labels


def send(rows: torch.Tensor, owed: torch.Tensor, codec: Codec, feedback: float) -> None:
    """Replace differences fp32 [replicas, n] by what arrives of them, and what is ``owed`` by what this lost."""
    wanted = rows + owed
    codec.decode(codec.encode(wanted), rows)
    torch.sub(wanted, rows, out=owed).mul_(feedback)


def mean_of(rows: torch.Tensor, apart: bool) -> torch.Tensor:
    """Return the mean [n] of differences [replicas, n]. apart: the mean direction, as long as they are on average."""
    if not apart:
        return rows.mean(0)
    norms = rows.norm(dim=1, keepdim=True)
    return torch.nn.functional.normalize((rows / norms).sum(0), dim=0) * norms.mean()


def table(losses: Mapping[Branch, float]) -> str:
    """Return how far each branch lies above the one that meets in every step, in percent; the mean of its seeds."""
    seeds = sorted({branch.seed for branch in losses if branch.interval == 1})
    rules = list(product(INTERVALS, MOMENTA))

    def gap(rate: float, interval: int, momentum: float) -> str:
        own = (losses[Branch(s, interval, rate, momentum)] / losses[Branch(s)] for s in seeds)
        return f"{100 * (fmean(own) - 1):+.2f}"

    rows = [[f"{rate:g}", *(gap(rate, *rule) for rule in rules)] for rate in RATES]
    return harness.table(["`--outer-lr`", *(f"every {i}, momentum {m:g}" for i, m in rules)], rows)


def forms_table(losses: Mapping[Branch, float]) -> str:
    """Return a row for each kind of branch of ``forms`` that is there."""
    found: dict[Branch, dict[Branch, dict[int, list[float]]]] = {}
    for branch, beside in forms():
        if branch in losses:
            kinds = found.setdefault(replace(beside, seed=0), {})
            kinds.setdefault(replace(branch, seed=0), {})[branch.seed] = [losses[branch]]
    rows = []
    for beside, kinds in found.items():
        gaps = effects({str(kind): each for kind, each in kinds.items()}, str(beside))
        for kind, by_seed in kinds.items():
            gap = gaps.get(str(kind))
            sent = (kind.form or "exact") + ", norms apart" * kind.apart
            loss = fmean(each for (each,) in by_seed.values())
            rows.append([
                kind.size, str(kind.interval), str(kind.replicas), sent, f"{kind.rate:g}, {kind.momentum:g}",
                str(len(by_seed)), f"{loss:.4f}", *((f"{gap.percent:+.2f}", gap.bounds) if gap else ("-", "-")),
            ])  # fmt: skip
    head = [
        "size",
        "every",
        "replicas",
        "differences",
        "rate, momentum",
        "seeds",
        "loss",
        "gap %",
        "95% bounds %",
    ]
    return harness.table(head, rows)


def found(store: harness.Store) -> dict[Branch, float]:
    """Return the losses that are there."""
    names = Branch.__dataclass_fields__
    rows = store.records()
    return {Branch(**{name: row[name] for name in names if name in row}): row["loss"] for row in rows}


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
    losses, warm = found(store), dict[tuple[int, int, str], tuple[Replicas, State]]()
    wanted = [*branches(options.seeds), *(branch for branch, _ in forms())]
    for branch in (each for each in wanted if each not in losses):
        if time.monotonic() - began > options.seconds:
            break
        start_of = branch.seed, branch.replicas, branch.size
        if start_of not in warm:
            replicas = Replicas(text, branch.seed, branch.replicas, SIZES[branch.size])
            replicas.together(range(WARM))
            warm[start_of] = replicas, replicas.each[0].state()
        replicas, start = warm[start_of]
        if branch.interval == 1:
            replicas.each[0].restore(start)
            replicas.together(range(WARM, replicas.settings.steps))
        else:
            replicas.apart(start, branch)
        losses[branch] = replicas.each[0].loss(held)
        store.append(asdict(branch) | {"loss": losses[branch], "corpus": data.corpus(text)})
        print(f"{branch}: {losses[branch]:.4f} after {time.monotonic() - began:.0f} s", flush=True)
    if not set(wanted[: -len(list(forms()))]) - losses.keys():
        print(table(losses))
    print(forms_table(losses))


if __name__ == "__main__":
    harness.start(main)
