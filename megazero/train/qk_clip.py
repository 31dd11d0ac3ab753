"""QK-clip (Kimi Team 2025, arXiv 2507.20534, section 2.1): where a step had larger scores of attention than a bound,
the linears that make queries and keys are scaled down after its update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megazero.config.model.mixers import MIXERS, Mixer
from megazero.families.layer_kinds import layer_kinds
from megazero.models import Decoder
from megazero.models.largest_scores import LargestScores
from megazero.zero import Engine, StepPart
from megazero.zero.scalars import NOTHING, Rows, Sums


class QKClip(StepPart):
    """Takes part in the steps of an engine whose decoder has attention, and tells the largest score of each step.

    threshold: the bound of scores, or None to tell alone. alpha: the power of a head's factor, bound over largest,
    that its queries take; its keys take 1 - alpha. Heads that share keys take the smallest of their factors.
    """

    columns = 1

    def __init__(self, decoder: Decoder, engine: Engine, alpha: float, threshold: float | None) -> None:
        self.decoder, self.engine, self.alpha, self.threshold = decoder, engine, alpha, threshold
        mixers = (
            (i, MIXERS[kind.mixer](decoder.config)) for i, kind in enumerate(layer_kinds(decoder.config))
        )
        self.mixers: dict[int, Mixer] = {i: mixer for i, mixer in mixers if mixer.heads is not None}
        self.own = {i: LargestScores() for i in self.mixers if f"{i}" in decoder.layers}
        for i, largest in self.own.items():
            attention: Any = decoder.layers[f"{i}"].attention
            attention.largest = largest
        self.last = 0.0

    def metrics(self) -> dict[str, Any]:
        """Return the last step's number for a line of metrics.jsonl."""
        return {"max_attention_logit": self.last}

    def write(self, row: torch.Tensor) -> None:
        """Write the largest score of all ranks. Collective."""
        config, tp, heads = self.decoder.config, self.decoder.tp, self.decoder.cp.heads
        shape = (len(self.mixers), config.num_attention_heads)
        every = torch.full(shape, -torch.inf, dtype=torch.float32, device=row.device)
        share = config.num_attention_heads // (tp.size * heads.size)
        first = (tp.rank * heads.size + heads.rank) * share
        for at, i in enumerate(self.mixers):
            if i in self.own and (value := self.own[i].value) is not None:
                every[at, first : first + share] = value
        largest = self.engine.combine(every, torch.distributed.ReduceOp.MAX)
        self.largest = dict(zip(self.mixers, largest, strict=True))
        row[0] = largest.max()

    def read(self, rows: Rows, sums: Sums) -> Mapping[str, Any]:
        self.last = rows[0][0]
        return NOTHING

    def updated(self, made: bool) -> None:
        if made and self.threshold is not None and self.last > self.threshold:
            for i in self.own:
                self._clip(i, self.largest[i], self.threshold)
        self.aborted()

    def aborted(self) -> None:
        for largest in self.own.values():
            largest.clear()

    def _clip(self, layer: int, largest: torch.Tensor, threshold: float) -> None:
        """Scale the rows of a layer's linears. largest: of each head of all ranks, [heads]."""
        mixer, specs, tp = self.mixers[layer], self.decoder.specs, self.decoder.tp
        assert mixer.heads is not None
        most = largest.view(mixer.heads.groups, -1).amax(1)
        factors = torch.where(most > threshold, threshold / most, 1.0)
        for name, parts in mixer.score_rows(self.alpha).items():
            powers = torch.tensor([power for rows, power in parts for _ in range(rows)], device=most.device)
            names = [
                n for n in (f"layers.{layer}.{name}.{kind}" for kind in ("weight", "bias")) if n in specs
            ]
            spec = specs[names[0]]
            heads, copies = spec.shape[0] // len(powers), spec.copies(tp.size)
            held = heads * copies // tp.size
            of_head = factors.repeat_interleave(heads // len(factors))
            own = of_head.narrow(0, tp.rank // copies * held, held)
            for each in names:
                self.engine.scale_rows(each, (own[:, None] ** powers).flatten())
