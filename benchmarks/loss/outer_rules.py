"""Which rule of the outer optimizer loses least after a warm start: rates and momenta, AdamW and Muon inside.

    python -m benchmarks.loss.outer_rules [--work runs/outer_rules] [--seeds 1] [--only AdamW Muon] [--seconds 500]

Two replicas in one process and in plain torch, which is what the engine's ranks compute (tests/dist/outer). They meet
in each of the first WARM steps; then they part, and every branch meets every so many steps by a rule of its own. All
have the same samples, learning rates and end, so a branch is compared with the one that meets in every step. A call
begins no branch after --seconds, and the next goes on. The call that has them all writes docs/results/outer_rules.md.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import harness
from benchmarks.loss import data
from benchmarks.loss.run import CHUNK, MUON_OPTIONS, Settings, learning_rate
from benchmarks.results import PAGES, RESULTS
from benchmarks.steps import llama
from megazero import zero
from megazero.models import Decoder, initializer
from megazero.zero.by_matrix import MATRIX

KEEP, PAGE = RESULTS / "loss_outer_rules.jsonl", PAGES / "outer_rules.md"
REPLICAS, WARM = 2, 256
INTERVALS = (8, 32)
RATES, MOMENTA = (0.3, 0.5, 0.7, 1.0), (0.0, 0.5, 0.9)
# 640 steps apart: 80 meetings every 8 steps, 20 every 32. micro_batch: samples of a replica.
SETTINGS = Settings(hidden=128, ffn=352, heads=2, micro_batch=2, steps=WARM + 640, warmup=64, dtype="fp32")
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1}
INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, **ADAMW),
    "Muon": partial(zero.Muon, **ADAMW, **MUON_OPTIONS, precision="high"),
}


@dataclass(frozen=True)
class Branch:
    """What goes on from the warm start of an inner optimizer and a seed. interval 1: replicas meet in every step,
    before the update. momentum: Nesterov's."""

    inner: str
    seed: int
    interval: int = 1
    rate: float = 1.0
    momentum: float = 0.0

    def __str__(self) -> str:
        rule = (
            f"every {self.interval}, {self.rate:g}, {self.momentum:g}" if self.interval > 1 else "every step"
        )
        return f"{self.inner}, seed {self.seed}: {rule}"


def branches(inner: Sequence[str], seeds: Sequence[int]) -> Iterator[Branch]:
    """Yield the branches of each inner optimizer and seed, first the one that all others are compared with."""
    for seed in seeds:
        for name in inner:
            yield Branch(name, seed)
            for interval in INTERVALS:
                for rate in RATES:
                    for momentum in MOMENTA:
                        yield Branch(name, seed, interval, rate, momentum)


