"""Outer steps: every H updates the replicas of a run meet, and what crosses is how far they have moved.

A replica is an engine's group of ranks with its own P, G and OS; an axis outside of all joins ranks of equal places
(``Mesh.outer``). Replicas train apart from a common anchor theta. Every H steps (DiLoCo, arXiv 2311.08105)

    Delta = mean over replicas of (theta - theta_i)        the outer gradient
    theta <- outer optimizer(theta, Delta), theta_i <- theta

Delta is reduced as a gradient is, by the chain of reduce.py with one more level: each rank of a replica takes its own
1/d of the unit across, and the sums come back over the axes that hold copies of the OS slice. A sum is encoded once,
and every rank, the owner too, decodes the same bytes. So anchors are the same bits in all replicas; each step
compares their hashes.

With a delay of T steps Delta is on its way while the training goes on: it is that of the step in which it left, and
arrives T steps later. In that step it is waited for, so results do not depend on how fast it was. Only hops between
replicas are under way meanwhile. They have communicators and a lane of their own, which is polled after the others.
The way back inside a replica is taken on arrival, in the lane of reductions.

Glossary (n: elements of the unit; all of at least fp32)
--------
anchor    Compact [n/OS]. What all replicas share since the last outer step: the model that is evaluated and exported.
momentum  Compact [n/OS]. The outer optimizer's.
residual  Compact [n/d], of the level of all axes. The rounding error of this rank's last outer step: in other ranks'
          rows that of the messages sent, in its own row that of the sum returned. The next outer step adds it to
          what this rank contributes (error feedback, as MuLoCo has it, arXiv 2505.23725).
sums      Compact [n/d], of the same level. This rank's part of a unit that is on its way: what it sends, then the sum
          over the replicas, the same bits in all of them. It is there until it has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from megazero.comm.codec import Codec, Identity, codec_of, decoded
from megazero.comm.lane import Chain, Lane, Ticket
from megazero.comm.rows import RowRun, Views
from megazero.kernels.arena import Arena, Frame
from megazero.kernels.fingerprint import fingerprint
from megazero.mesh.mesh import Mesh
from megazero.zero.context import Context
from megazero.zero.optimizer import Run
from megazero.zero.plan import Hops
from megazero.zero.policy import Outer
from megazero.zero.reduce import descend, share_back
from megazero.zero.rounding import Rounding
from megazero.zero.scalars import NOTHING, Rows, StepPart
from megazero.zero.slices import Slice
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class Anchor:
    """What the outer steps keep of one unit (glossary above)."""

    value: torch.Tensor
    momentum: torch.Tensor | None
    residual: torch.Tensor | None


@dataclass
class Flight:
    """What is on its way. sums: by unit (glossary above). left: steps until it arrives. tickets: of its chains."""

    sums: Mapping[Unit, torch.Tensor]
    left: int
    tickets: list[Ticket] = field(default_factory=list)


class OuterSteps(StepPart):
    """Takes the outer steps of one engine.

    clock: steps since replicas met, or differences left. flight: what is on its way. squares, hashes: of each unit,
    fp64 [2] (``_difference``, ``_take_up``) and int64. In the next step this rank tells all others hash, that of its
    anchors, and moved, fp64 [2]: the sums of ``squares`` if the last step took an outer step, else zeros.
    """

    columns = 3

    def __init__(
        self,
        units: Sequence[Unit],
        outer: Outer,
        mesh: Mesh,
        context: Context,
        lane: Lane,
        runs: Sequence[Run],
        timed: Callable[[str], Any],
    ) -> None:
        """lane: of reductions. runs: those whose elements this rank counts, for norms over unique slices."""
        assert mesh.outer is not None
        self.units, self.outer, self.axis, self.lane = units, outer, mesh.outer, lane
        self.away = Lane("outer", mesh.device, mesh.rank, timed)  # of what is on its way between steps
        self.lanes = [self.away]
        self.index = {unit: index for index, unit in enumerate(units)}
        self.runs = {unit: [run for run in runs if run.unit is unit] for unit in units}
        self.measured = context.rounding
        # Rounding here is not measured: no unit is the sample.
        rounding = Rounding(context.policy, mesh)
        # What is on its way holds buffers while steps take theirs.
        arena = Arena() if outer.delay else context.arena
        self.context = replace(context, rounding=rounding, arena=arena)
        self.anchors = {unit: self._new_anchor(unit) for unit in units}
        self.flight: Flight | None = None
        self._told = torch.zeros(self.columns, dtype=torch.float64, device=mesh.device)
        self.hash, self.moved = self._told[0], self._told[1:]
        self.squares = torch.zeros(len(units), 2, dtype=torch.float64, device=mesh.device)
        self.hashes = torch.zeros(len(units), dtype=torch.int64, device=mesh.device)
        self.begin()

    def _new_anchor(self, unit: Unit) -> Anchor:
        like = unit.master.value
        momentum = torch.empty_like(like) if self.outer.momentum else None
        return Anchor(torch.empty_like(like), momentum, new_sums(unit) if self.outer.feedback else None)

    def begin(self) -> None:
        """Start anew from the master weights, as after an outer step. These are the same in all replicas."""
        self.settle()
        self.flight = None
        for unit, anchor in self.anchors.items():
            anchor.value.copy_(unit.master.value)
            for held in (anchor.momentum, anchor.residual):
                if held is not None:
                    held.zero_()
        self.clock = 0
        self.moved.zero_()
        self.note_anchors()

    def write(self, row: torch.Tensor) -> None:
        row.copy_(self._told)

    def read(self, rows: Rows, sums: Rows) -> Mapping[str, Any]:
        """Raise RuntimeError if anchors differ."""
        hashes, own_squares, mean_squares = zip(*rows, strict=True)
        size = len(rows) // self.axis.size
        odd = [rank for rank, anchors in enumerate(hashes) if anchors != hashes[rank % size]]
        if odd:
            raise RuntimeError(
                f"outer replicas hold different anchors: those of ranks {odd} are not the first replica's. Start all "
                "replicas from the same weights; load the last checkpoint"
            )
        own, mean = sum(own_squares) / self.axis.size, sum(mean_squares) / self.axis.size
        if not (own or mean):
            return NOTHING
        return {"outer_norm": mean**0.5, "outer_drift": max(own - mean, 0.0) ** 0.5}

    def updated(self, made: bool) -> None:
        """Count the step, also where a replica skipped its update.

        What is on its way arrives before replicas meet again, also after a load, when its delay may have been longer.
        """
        self.clock += 1
        self.moved.zero_()
        meets = self.clock >= self.outer.interval  # after a load it may be above
        if self.flight is not None:
            self.flight.left -= 1
            if self.flight.left <= 0 or meets:
                self._land()
        if meets:
            self._meet()
            self.clock = 0

    def settle(self) -> None:
        """Wait for what is on its way. It still arrives in its step."""
        for ticket in self.flight.tickets if self.flight else ():
            self.away.wait(ticket)

    def state(self) -> dict[str, Any]:
        """Return the counters of a checkpoint."""
        return {"outer": {"clock": self.clock, "flight": self.flight and self.flight.left}}

    def resume(self, counters: Mapping[str, Any]) -> None:
        """Take up the counters, before anchors, momentum, residuals and the sums of the flight are loaded."""
        self.settle()
        self.clock, self.flight = int(counters["clock"]), None
        self.squares.zero_()
        left = counters["flight"]
        if left is not None:
            # Checkpoints have no padding: what it holds here would be hashed with the anchors.
            sums = {unit: new_sums(unit).zero_() for unit in self._moving}
            # Before 0.4.0 the number of a fragment came before it.
            self.flight = Flight(sums, left[-1] if isinstance(left, list) else left)

    @contextmanager
    def reading(self, anchor: bool) -> Iterator[None]:
        """Inside, the weights are the anchors if asked for; outside all is as it was, to the bit. Between steps."""
        with self.measured.unmeasured():
            if anchor:
                self._swap()
            try:
                yield
            finally:
                if anchor:
                    self._swap()

    def loaded(self, own: bool) -> None:
        """Hash the anchors, if they were loaded; else start anew from the master weights."""
        if own:
            self.note_anchors()
        else:
            self.begin()

    def _swap(self) -> None:
        for unit, anchor in self.anchors.items():
            with self.context.frame() as frame:
                held = frame.take(unit.master.value.numel(), unit.master.value.dtype).copy_(unit.master.value)
                unit.master.value.copy_(anchor.value)
                anchor.value.copy_(held)
            unit.weights.outdate()

    def note_anchors(self) -> None:
        """Hash the anchors, all anew."""
        for unit, anchor in self.anchors.items():
            self.hashes[self.index[unit]].copy_(fingerprint(anchor.value))
        self._write_hash()

    def _write_hash(self) -> None:
        """Hash the hashes: 32 bits, which fp64 holds exactly."""
        self.hash.copy_(fingerprint(self.hashes) & 0xFFFFFFFF)

    # -- meeting -----------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Let the replicas meet: now, or after the delay."""
        if not self.outer.delay:
            self._run(self._meeting, self._hops)
            return
        self.flight = Flight({unit: self._pack(unit) for unit in self._moving}, self.outer.delay)
        self.away.follow()
        for unit, sums in self.flight.sums.items():
            self.context.issued.add("o", unit)
            chain = self._cross(unit, Slice(unit.layout, sums, unit.axes.all))
            specs = unit.axes.hop_specs(self._hops(unit)[:2])
            self.flight.tickets.append(self.away.submit(unit.name, specs, chain))

    def _land(self) -> None:
        """Take up what is on its way."""
        self.settle()
        self._run(self._arrival, lambda unit: self._hops(unit)[2:])
        self.flight = None

    def _run(self, chain: Callable[[Unit], Chain], hops: Callable[[Unit], Hops[Codec]]) -> None:
        """Run the units' chains in the lane of reductions, and wait for them. Then the replicas have met."""
        units = self._moving
        self.lane.follow()
        pending: deque[Ticket] = deque()
        for unit in units:
            self.context.issued.add("o", unit)
            pending.append(self.lane.submit(unit.name, unit.axes.hop_specs(hops(unit)), chain(unit)))
            while len(pending) > self.context.policy.pending_reductions:  # the bound is on transient memory
                self.lane.wait(pending.popleft())
        while pending:
            self.lane.wait(pending.popleft())
        for unit in units:
            unit.weights.outdate()
        self.moved.add_(self.squares[[self.index[unit] for unit in units]].sum(0))
        self._write_hash()

    @property
    def _moving(self) -> list[Unit]:
        """The units that are trained: what is frozen stays at the anchor."""
        return [unit for unit in self.units if unit.trainable]

    def _hops(self, unit: Unit) -> Hops[Codec]:
        """Return the hops of a meeting: there and back (``_cross``), then to replicas inside (``_take_up``)."""
        codec = codec_of(self.outer.codec, unit.sum_dtype)
        return unit.plan.meeting(self.axis.spec, codec, unit.sum_dtype.itemsize)

    def _meeting(self, unit: Unit) -> Chain:
        """Reduce the unit's outer gradient, then update its anchor and master weights."""
        with self.context.frame() as frame:
            sums = self._difference(unit, frame)
            yield from self._cross(unit, sums)
            yield from self._take_up(unit, sums)

    def _pack(self, unit: Unit) -> torch.Tensor:
        """Return the part of the unit's outer gradient that this rank sends, in memory of its own."""
        with self.context.frame() as frame:
            rows = self._difference(unit, frame).rows(unit.axes.all, 1)
            return torch.cat([each.view(-1) for each in rows], out=new_sums(unit))

    def _arrival(self, unit: Unit) -> Chain:
        """Take up the sums of a unit that was on its way."""
        assert self.flight is not None
        layout, axes = unit.layout, unit.axes
        arrived = Slice(layout, self.flight.sums[unit], axes.all)
        with self.context.frame() as frame:
            sums = Slice(layout, frame.take(layout.level_numel(axes.os), unit.sum_dtype), axes.os)
            sums.copy_(arrived, axes.all)
            yield from self._take_up(unit, sums)

    def _difference(self, unit: Unit, frame: Frame) -> Slice:
        """Return theta - theta_i, in the frame. Its square, of what this rank counts, goes to ``squares``, first."""
        moved = frame.take(unit.layout.level_numel(unit.axes.os), unit.sum_dtype)
        torch.sub(self.anchors[unit].value, unit.master.value, out=moved)
        self._write_square(unit, moved, self.squares[self.index[unit]][0])
        return Slice(unit.layout, moved, unit.axes.os)

    def _cross(self, unit: Unit, sums: Slice) -> Chain:
        """Sum over the replicas what this rank takes across: in place, and every replica gets the same bits."""
        there, back, *_ = self._hops(unit)
        codec = unit.leg(there).codec
        rows, residual = sums.rows(unit.axes.all, self.axis.size), self._residual_rows(unit)
        for row, owed in zip(rows, residual, strict=False):
            row.add_(owed)
            if isinstance(codec, Identity):  # a cast, which no watch sees
                torch.sub(row, row.to(codec.wire_dtype), out=owed)
        watches = [partial(_write_lost, residual)] if residual else []
        yield from descend(unit, [there], sums, sums, self.context, watches=watches)
        own = self.axis.index
        for kept, total in zip(residual, rows, strict=False):
            kept[own].copy_(total[own])
        yield from share_back(unit, back, sums, self.context)
        for kept, total in zip(residual, rows, strict=False):
            kept[own].sub_(total[own])

    def _residual_rows(self, unit: Unit) -> Views:
        """Return the residual [replicas, n] of each region, nothing without feedback."""
        level, residual = unit.axes.all, self.anchors[unit].residual
        return () if residual is None else Slice(unit.layout, residual, level).rows(level, self.axis.size)

    def _take_up(self, unit: Unit, sums: Slice) -> Chain:
        """Bring the sums of all ranks of the replica together, then update the unit's anchor and master weights.

        sums: of the OS level, with this rank's own part in it. They are overwritten. ||Delta||^2, of what this rank
        counts, goes to ``squares``, second.
        """
        anchor, index = self.anchors[unit], self.index[unit]
        for hop in self._hops(unit)[2:]:
            yield from share_back(unit, hop, sums, self.context)
        mean = sums.buffer.div_(self.axis.size)
        self._write_square(unit, mean, self.squares[index][1])
        outer_update(anchor, mean, self.outer)
        unit.master.value.copy_(anchor.value)
        self.hashes[index].copy_(fingerprint(anchor.value))

    def _write_square(self, unit: Unit, values: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()
        for run in self.runs[unit]:
            out.add_(torch.linalg.vector_norm(values[run.start : run.stop], dtype=torch.float64).square())


def _write_lost(out: Views, codec: Codec, run: RowRun, messages: torch.Tensor, frame: Frame) -> None:
    """Write what the messages lost, row - decoded message, to the same places of ``out`` [size, n] per region."""
    arrived = decoded(codec, messages, run.rows, frame.take)
    for row, gone, lost in zip(run.rows, arrived, out, strict=True):
        torch.sub(row, gone, out=lost[run.at])


def new_sums(unit: Unit) -> torch.Tensor:
    """Return memory for what this rank takes across of a unit, [n/d]."""
    return unit.master.value.new_empty(unit.layout.level_numel(unit.axes.all))


def outer_update(anchor: Anchor, gradient: torch.Tensor, outer: Outer) -> None:
    """Update an anchor by the outer gradient [n/OS], which is overwritten. As torch.optim.SGD does, dampening 0."""
    if anchor.momentum is not None:
        anchor.momentum.mul_(outer.momentum).add_(gradient)
        if outer.nesterov:
            gradient.add_(anchor.momentum, alpha=outer.momentum)
        else:
            gradient.copy_(anchor.momentum)
    anchor.value.add_(gradient, alpha=-outer.lr)
