"""Outer steps: replicas of a run train apart, meet now and then, and send how far they have moved.

A replica is a launch of its own, and an engine's ranks are one replica. Who meets whom, when, and how bytes cross is
others' affair (comm/rooms, train/replicas.py). All train from a common anchor theta. At a meeting (DiLoCo, arXiv
2311.08105)

    Delta = sum_j w_j (theta - theta_j) / sum_j w_j       the outer gradient; w_j: samples that replica j trained on
    theta <- outer optimizer(theta, Delta), theta_i <- theta

Each rank sends its own 1/d of every unit, by one message. The messages of all replicas come to each of them, which
decodes them in one order, its own too. So anchors are the same bits in all replicas; their digests are compared. Sums
then come back to the copies of the OS slice inside the replica.

Glossary (n: elements of the unit; all of at least fp32)
--------
anchor    Compact [n/OS]. What all replicas share since the last meeting: the model that is evaluated and exported.
momentum  Compact [n/OS]. The outer optimizer's.
residual  Compact [n/d], of the level of all axes. What rounding has lost of this rank's messages. The next message
          has it in it (error feedback, as MuLoCo has it, arXiv 2505.23725).
lost      As residual, of a message that no meeting has taken yet (``Packed``).
wire      A slice of all units, the same in every replica, that crosses by itself: [n/D] of each, D = d x ``wires``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.codec import Codec, Identity, codec_of, decoded, encoded, row_numels
from megazero.comm.lane import Chain, Lane, Ticket
from megazero.comm.rows import Views
from megazero.kernels.arena import Frame
from megazero.kernels.fingerprint import fingerprint
from megazero.mesh.mesh import Mesh
from megazero.zero.context import Context
from megazero.zero.optimizer import Run
from megazero.zero.policy import Outer
from megazero.zero.reduce import share_back
from megazero.zero.slices import Slice
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class Anchor:
    """What the outer steps keep of one unit (glossary above)."""

    value: Tensor
    momentum: Tensor | None
    residual: Tensor | None

    @property
    def shared(self) -> list[Tensor]:
        """What is the same in all replicas."""
        return [self.value, *([] if self.momentum is None else [self.momentum])]


class Packed(NamedTuple):
    """What this rank sends: messages, uint8 [wires, m] on the host, and what rounding loses of them by unit."""

    messages: Tensor
    lost: Mapping[Unit, Tensor]


class Moved(NamedTuple):
    """norm: ||Delta||. drift: ||theta - theta_i - Delta||, how far this replica was from the mean."""

    norm: float
    drift: float


class OuterSteps:
    """Takes the outer steps of one engine, between its steps. Every rank of the replica calls each verb alike.

    buffers: tensors of the module that the anchor has, too (experts' biases), with their anchors. They are the same
    on all ranks that send them, and a meeting takes their mean, exactly. Set ``follow`` before anything else.
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
        """lane: of reductions. runs: those whose elements this rank counts, for norms over unique slices."""
        self.units, self.outer, self.mesh, self.context, self.lane = units, outer, mesh, context, lane
        self.runs = {unit: [run for run in runs if run.unit is unit] for unit in units}
        self.anchors = {unit: self._new_anchor(unit) for unit in units}
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self.begin()

    def _new_anchor(self, unit: Unit) -> Anchor:
        like, part = unit.master.value, unit.layout.level_numel(unit.axes.all)
        momentum = torch.empty_like(like) if self.outer.momentum else None
        return Anchor(torch.empty_like(like), momentum, like.new_empty(part) if self.outer.feedback else None)

    def follow(self, buffers: Sequence[Tensor]) -> None:
        """Let the anchor have these tensors of the module, too."""
        self.buffers = [(each, each.clone()) for each in buffers]

    def begin(self) -> None:
        """Start anew from the master weights, as after an outer step. These are the same in all replicas."""
        for unit, anchor in self.anchors.items():
            anchor.value.copy_(unit.master.value)
            for held in (anchor.momentum, anchor.residual):
                if held is not None:
                    held.zero_()
        for buffer, held in self.buffers:
            held.copy_(buffer)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, the weights are the anchors; outside all is as it was, to the bit. Between steps."""
        with self.context.rounding.unmeasured():
            self._swap()
            try:
                yield
            finally:
                self._swap()

    def _swap(self) -> None:
        pairs = [(unit.master.value, anchor.value) for unit, anchor in self.anchors.items()]
        for own, held in (*pairs, *self.buffers):
            with self.context.frame() as frame:
                kept = frame.take(own.numel(), own.dtype).view_as(own).copy_(own)
                own.copy_(held)
                held.copy_(kept)
        for unit in self.units:
            unit.weights.outdate()

    # -- a meeting -----------------------------------------------------------------------------------

    @cached_property
    def _moving(self) -> list[Unit]:
        """The units that are trained: what is frozen stays at the anchor."""
        return [unit for unit in self.units if unit.trainable]

    def _codec(self, unit: Unit) -> Codec:
        return codec_of(self.outer.codec, unit.sum_dtype) or Identity(unit.sum_dtype)

    def _bytes(self, unit: Unit) -> int:
        """Return the bytes of one wire's message of a unit."""
        codec = self._codec(unit)
        wires = unit.plan.cut.ranks[-1] * self.outer.wires
        return codec.message_numel(*(n // wires for _, n in unit.layout.regions)) * codec.wire_dtype.itemsize

    @cached_property
    def _ends(self) -> list[int]:
        """Where the messages of the units that move end, and at last those of the buffers."""
        sizes = [*map(self._bytes, self._moving), sum(held.nbytes for _, held in self.buffers)]
        return [*accumulate(sizes)]

    @property
    def message_bytes(self) -> int:
        """The bytes of the message of one wire."""
        return self._ends[-1]

    def pack(self) -> Packed:
        """Encode what this replica's weights have moved by since the anchor, with what rounding has lost before."""
        messages = torch.empty(self.outer.wires, self.message_bytes, dtype=torch.uint8)
        lost = dict[Unit, Tensor]()
        for unit, low, high in zip(self._moving, (0, *self._ends), self._ends, strict=False):
            codec, residual = self._codec(unit), self.anchors[unit].residual
            with self.context.frame() as frame:
                rows = self._difference(unit, frame).rows(unit.axes.all, self.outer.wires)
                for row, owed in zip(rows, self._part(unit, residual), strict=False):
                    row.add_(owed)
                sent = encoded(codec, rows, frame.take)
                messages[:, low:high].copy_(sent.view(torch.uint8))
                if residual is not None:
                    lost[unit] = torch.empty_like(residual)
                    arrived = decoded(codec, sent, rows, frame.take)
                    for row, gone, out in zip(rows, arrived, self._part(unit, lost[unit]), strict=True):
                        torch.sub(row, gone, out=out).mul_(self.outer.feedback)
        for view, (buffer, _) in zip(self._tails(messages), self.buffers, strict=True):
            view.copy_(buffer.view(-1).view(torch.uint8))
        return Packed(messages, lost)

    def take_up(
        self,
        seats: Sequence[Sequence[Tensor]],
        weights: Sequence[float],
        lr: float,
        own: Packed | None,
        keep: bool = False,
    ) -> Moved:
        """Take an outer step of rate ``lr`` by the messages of all seats, in their order.

        seats: of each the messages [m] of this rank's wires, on the host. own: what this rank packed, if it is among
        them; without it the residual begins at zero. keep: this replica is not among them, so what it has moved by
        since the anchor stays, and is in its next message, with the residual.
        """
        squares = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        places = zip(self._moving, (0, *self._ends), self._ends, strict=False)
        parts = {unit: [[wire[low:high] for wire in seat] for seat in seats] for unit, low, high in places}
        self._run(lambda unit: self._arrival(unit, parts[unit], weights, lr, keep, squares))
        for unit in self._moving if not keep else ():
            if (residual := self.anchors[unit].residual) is not None:
                residual.copy_(own.lost[unit]) if own else residual.zero_()
        tails = [self._tails(seat[0][None]) for seat in seats]
        for at, (buffer, held) in enumerate(self.buffers):
            every = [tail[at][0].view(buffer.dtype).view_as(buffer).to(buffer) for tail in tails]
            mean = torch.stack([w * x for w, x in zip(weights, every, strict=True)]).sum(0) / sum(weights)
            buffer.copy_(buffer + mean - held if keep else mean)
            held.copy_(mean)
        norm, drift = self.mesh.gather_rows(squares).sum(0).sqrt().tolist()
        return Moved(norm, drift)

    def _tails(self, messages: Tensor) -> Sequence[Tensor]:
        """Return the buffers' bytes [wires, bytes] in messages [wires, m]."""
        sizes = [held.nbytes for _, held in self.buffers]
        return messages[:, self.message_bytes - sum(sizes) :].split(sizes, 1) if sizes else ()

    def _run(self, chain: Callable[[Unit], Chain]) -> None:
        """Run a chain of each unit that moves in the lane of reductions, by the hops of ``UnitPlan.sharing``."""
        self.lane.follow()
        pending: deque[Ticket] = deque()
        for unit in self._moving:
            self.context.issued.add("o", unit)
            pending.append(self.lane.submit(unit.name, unit.axes.hop_specs(unit.plan.sharing), chain(unit)))
            while len(pending) > self.context.policy.pending_reductions:  # the bound is on transient memory
                self.lane.wait(pending.popleft())
        while pending:
            self.lane.wait(pending.popleft())
        for unit in self._moving:
            unit.weights.outdate()

    def _arrival(
        self,
        unit: Unit,
        seats: Sequence[Sequence[Tensor]],
        weights: Sequence[float],
        lr: float,
        keep: bool,
        squares: Tensor,
    ) -> Chain:
        """Add up the seats' messages of a unit, then update its anchor and master weights."""
        anchor, codec = self.anchors[unit], self._codec(unit)
        with self.context.frame() as frame:
            taken = frame.take(unit.layout.level_numel(unit.axes.os), unit.sum_dtype)
            sums = Slice(unit.layout, taken, unit.axes.os)
            rows = sums.rows(unit.axes.all, self.outer.wires)
            for row in rows:
                row.zero_()
            for seat, weight in zip(seats, weights, strict=True):
                with self.context.frame() as inner:
                    numel = codec.message_numel(*row_numels(rows))
                    message = inner.take(len(seat) * numel, codec.wire_dtype).view(len(seat), -1)
                    for wire, received in zip(message.view(torch.uint8), seat, strict=True):
                        wire.copy_(received)
                    for row, values in zip(rows, decoded(codec, message, rows, inner.take), strict=True):
                        row.add_(values, alpha=weight)
            for row in rows:
                row.div_(sum(weights))
            yield from self._share(unit, sums)
            mean, moved = sums.buffer, self._difference(unit, frame).buffer
            self._add_square(unit, mean, squares[0])
            self._add_square(unit, moved.sub_(mean), squares[1])
            before = moved.copy_(anchor.value)
            outer_update(anchor, mean, self.outer, lr)
            if keep:
                unit.master.value.add_(anchor.value).sub_(before)
            else:
                unit.master.value.copy_(anchor.value)

    def _difference(self, unit: Unit, frame: Frame) -> Slice:
        """Return theta - theta_i, in the frame."""
        moved = frame.take(unit.layout.level_numel(unit.axes.os), unit.sum_dtype)
        torch.sub(self.anchors[unit].value, unit.master.value, out=moved)
        return Slice(unit.layout, moved, unit.axes.os)

    def _share(self, unit: Unit, sums: Slice) -> Chain:
        """Bring all ranks' own parts together."""
        for hop in unit.plan.sharing:
            yield from share_back(unit, hop, sums, self.context)

    def _part(self, unit: Unit, part: Tensor | None) -> Views:
        """Return views [wires, n] of each region of a compact slice of the level of all axes, if there is one."""
        level = unit.axes.all
        return () if part is None else Slice(unit.layout, part, level).rows(level, self.outer.wires)

    def _add_square(self, unit: Unit, values: Tensor, out: Tensor) -> None:
        for run in self.runs[unit]:
            out.add_(torch.linalg.vector_norm(values[run.start : run.stop], dtype=torch.float64).square())

    # -- the anchor as bytes -------------------------------------------------------------------------

    def _slices(self, wire: int) -> Iterator[Tensor]:
        """Yield what the anchor holds of a wire, 1-D: of the units that move values and momentum, then the
        buffers."""
        for unit in self._moving:
            for held in self.anchors[unit].shared:
                for rows in Slice(unit.layout, held, unit.axes.os).rows(unit.axes.all, self.outer.wires):
                    yield rows[wire]
        yield from (held.view(-1) for _, held in self.buffers)

    def digest(self, wire: int) -> int:
        """Return a hash of what the anchor holds of a wire (counted from 0 on this rank)."""
        return int(fingerprint(torch.stack([fingerprint(each) for each in self._slices(wire)])))

    def anchor_bytes(self, wire: int) -> int:
        return sum(each.nbytes for each in self._slices(wire))

    def read_anchor(self, wire: int, offset: int, count: int) -> bytes:
        """Return ``count`` bytes of a wire of the anchor from ``offset`` on."""
        found = bytearray()
        for each in self._slices(wire):
            if offset < each.nbytes and count:
                part = each.view(torch.uint8)[offset : offset + count].cpu()
                found += part.numpy().tobytes()
                count -= part.numel()
            offset = max(0, offset - each.nbytes)
        return bytes(found)

    def adopt(self, wires: Sequence[Tensor]) -> None:
        """Take another replica's anchor, the bytes [m] of this rank's wires, and begin from its weights.

        The residual begins at zero.
        """
        for wire, received in enumerate(wires):
            places = [*self._slices(wire)]
            for each, part in zip(places, received.split([each.nbytes for each in places]), strict=True):
                each.view(torch.uint8).copy_(part)
        for at in range(2 if self.outer.momentum else 1):
            self._run(partial(self._adopt, at))
        for unit in self._moving:
            unit.master.value.copy_(self.anchors[unit].value)
            if (residual := self.anchors[unit].residual) is not None:
                residual.zero_()
        for buffer, held in self.buffers:
            buffer.copy_(held)

    def _adopt(self, at: int, unit: Unit) -> Chain:
        yield from self._share(unit, Slice(unit.layout, self.anchors[unit].shared[at], unit.axes.os))


def outer_update(anchor: Anchor, gradient: Tensor, outer: Outer, lr: float) -> None:
    """Update an anchor by the outer gradient [n/OS], which is overwritten. As torch.optim.SGD does, dampening 0."""
    if anchor.momentum is not None:
        anchor.momentum.mul_(outer.momentum).add_(gradient)
        if outer.nesterov:
            gradient.add_(anchor.momentum, alpha=outer.momentum)
        else:
            gradient.copy_(anchor.momentum)
    anchor.value.add_(gradient, alpha=-lr)
