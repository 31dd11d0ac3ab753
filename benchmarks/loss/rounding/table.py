"""The table: errors of formats by kind of tensor, for gradients, weights and their differences."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.loss.rounding.formats import DIFFERENCES, EXACT, ROUNDINGS, WEIGHTS, Emulated, Hop, Rounding
from benchmarks.loss.rounding.statistics import direction, measured, stability
from benchmarks.loss.rounding.text import Samples
from benchmarks.loss.rounding.training import Batch, Training
from megazero.comm.codec import Blockwise

KINDS = {
    "embedding": ("embedding",),
    "q, k": ("q_proj", "k_proj"),
    "v": ("v_proj",),
    "attention output": ("o_proj",),
    "MLP in": ("gate_proj", "up_proj"),
    "MLP out": ("down_proj",),
    "norms": ("norm",),
}
ALL = "all matrices"
STEPS = 3  # of messages at one set of weights; the last two are measured, the first is what columns know
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """senders: nodes. tokens: of a message, each gives rows of its own. length, batch: of one pass. held: sequences
    that are evaluated on. warm: exact steps before anything is measured. outer: steps of an outer difference. rate:
    AdamW's. layers: those that are measured; None: all. losses: whether held losses after a step are read, too."""

    senders: int = 4
    tokens: tuple[int, ...] = (32768, 2048, 8192, 131072)
    length: int = 1024
    batch: int = 8
    held: int = 128
    warm: int = 60
    outer: int = 32
    rate: float = 3e-4
    layers: tuple[int, ...] | None = None
    losses: bool = True


def kind_of(name: str) -> str:
    return next(kind for kind, words in KINDS.items() if any(word in name for word in words))