class Replica:
    """A model and its inner optimizer."""

    def __init__(self, inner: str, seed: int) -> None:
        self.made = inner, seed
        self.model = Decoder(llama(SETTINGS), device="cpu", dtype=torch.float32)
        value, matrices = initializer(self.model, seed), self.model.matrices()
        groups: list[dict[str, Any]] = [
            {"params": [], MATRIX: True},
            {"params": []},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, param in self.model.named_parameters():
            param.data.copy_(value(name))
            groups[0 if name in matrices else 1 if param.ndim > 1 else 2]["params"].append(param)
        self.optimizer = INNER[inner](groups, lr=SETTINGS.peak)

    def copy(self) -> Replica:
        """Return another model with these weights and an optimizer in this state."""
        other = Replica(*self.made)
        for ours, theirs in zip(self.params, other.params, strict=True):
            theirs.data.copy_(ours)
            other.optimizer.state[theirs] = copy.deepcopy(self.optimizer.state[ours])
        return other

    @property
    def params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def backward(self, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        """Add the gradient of the samples' mean loss."""
        (self.model(tokens, labels).sum() / tokens.numel()).backward()

    def update(self, rate: float) -> None:
        """Clip the gradient, update the weights at this rate, and clear the gradient."""
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()


class Run:
    """Steps of a branch. ``done`` of them are made."""

    def __init__(self, folder: Path, inner: str, seed: int) -> None:
        self.replicas = [Replica(inner, seed)]
        self.rate, self.done = learning_rate(SETTINGS), 0
        stride = REPLICAS * SETTINGS.micro_batch
        self.samples = data.train_samples(folder, SETTINGS.sequence, seed, SETTINGS.steps * stride)

    def together(self, last: int) -> None:
        """Train until ``last`` steps are made, in each of which the replicas' gradients meet."""
        (one,) = self.replicas
        while self.done < last:
            one.backward(*self._batch(range(REPLICAS)))
            one.update(self.rate(self.done))
            self.done += 1

    def apart(self, branch: Branch) -> None:
        """Train to the end by the branch's rule; one replica is left, of the common weights."""
        self.replicas += [self.replicas[0].copy() for _ in range(REPLICAS - 1)]
        anchor = [param.detach().clone() for param in self.replicas[0].params]
        rule = torch.optim.SGD(anchor, lr=branch.rate, momentum=branch.momentum, nesterov=branch.momentum > 0)
        while self.done < SETTINGS.steps:
            for number, replica in enumerate(self.replicas):
                replica.backward(*self._batch(range(number, number + 1)))
                replica.update(self.rate(self.done))
            self.done += 1
            if self.done % branch.interval == 0:
                self._meet(anchor, rule)
        del self.replicas[1:]

    def _meet(self, anchor: list[torch.Tensor], rule: torch.optim.Optimizer) -> None:
        """Step the anchor by the replicas' mean difference to it, and let every replica go on from it."""
        for place, *own in zip(anchor, *(replica.params for replica in self.replicas), strict=True):
            place.grad = place - torch.stack([each.detach() for each in own]).mean(0)
        rule.step()
        for replica in self.replicas:
            for param, place in zip(replica.params, anchor, strict=True):
                param.data.copy_(place)

    def _batch(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels of these replicas in the next step, int64 [samples, sequence]."""
        first = self.done * REPLICAS
        count = SETTINGS.micro_batch
        wanted = range((first + numbers.start) * count, (first + numbers.stop) * count)
        rows = [self.samples[number] for number in wanted]
        tokens, labels = (torch.stack([torch.from_numpy(row[k].copy()) for row in rows]) for k in data.KEYS)
        return tokens, labels

    @torch.no_grad()
    def loss(self, folder: Path) -> float:
        """Return the mean loss over the evaluation set, in nats per token."""
        tokens, labels = data.evaluation_samples(folder, SETTINGS.sequence, range(SETTINGS.evaluation))
        parts = zip(tokens.split(CHUNK), labels.split(CHUNK), strict=True)
        total = sum(self.replicas[0].model(x, y).double().sum().item() for x, y in parts)
        return total / tokens.numel()


def page(losses: dict[Branch, float], command: str) -> str:
    """Return the text of the page. losses: of branches, of at least one seed."""
    seeds = sorted({branch.seed for branch in losses})
    tables = []
    for name in dict.fromkeys(branch.inner for branch in losses):
        base = {seed: losses[Branch(name, seed)] for seed in seeds}
        for interval in INTERVALS:
            rows = [[f"{rate:g}"] for rate in RATES]
            for row, rate in zip(rows, RATES, strict=True):
                for momentum in MOMENTA:
                    own = {seed: losses[Branch(name, seed, interval, rate, momentum)] for seed in seeds}
                    row.append(_gap([100 * (own[seed] / base[seed] - 1) for seed in seeds]))
            head = f"{name} inside, every {interval} steps. All replicas in every step: {fmean(base.values()):.4f}."
            momenta = [f"momentum {momentum:g}" for momentum in MOMENTA]
            tables.append(f"{head}\n\n{harness.table(['`--outer-lr`', *momenta], rows)}")
    apart = SETTINGS.steps - WARM
    setting = harness.filled(f"""
        A decoder of 2 layers of {SETTINGS.hidden}, vocabulary {SETTINGS.vocabulary:,}, fp32, Python's sources,
        {REPLICAS * SETTINGS.micro_batch * SETTINGS.sequence:,} tokens a step. After {WARM} steps in which all meet,
        {REPLICAS} replicas train {apart} steps apart, to the end of one schedule. Cells: how far the loss on held-out
        text lies above that of replicas that meet in every step, in percent, {_of(seeds)}. Momentum is Nesterov's;
        rate 1 without momentum is `--outer-optimizer average`.""")
    return "\n\n".join(["# Rules of the outer optimizer", f"    {command}", setting, *tables]) + "\n"


def _of(seeds: Sequence[int]) -> str:
    return "one seed" if len(seeds) == 1 else f"mean of {len(seeds)} seeds (least to most)"


def _gap(percent: list[float]) -> str:
    spread = f" ({min(percent):+.2f} to {max(percent):+.2f})" if len(percent) > 1 else ""
    return f"{fmean(percent):+.2f}{spread}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(
        __doc__,
        work=(Path("runs/outer_rules"), "the text"),
        seeds=([1], "of weights and samples"),
        only=([*INNER], "inner optimizers"),
        seconds=(math.inf, "no branch begins after so many"),
        keep=(KEEP, "finished branches"),
        page=(PAGE, "what is written"),
    )
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.only) - set(INNER):
        parser.error(f"--only {' '.join(unknown)}: known are {', '.join(INNER)}")
    store, began = harness.Store(chosen.keep), time.monotonic()
    store.claim()
    text = data.prepare(chosen.work, SETTINGS.text, SETTINGS.vocabulary)
    losses = {_branch(record): record["loss"] for record in store.records()}
    wanted, warm = list(branches(chosen.only, chosen.seeds)), dict[tuple[str, int], Run]()
    for branch in wanted:
        if branch in losses:
            continue
        if time.monotonic() - began > chosen.seconds:
            return
        start = branch.inner, branch.seed
        if start not in warm:
            warm[start] = Run(text, *start)
            warm[start].together(WARM)
        run = copy.copy(warm[start])
        run.replicas = [replica.copy() for replica in run.replicas]
        run.together(SETTINGS.steps) if branch.interval == 1 else run.apart(branch)
        losses[branch] = run.loss(text)
        store.append(vars(branch) | {"loss": losses[branch], "corpus": data.corpus(text)})
        print(f"{branch}: {losses[branch]:.4f} after {time.monotonic() - began:.0f} s", flush=True)
    only, seeds = " ".join(chosen.only), " ".join(map(str, chosen.seeds))
    found = {branch: losses[branch] for branch in wanted}
    chosen.page.write_text(
        page(found, f"python -m benchmarks.loss.outer_rules --only {only} --seeds {seeds}")
    )


def _branch(record: dict[str, Any]) -> Branch:
    return Branch(**{name: record[name] for name in Branch.__dataclass_fields__})


if __name__ == "__main__":
    harness.start(main)
