"""Steps whole matrices whose weights and momenta are cut into slices.

Each matrix has one owner (mesh/dealing.py). The pieces of what it computes from go there, and those of the update
come back, by exchanges over the axes that cut the states, in rounds: while one round is computed, the next one's
pieces and the last one's updates are on their way. Messages have the dtype in which the owner computes, so moving
loses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import nn

from megazero.comm.hops import hop_spec, start_route
from megazero.comm.lane import Chain, Lane, Ticket
from megazero.mesh.dealing import ROUND_NUMEL, Cut, Dealing, MatrixPiece, Place, Route, Span
from megazero.mesh.levels import INTRA
from megazero.mesh.mesh import Axis
from megazero.zero.by_matrix import ByMatrix
from megazero.zero.context import Context
from megazero.zero.layout import Slot, UnitLayout
from megazero.zero.optimizer import Run, Traits, scale_gradients
from megazero.zero.unit import Unit


def cut_of(layout: UnitLayout, slot: Slot, traits: Traits, sizes: Sequence[int], tp: int) -> Cut:
    """Return how the ranks of data-parallel axes of these sizes, and ``tp`` ranks of each, hold a matrix."""
    held: dict[Place, Span] = {}
    for place in product(*map(range, sizes)):
        for piece in layout.pieces_of(place):
            low, high = max(slot.start, piece.start), min(slot.start + slot.numel, piece.start + piece.numel)
            if low < high:
                held[place] = low - slot.start, high - slot.start
    shards = traits.shards(tp)
    rows, columns = (n * (shards if traits.split == dim else 1) for dim, n in enumerate(slot.shape))
    return Cut(rows, columns, held, shared=shards > 1)


def matrices_in(slot: Slot) -> list[Slot]:
    """Return the matrices of a parameter, which may be a stack of them along dim 0, each as a slot of its own."""
    if len(slot.shape) == 2:
        return [slot]
    count, *shape = slot.shape
    size = slot.numel // count
    return [replace(slot, shape=tuple(shape), start=slot.start + i * size) for i in range(count)]


def deal_matrices(
    layouts: Sequence[UnitLayout], traits: Mapping[str, Traits], os_axes: Sequence[tuple[int, str]], tp: int
) -> tuple[Dealing, list[Slot]]:
    """Deal the matrices of the units with these layouts. Returns the slot of each, too.

    os_axes: size and link of the axes that cut the optimizer states, innermost first. tp: the tensor-parallel ranks.
    """
    sizes, crosses = [size for size, _ in os_axes], [link != INTRA for _, link in os_axes]
    found = [
        (matrix, cut_of(layout, matrix, traits[slot.name], sizes, tp))
        for layout in layouts
        for slot in layout.slots
        if traits[slot.name].matrix and not traits[slot.name].frozen
        for matrix in matrices_in(slot)
    ]
    cuts = [cut for _, cut in found]
    tp_parts = tp if any(cut.shared for cut in cuts) else 1
    return Dealing(cuts, sizes, crosses, tp_parts, ROUND_NUMEL), [s for s, _ in found]


@dataclass(frozen=True)
class Matrix:
    """A matrix of a unit, of which this rank may hold a piece: elements from ``at`` on of the OS slice, in ``run``.

    slot, traits: of the parameter on this rank. cut: of the whole matrix. shards: how many tensor-parallel parts it
    has.
    """

    unit: Unit
    slot: Slot
    cut: Cut
    traits: Traits
    shards: int
    at: int = 0
    run: Run | None = None

    def part_of(self, source: Place) -> int:
        """Return which of the tensor-parallel parts the ranks of a place hold."""
        return source[-1] // (self.traits.span or 1) if self.shards > 1 else 0

    def whole(self, parts: torch.Tensor) -> torch.Tensor:
        """Return [rows, columns] of the parts [shards, elements of each]."""
        parts = parts.view(self.shards, *self.slot.shape)
        parts = parts.transpose(0, 1) if self.traits.split == 1 else parts
        return parts.reshape(self.cut.rows, self.cut.columns)

    def parts(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the parts [shards, elements of each] of [rows, columns]."""
        if self.traits.split == 1:
            whole = whole.reshape(self.cut.rows, self.shards, -1).transpose(0, 1)
        return whole.reshape(self.shards, -1)


