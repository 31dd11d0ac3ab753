"""One step of a trained model: what each format loses of gradients, weights and their differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from benchmarks.loss.rounding.formats import DIFFERENCES, GRADIENTS, WEIGHTS, Hop, bytes_of
from benchmarks.loss.rounding.text import Samples
from benchmarks.loss.rounding.training import Batch, Training
from megazero.comm.codec import Blockwise

ALL, EMBEDDING = "all matrices", "embedding"
STEPS = 3  # of messages at one set of weights
EPSILON = 1e-8  # AdamW's, of the gradients' rms
TOP = 0.01  # of the columns: the outliers
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """senders: nodes. tokens: of a message. length, batch: of one pass. held: sequences that are evaluated on. warm:
    exact steps before anything is measured. outer: steps of an outer difference. rate: AdamW's."""

    senders: int = 4
    tokens: int = 32768
    length: int = 1024
    batch: int = 8
    held: int = 128
    warm: int = 60
    outer: int = 32
    rate: float = 3e-4


def kinds_of(name: str) -> tuple[str, ...]:
    """Return what a tensor's numbers count in. Norms are sent exactly."""
    return () if "norm" in name else (EMBEDDING, ALL) if EMBEDDING in name else (ALL,)


def measured(exact: torch.Tensor, sent: torch.Tensor, digits: torch.Tensor) -> dict[str, float]:
    """Measure one tensor's draws [m, n], what they decode to [m, n], and the digits' domain of that [m, n].

    error: ||sent - exact|| / ||exact||. zero: the share of digits that are 0. dead: the share of elements with a
    gradient in some draw that are 0 in all that is sent.
    """
    alive = exact.square().sum(0) > 0
    dead = alive & (sent.square().sum(0) == 0)
    return {
        "error": float((sent - exact).norm() / exact.norm().clamp(min=1e-30)),
        "zero": float((digits == 0).float().mean()),
        "dead": float(dead.sum() / alive.sum().clamp(min=1)),
    }


def direction(sums: torch.Tensor) -> torch.Tensor:
    """Return AdamW's direction [n] of step gradients [k, n]: their mean over the root of their mean square."""
    root = sums.square().mean(0).sqrt_()
    return sums.mean(0) / (root + EPSILON * root.square().mean().sqrt()).clamp(min=1e-30)


