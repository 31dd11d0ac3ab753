"""Outer steps: every H updates the replicas of a run meet, and what crosses is how far they have moved.

A replica is an engine's group of ranks with its own P, G and OS; an axis outside of all joins ranks of equal places
(``Mesh.outer``). Replicas train apart from a common anchor theta. Every H steps (DiLoCo, arXiv 2311.08105)

    Delta = mean over replicas of (theta - theta_i)        the outer gradient
    theta <- outer optimizer(theta, Delta), theta_i <- theta

Delta is reduced as a gradient is, by the chain of reduce.py with one more level: each rank of a replica takes its own
1/d of the unit across, and the sums come back over the axes that hold copies of the OS slice. A sum is encoded once,
and every rank, the owner too, decodes the same bytes. So anchors are the same bits in all replicas; each step
compares their hashes.

Glossary (n: elements of the unit; all of at least fp32)
--------
anchor    Compact [n/OS]. What all replicas share since the last outer step: the model that is evaluated and exported.
momentum  Compact [n/OS]. The outer optimizer's.
residual  Compact [n/d], of the level of all axes. What this rank's messages of the last outer step lost: of other
          ranks' rows as they were sent, of its own row as the sum was returned. The next outer step adds it to what
          this rank contributes (error feedback, as MuLoCo has it, arXiv 2505.23725).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch

from megazero.comm.codec import Blockwise, Codec, Identity, decoded, encoded
from megazero.comm.lane import Chain, HopSpec, Lane, Ticket
from megazero.kernels.arena import Frame
from megazero.mesh.mesh import Mesh
from megazero.zero.access import fingerprint
from megazero.zero.context import Context
from megazero.zero.grad_norm import Rows
from megazero.zero.layout import Slice
from megazero.zero.optimizer import Run
from megazero.zero.policy import Outer
from megazero.zero.reduce import Hop, MicroBatchIndex, Reduction
from megazero.zero.rounding import Rounding
from megazero.zero.unit import Unit

NONE: Mapping[Unit, torch.Tensor] = MappingProxyType({})
TOLD = 4  # scalars of a rank: its anchors' hash, two sums of squares (``_chain``), its replica's divisor


class Met(NamedTuple):
    """What the replicas told each other in a step.

    divisors: of each replica's gradients. norm: ||Delta||, if the last step took an outer step. drift: the root of
    the mean over replicas of ||theta_i - mean||^2 in it.
    """

    divisors: tuple[float, ...]
    norm: float | None = None
    drift: float | None = None


@dataclass(frozen=True)
class Anchor:
    """What the outer steps keep of one unit (glossary above)."""

    value: torch.Tensor
    momentum: torch.Tensor | None
    residual: torch.Tensor | None


class OuterSteps:
    """Takes the outer steps of one engine.

    since: steps since the last one. told: what this rank tells all others in the next step, fp64 [TOLD].
    """

    def __init__(
        self,
        units: Sequence[Unit],
        outer: Outer,
        mesh: Mesh,
        context: Context,
        lane: Lane,
        runs: Sequence[Run],
    ) -> None:
        """runs: those whose elements this rank counts, for norms over unique slices."""
        assert mesh.outer is not None
        self.units, self.outer, self.axis, self.lane = units, outer, mesh.outer, lane
        self.runs = {unit: [run for run in runs if run.unit is unit] for unit in units}
        # Rounding here is not measured: no unit is the sample.
        rounding = Rounding(context.policy.seed, mesh.rank, mesh.device, context.arena)
        self.context = replace(context, axes=(*context.axes, mesh.outer), rounding=rounding)
        self.anchors = {unit: self._begin(unit) for unit in units}
        self.since = 0
        self.told = torch.zeros(TOLD, dtype=torch.float64, device=mesh.device)
        self.squares = torch.zeros(len(units), 2, dtype=torch.float64, device=mesh.device)
        self.note_anchors()

    def _begin(self, unit: Unit) -> Anchor:
        momentum = torch.zeros_like(unit.master) if self.outer.momentum else None
        residual = None
        if self.outer.feedback:
            residual = unit.master.new_zeros(unit.layout.level_numel(unit.levels.all))
        return Anchor(unit.master.clone(), momentum, residual)

    def begin(
        self,
        anchors: Mapping[Unit, torch.Tensor] = NONE,
        momentum: Mapping[Unit, torch.Tensor] = NONE,
    ) -> None:
        """Start anew, as after an outer step. All tensors are the same in all replicas.

        anchors: [n/OS] by unit, by default the master weights. momentum: [n/OS], by default zeros.
        """
        for unit, anchor in self.anchors.items():
            anchor.value.copy_(anchors.get(unit, unit.master))
            if anchor.momentum is not None:
                anchor.momentum.zero_()
                if unit in momentum:
                    anchor.momentum.copy_(momentum[unit])
            if anchor.residual is not None:
                anchor.residual.zero_()
        self.since = 0
        self.told.zero_()
        self.note_anchors()

    def count(self) -> None:
        """Note that all replicas have ended a step, also where its update was skipped. The H-th one meets.

        After a load there may be more steps since the last meeting than H, which was larger then.
        """
        self.since += 1
        self.told[1:3].zero_()
        if self.since >= self.outer.interval:
            self._take()

    def read(self, rows: Rows) -> tuple[Met, Rows]:
        """Take what ranks told off the rows of their scalars. Raises RuntimeError if their anchors differ."""
        site = len(rows) // self.axis.size
        odd = [rank for rank, row in enumerate(rows) if row[0] != rows[rank % site][0]]
        if odd:
            raise RuntimeError(
                f"outer replicas hold different anchors: those of ranks {odd} are not the first replica's. Start all "
                "replicas from the same weights; load the last checkpoint"
            )
        own, mean = (sum(row[at] for row in rows) / self.axis.size for at in (1, 2))
        divisors, rest = tuple(row[3] for row in rows[::site]), tuple(row[TOLD:] for row in rows)
        if not (own or mean):
            return Met(divisors), rest
        return Met(divisors, mean**0.5, max(own - mean, 0.0) ** 0.5), rest

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Inside, the weights are the anchors; outside all is as it was, to the bit. Between steps."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for unit, anchor in self.anchors.items():
            with self.context.frame() as frame:
                held = frame.take(unit.master.numel(), unit.master.dtype).copy_(unit.master)
                unit.master.copy_(anchor.value)
                anchor.value.copy_(held)
            unit.master_version += 1

    def note_anchors(self) -> None:
        """Hash the anchors into ``told``: 32 bits, which fp64 holds exactly."""
        hashes = torch.stack([fingerprint(anchor.value) for anchor in self.anchors.values()])
        self.told[0].copy_(fingerprint(hashes) & 0xFFFFFFFF)

    # -- the step ----------------------------------------------------------------------------------

    def _take(self) -> None:
        self.since = 0
        self.lane.follow()
        pending: deque[Ticket] = deque()
        moving = [unit for unit in self.units if unit.trainable]  # what is frozen stays at the anchor
        for index, unit in enumerate(moving):
            self.context.issued.add(f"o{index}")
            chain = self._chain(unit, self.squares[index])
            pending.append(self.lane.submit(unit.name, self._hop_specs(unit), chain))
            while len(pending) > self.context.policy.pending_reductions:  # the bound is on transient memory
                self.lane.wait(pending.popleft())
        while pending:
            self.lane.wait(pending.popleft())
        for unit in moving:
            unit.master_version += 1
        self.told[1:3].copy_(self.squares.sum(0))
        self.note_anchors()

    def _hop_specs(self, unit: Unit) -> tuple[HopSpec, ...]:
        """Return the collectives of ``_chain``, in their order."""
        outermost = unit.levels.all + 1
        return self.context.hop_specs("reduce", [outermost, *range(outermost, unit.levels.os, -1)])

    def _chain(self, unit: Unit, squares: torch.Tensor) -> Chain:
        """Reduce the unit's outer gradient, then update its anchor and master weights.

        squares: fp64 [2], to which ||theta - theta_i||^2 and ||Delta||^2 of what this rank counts are written.
        """
        levels, anchor = unit.levels, self.anchors[unit]
        reduction = Reduction(unit, MicroBatchIndex(0, True), self.context)
        exact = Identity(unit.sum_dtype)
        codec: Codec = self.outer.codec or exact
        if isinstance(codec, Blockwise):
            codec = replace(codec, exact_dtype=unit.sum_dtype)
        outermost = Hop(self.axis, levels.all + 1, codec)
        with self.context.frame() as frame:
            numel = unit.layout.level_numel(levels.os)
            moved = torch.sub(anchor.value, unit.master, out=frame.take(numel, unit.sum_dtype))
            self._write_square(unit, moved, squares[0])
            sums = Slice(unit.layout, moved, levels.os)
            lost = self._feed_back(unit, sums, codec, frame)
            yield from reduction.descend([outermost], sums, sums)
            totals = [rows[self.axis.index] for rows in sums.rows(levels.all, self.axis.size)]
            for kept, total in zip(lost, totals, strict=False):
                kept.copy_(total)
            yield from reduction.share_back(outermost, sums)
            for kept, total in zip(lost, totals, strict=False):
                kept.sub_(total)
            for level in range(levels.all, levels.os, -1):
                yield from reduction.share_back(Hop(self.context.axis(level), level, exact), sums)
            mean = moved.div_(self.axis.size)
            self._write_square(unit, mean, squares[1])
            outer_update(anchor, mean, self.outer)
            unit.master.copy_(anchor.value)

    def _feed_back(self, unit: Unit, sums: Slice, codec: Codec, frame: Frame) -> list[torch.Tensor]:
        """Add the residual to what is sent, and keep what the new messages to other ranks will lose.

        Messages have no noise, so encoding here loses what encoding for the hop does. Returns the own row of the
        residual, one view [-1] per region, for what the returned sum loses; nothing without a residual.
        """
        level, residual = unit.levels.all, self.anchors[unit].residual
        if residual is None:
            return []
        kept = Slice(unit.layout, residual, level).rows(level, self.axis.size)
        rows = sums.rows(level, self.axis.size)
        for row, old in zip(rows, kept, strict=True):
            row.add_(old)
        sent = decoded(codec, encoded(codec, rows, frame.take), rows, frame.take)
        for row, gone, new in zip(rows, sent, kept, strict=True):
            torch.sub(row, gone, out=new)
        return [new[self.axis.index] for new in kept]

    def _write_square(self, unit: Unit, values: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()
        for run in self.runs[unit]:
            out.add_(torch.linalg.vector_norm(values[run.start : run.stop], dtype=torch.float64).square())


def outer_update(anchor: Anchor, gradient: torch.Tensor, outer: Outer) -> None:
    """Update an anchor by the outer gradient [n/OS], which is overwritten. As torch.optim.SGD does, dampening 0."""
    if anchor.momentum is not None:
        anchor.momentum.mul_(outer.momentum).add_(gradient)
        if outer.nesterov:
            gradient.add_(anchor.momentum, alpha=outer.momentum)
        else:
            gradient.copy_(anchor.momentum)
    anchor.value.add_(gradient, alpha=-outer.lr)