class Table:
    """Measures one model on one text, part after part; each yields rows."""

    def __init__(self, training: Training, samples: Samples, sizes: Sizes) -> None:
        assert len(training.layout.regions) == 1, "everything is coded, to be measured"
        self.training, self.samples, self.sizes = training, samples, sizes
        self.order, self.drawn = samples.order(0), 0
        self.slots = training.layout.slots

    def batches(self, tokens: int) -> Iterator[Batch]:
        """Yield the batches of one message of so many tokens, of the next samples."""
        count = max(1, tokens // self.sizes.length)
        for first in range(0, count, self.sizes.batch):
            size = min(self.sizes.batch, count - first)
            numbers = self.order.take(range(self.drawn, self.drawn + size), mode="wrap")
            self.drawn += size
            yield self.samples.at(numbers)

    def held(self) -> list[Batch]:
        tokens, labels = self.samples.held(self.sizes.held)
        return list(zip(tokens.split(self.sizes.batch), labels.split(self.sizes.batch), strict=True))

    def step(self) -> torch.Tensor:
        """Make one exact step of AdamW, and return its gradient."""
        gradient = self.training.gradient_of(self.batches(self.sizes.tokens[0]))
        self.training.update(gradient, self.sizes.rate)
        return gradient

    def weights(self) -> Iterator[Row]:
        """Warm AdamW, and measure weights, their differences of a step and of many, and the columns meanwhile."""
        first = self.step()
        for _ in range(self.sizes.warm - 1):
            last = self.step()
        yield from self.columns(first, last, f"after {self.sizes.warm} steps")
        yield from self.of_formats("weights", self.training.master[None], WEIGHTS)
        before = self.training.master.clone()
        self.step()
        yield from self.of_formats("difference of 1 step", (self.training.master - before)[None], DIFFERENCES)
        for _ in range(self.sizes.outer - 1):
            self.step()
        what = f"difference of {self.sizes.outer} steps"
        yield from self.of_formats(what, (self.training.master - before)[None], DIFFERENCES)

    def gradients(self, tokens: int, after_step: bool, left: Callable[[], float]) -> Iterator[Row]:
        """Measure messages of so many tokens. after_step: whether AdamW's step is made, and its loss read."""
        senders, layout = self.sizes.senders, self.training.layout
        messages = torch.stack(
            [self.training.gradient_of(self.batches(tokens)) for _ in range(STEPS * senders)]
        ).unflatten(0, (STEPS, senders))
        means = messages.mean(1)
        yield from self.columns(means[0], means[1], f"next step, messages of {tokens} tokens")
        held = self.training.gradient_of(self.held())
        exact = direction(means)
        gains = self.products(held, exact)
        losses = self.losses(exact) if after_step else None
        for name, rounding in ROUNDINGS.items():
            if name == EXACT or left() < 0:
                continue
            hop = Hop(rounding, layout)
            sent = torch.stack([hop.decoded(step) for step in messages])
            rows = self.of_tensors(messages[1:].flatten(0, 1), sent[1:].flatten(0, 1), rounding.coding)
            step = direction(sent.mean(1))
            shares = shared(self.products(held, step), gains)
            more: Row = {"format": name, "what": "gradients", "tokens": tokens, "bytes": rounding.bytes}
            for row in rows:
                yield {**row, **more, "gain": shares[row["kind"]]}
            if losses is not None:
                base, best = losses
                yield {**more, "what": "step", "gain": (base - self.loss_after(step)) / (base - best)}
            del sent, step

    def losses(self, step: torch.Tensor) -> tuple[float, float]:
        """Return the held loss before and after the exact step."""
        return self.training.loss(self.held()), self.loss_after(step)

    def loss_after(self, step: torch.Tensor) -> float:
        training = self.training
        training.weights.copy_(training.master - self.sizes.rate * step)
        try:
            return training.loss(self.held())
        finally:
            training.weights.copy_(training.master)

    def products(self, held: torch.Tensor, step: torch.Tensor) -> dict[str, float]:
        """Return by kind the first-order gain in held loss of a step."""
        found: dict[str, float] = defaultdict(float)
        product = held * step
        for slot in self.slots:
            value = float(product[slot.start : slot.start + slot.numel].sum(dtype=torch.float64))
            for kind in kinds_of(slot.name):
                found[kind] += value
        return found

    def columns(self, before: torch.Tensor, after: torch.Tensor, when: str) -> Iterator[Row]:
        """Compare the columns of two gradients [n] by kind."""
        found: dict[str, list[Mapping[str, float]]] = defaultdict(list)
        for slot in self.slots:
            if len(slot.shape) == 2:
                parts = (x[slot.start : slot.start + slot.numel].view(slot.shape) for x in (before, after))
                row = stability(*(part.square().sum(0) for part in parts))
                for kind in kinds_of(slot.name):
                    found[kind].append(row)
        for kind, rows in found.items():
            yield {"what": "columns", "when": when, "kind": kind, **means_of(rows)}

    def of_formats(self, what: str, values: torch.Tensor, formats: Mapping[str, Blockwise]) -> Iterator[Row]:
        """Measure each format on values [m, n] that are not gradients: weights, differences."""
        for name, coding in formats.items():
            sent = Hop(Rounding(coding), self.training.layout).decoded(values)
            for row in self.of_tensors(values, sent, coding):
                kept = {key: row[key] for key in ("kind", "error", "zero", "dead")}
                yield {"what": what, "format": name, "bytes": Rounding(coding).bytes, **kept}

    def of_tensors(
        self, exact: torch.Tensor, sent: torch.Tensor, coding: Blockwise | Emulated | None
    ) -> Iterator[Row]:
        """Yield by kind the mean over tensors of what is measured of draws [m, n]."""
        found: dict[str, list[Mapping[str, float | None]]] = defaultdict(list)
        for slot in self.slots:
            span = slice(
                slot.start, slot.start + -(-slot.numel // 128) * 128
            )  # whole blocks of every transform
            whole = sent[:, span]
            digits = coding.mixed(whole.contiguous()) if isinstance(coding, Blockwise) else whole
            part = slice(slot.start, slot.start + slot.numel)
            row = measured(exact[:, part], sent[:, part], digits[:, : slot.numel])
            for kind in kinds_of(slot.name):
                found[kind].append(row)
        for kind, rows in found.items():
            yield {"kind": kind, **means_of(rows)}


def kinds_of(name: str) -> tuple[str, ...]:
    """Return the kinds that a tensor counts in. Norms are sent exactly, so they are not in ``ALL``."""
    kind = kind_of(name)
    return (kind,) if kind == "norms" else (kind, ALL)


def means_of(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for key in rows[0]:
        values = [value for row in rows if (value := row[key]) is not None]
        found[key] = sum(values) / len(values) if values else None
    return found


def shared(gains: Mapping[str, float], whole: Mapping[str, float]) -> dict[str, float]:
    return {kind: gains[kind] / whole[kind] for kind in whole}


def rows(training: Training, samples: Samples, sizes: Sizes, seconds: float) -> Iterator[Row]:
    """Yield all rows, in order of value, until the time is over."""
    began = time.monotonic()

    def left() -> float:
        return seconds - (time.monotonic() - began)

    table = Table(training, samples, sizes)
    yield from table.weights()
    for tokens in sizes.tokens:
        if left() > 0:
            yield from table.gradients(tokens, sizes.losses and tokens == sizes.tokens[0], left)