class MatrixUpdates:
    """Steps the matrices of one engine's units that are cut by the same axes."""

    def __init__(
        self,
        optimizer: ByMatrix,
        runs: Sequence[Run],
        units: Sequence[Unit],
        traits: Mapping[str, Traits],
        tp: Axis,
        context: Context,
        lane: Lane,
    ) -> None:
        """runs: this rank's runs, of other units, too. units: on the same axes, one at least."""
        self.optimizer, self.context, self.lane = optimizer, context, lane
        self.runs = [run for run in runs if run.traits.matrix and run.unit.axes is units[0].axes]
        self.groups = {leaf: group for group in optimizer.param_groups for leaf in group["params"]}
        self.matrices: list[Matrix] = []
        layouts, axes = [unit.layout for unit in units], units[0].axes.axes[: units[0].axes.os]
        dealing, slots = deal_matrices(layouts, traits, [(a.size, a.link) for a in axes], tp.size)
        self.axes = [*axes, tp][: len(dealing.sizes)]
        self.routes = dealing.routes(tuple(axis.index for axis in self.axes))
        held = {
            whole.name: (whole.start + low, whole.start + high, at)
            for unit in units
            for whole, low, high, at in unit.layout.ranges(unit.axes.os)
        }
        owner = {slot.name: unit for unit in units for slot in unit.layout.slots}
        for slot, cut in zip(slots, dealing.matrices, strict=True):
            unit, mine = owner[slot.name], traits[slot.name]
            low, high, at = held.get(slot.name, (0, 0, 0))
            holds = max(low, slot.start) < min(high, slot.start + slot.numel)
            at += max(slot.start - low, 0)
            run = next((r for r in self.runs if holds and r.unit is unit and r.start <= at < r.stop), None)
            self.matrices.append(Matrix(unit, slot, cut, mine, mine.shards(tp.size), at, run))

    def step(self, factor: float) -> None:
        """Step every matrix, by the gradients in ``grad`` times ``factor``. Nothing else may be in flight on the
        lane.
        """
        scale_gradients(self.runs, factor)
        folded = self.fold()
        rounds = (self._send(number, route, folded) for number, route in enumerate(self.routes))
        coming, going = next(rounds, None), deque[_Transit]()
        while coming is not None:
            current, coming = coming, next(rounds, None)
            self.lane.wait(current.ticket)
            self._compute(current)
            self._submit(current, current.back(), current.axes[::-1])
            going.append(current)
            if len(going) > 1:
                self._take(going.popleft())
        for last in going:
            self._take(last)

    def fold(self) -> dict[nn.Parameter, torch.Tensor]:
        """Do the first, elementwise part of the step. Return by leaf the values that make up matrices."""
        folded = {}
        for run in self.runs:
            run.leaf.grad = run.grad
            with torch.no_grad():
                folded[run.leaf] = self.optimizer.fold(run.leaf)
            run.leaf.grad = None
        return folded

    def _send(self, number: int, route: Route, folded: Mapping[nn.Parameter, torch.Tensor]) -> _Transit:
        """Send a round's pieces to their owners."""
        dtype = self.optimizer.message_dtype(self.matrices[0].unit.sum_dtype)
        transit = _Transit(f"matrices {number}", route, self.axes, self.context, dtype)
        sources = []
        for piece in route.own:
            matrix = self.matrices[piece.matrix]
            assert matrix.run is not None
            start = matrix.at - matrix.run.start
            sources.append(folded[matrix.run.leaf][start : start + piece.numel])
        _copy(_split(transit.message, route.own), sources)
        self._submit(transit, transit.there(), transit.axes)
        return transit

    def _submit(self, transit: _Transit, chain: Chain, axes: Sequence[Axis]) -> None:
        self.lane.follow()  # what is sent was computed just now
        plan = tuple(hop_spec("update", axis) for axis in axes)
        transit.ticket = self.lane.submit(transit.label, plan, chain)

    def _compute(self, transit: _Transit) -> None:
        """Assemble the matrices that this rank owns, and overwrite their pieces with those of the updates."""
        arrived = transit.route.arrived
        by_matrix: dict[int, list[tuple[MatrixPiece, torch.Tensor]]] = {}
        for piece, values in zip(arrived, _split(transit.arrived, arrived), strict=True):
            by_matrix.setdefault(piece.matrix, []).append((piece, values))
        for item, pieces in by_matrix.items():
            matrix = self.matrices[item]
            parts = transit.arrived.new_empty(matrix.shards, matrix.slot.numel)
            for piece, values in pieces:
                parts[matrix.part_of(piece.source), piece.low : piece.high].copy_(values)
            update = matrix.parts(self.optimizer.direction(matrix.whole(parts)))
            for piece, values in pieces:
                values.copy_(update[matrix.part_of(piece.source), piece.low : piece.high])
            self.lane.poll()

    def _take(self, transit: _Transit) -> None:
        """Apply the updates that came back to the master weights."""
        self.lane.wait(transit.ticket)
        own = transit.route.own
        for piece, update in zip(own, _split(transit.message, own), strict=True):
            matrix = self.matrices[piece.matrix]
            assert matrix.run is not None
            weights = matrix.unit.master.value[matrix.at : matrix.at + piece.numel]
            shape = (matrix.cut.rows, matrix.cut.columns)
            self.optimizer.apply(weights, update, shape, self.groups[matrix.run.leaf])
        transit.frame.close()