def outliers(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    """Compare the columns' squares [columns] of two gradients of a matrix. Outliers are the ``TOP`` largest, one at
    least. share: of the squared gradient before that they hold. kept: the share of them that are outliers after."""
    first, then = (x.topk(max(1, round(TOP * len(x)))).indices for x in (before, after))
    return {
        "share": float(before[first].sum() / before.sum()),
        "kept": float(torch.isin(first, then).float().mean()),
    }


class Measurement:
    """Measures one model on one text, part after part; each yields rows."""

    def __init__(self, training: Training, samples: Samples, sizes: Sizes) -> None:
        assert len(training.layout.regions) == 1, "everything is coded, to be measured"
        self.training, self.samples, self.sizes = training, samples, sizes
        self.order, self.drawn = samples.order(0), 0
        self.held = samples.held(sizes.held, sizes.batch)

    def message(self) -> torch.Tensor:
        """Return the gradient of the next samples."""
        return self.training.gradient_of(self._batches())

    def _batches(self) -> Iterator[Batch]:
        count = max(1, self.sizes.tokens // self.sizes.length)
        for first in range(0, count, self.sizes.batch):
            size = min(self.sizes.batch, count - first)
            numbers = self.order.take(range(self.drawn, self.drawn + size), mode="wrap")
            self.drawn += size
            yield self.samples.at(numbers)

    def advance(self, steps: int) -> torch.Tensor:
        """Make exact steps of AdamW; return how the master moved, fp32 [n]."""
        before = self.training.master.clone()
        for _ in range(steps):
            self.training.update(self.message(), self.sizes.rate)
        return self.training.master - before

    def weights(self) -> Iterator[Row]:
        """Warm AdamW, and measure weights and their differences of a step and of many."""
        self.advance(self.sizes.warm)
        yield from self._of_formats("weights", self.training.master[None], WEIGHTS)
        one = self.advance(1)
        yield from self._of_formats("difference of 1 step", one[None], DIFFERENCES)
        many = one + self.advance(self.sizes.outer - 1)
        yield from self._of_formats(f"difference of {self.sizes.outer} steps", many[None], DIFFERENCES)

    def gradients(self) -> Iterator[Row]:
        """Measure messages, and the share of exact's gain in held loss that AdamW's step of them has."""
        training, tokens = self.training, self.sizes.tokens
        messages = torch.stack([self.message() for _ in range(STEPS * self.sizes.senders)])
        messages = messages.unflatten(0, (STEPS, self.sizes.senders))
        means = messages.mean(1)
        yield from self._columns(means[0], means[1], f"next step, messages of {tokens} tokens")
        base, best = training.loss(self.held), self._loss_after(direction(means))
        for name, codec in GRADIENTS.items():
            if codec is None:
                continue
            hop = Hop(codec, training.layout)
            sent = torch.stack([hop.decoded(step) for step in messages])
            step = direction(sent.mean(1))
            more: Row = {"format": name, "what": "gradients", "tokens": tokens, "bytes": bytes_of(codec)}
            for row in self._of_tensors(messages[1:].flatten(0, 1), sent[1:].flatten(0, 1), codec):
                yield {**row, **more}
            yield {**more, "what": "step", "gain": (base - self._loss_after(step)) / (base - best)}
            del sent, step

    def _loss_after(self, step: torch.Tensor) -> float:
        training = self.training
        training.weights.copy_(training.master - self.sizes.rate * step)
        try:
            return training.loss(self.held)
        finally:
            training.weights.copy_(training.master)

    def _columns(self, before: torch.Tensor, after: torch.Tensor, when: str) -> Iterator[Row]:
        found: dict[str, list[Mapping[str, float]]] = defaultdict(list)
        for slot in self.training.layout.slots:
            for kind in kinds_of(slot.name):
                parts = (x[slot.start : slot.start + slot.numel].view(slot.shape) for x in (before, after))
                found[kind].append(outliers(*(part.square().sum(0) for part in parts)))
        for row in _means(found):
            yield {"what": "columns", "when": when, **row}

    def _of_formats(self, what: str, values: torch.Tensor, formats: Mapping[str, Blockwise]) -> Iterator[Row]:
        """Measure each format on values [m, n] that are not gradients."""
        for name, codec in formats.items():
            sent = Hop(codec, self.training.layout).decoded(values)
            for row in self._of_tensors(values, sent, codec):
                yield {"what": what, "format": name, "bytes": bytes_of(codec), **row}

    def _of_tensors(self, exact: torch.Tensor, sent: torch.Tensor, codec: Blockwise) -> Iterator[Row]:
        """Yield by kind the mean over tensors of what is measured of draws [m, n]."""
        found: dict[str, list[Mapping[str, float]]] = defaultdict(list)
        for slot in self.training.layout.slots:
            blocks = slice(
                slot.start, slot.start + -(-slot.numel // 128) * 128
            )  # whole ones of every transform
            digits = codec.mixed(sent[:, blocks].contiguous())[:, : slot.numel]
            part = slice(slot.start, slot.start + slot.numel)
            for kind in kinds_of(slot.name):
                found[kind].append(measured(exact[:, part], sent[:, part], digits))
        yield from _means(found)


def _means(found: Mapping[str, list[Mapping[str, float]]]) -> Iterator[Row]:
    for kind, rows in found.items():
        yield {"kind": kind} | {key: fmean(row[key] for row in rows) for key in rows[0]}


def rows(training: Training, samples: Samples, sizes: Sizes) -> Iterator[Row]:
    measurement = Measurement(training, samples, sizes)
    yield from measurement.weights()
    yield from measurement.gradients()