class _Transit:
    """One round on its way: its buffers, in the dtype of messages, and the chains that move them.

    message: this rank's own pieces; arrived: those that it owns. Without axes they are the same. The buffers are the
    compute stream's, which has waited for both chains when the frame is closed.
    """

    ticket: Ticket

    def __init__(
        self, label: str, route: Route, axes: Sequence[Axis], context: Context, dtype: torch.dtype
    ) -> None:
        self.label, self.route, self.traffic = label, route, context.traffic
        self.frame = context.frame()
        self.axes = [axes[hop.axis] for hop in route.hops]
        self.sent = [self.frame.take(sum(hop.sent), dtype) for hop in route.hops]
        self.received = [self.frame.take(sum(hop.received), dtype) for hop in route.hops]
        alone = [] if route.hops else [self.frame.take(sum(piece.numel for piece in route.own), dtype)]
        self.message, self.arrived = [*self.sent, *alone][0], [*alone, *self.received][-1]

    def there(self) -> Chain:
        """Move the pieces to their owners: from ``message`` to ``arrived``."""
        for i, hop in enumerate(self.route.hops):
            out, given = self.received[i], self.sent[i]
            yield start_route(self.axes[i], out, given, hop.received, hop.sent, "update", self.traffic)
            if i + 1 < len(self.sent):
                _copy(*self._ordered(i))

    def back(self) -> Chain:
        """Move the pieces of updates the same way back: from ``arrived`` to ``message``."""
        for i, hop in reversed(list(enumerate(self.route.hops))):
            if i + 1 < len(self.sent):
                _copy(*reversed(self._ordered(i)))
            out, given = self.sent[i], self.received[i]
            yield start_route(self.axes[i], out, given, hop.sent, hop.received, "update", self.traffic)

    def _ordered(self, i: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the parts of the message of hop i + 1, and where they lie in what hop i received."""
        spans = self.route.hops[i].spans
        parts = self.sent[i + 1].split([numel for _, numel in spans])
        return list(parts), [self.received[i][start : start + numel] for start, numel in spans]


def _split(buffer: torch.Tensor, pieces: Sequence[MatrixPiece]) -> tuple[torch.Tensor, ...]:
    return buffer.split([piece.numel for piece in pieces]) if pieces else ()


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
