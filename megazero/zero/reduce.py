"""Gradients: when a unit's reduction begins, and what it sends, hop by hop.

``Reducer`` decides when: unit by unit as gradients complete, in one order on every rank, behind the backward.
``Reduction`` is what moves for one unit and micro-batch. It is a chain for comm.lane: it yields each collective's
Work and goes on when that has finished. It takes the sub-axes innermost first. On each it does an all-to-all, then
a sum by source index in at least fp32, with one collective and one message per sub-axis (the two hops of qgZ,
ZeRO++ section 4.2, on any mesh).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megazero.comm.codec import Blockwise, Codec, Identity
from megazero.comm.hops import HopSpec, Leg, give_back, hop_spec, reduce, reduce_through, sum_all
from megazero.comm.lane import Chain, Lane, Ticket
from megazero.comm.watch import Watch
from megazero.comm.wire import Codecs
from megazero.mesh.mesh import Axis
from megazero.zero.context import Context
from megazero.zero.layout import Slice
from megazero.zero.rounding import GRADIENTS
from megazero.zero.unit import Unit

EXACT = Codecs[Codec]()


class Reducer:
    """Submits reductions in the reverse of the forward's order of first use, whatever the order of gradients."""

    def __init__(self, units: Sequence[Unit], context: Context, lane: Lane) -> None:
        self.units, self.context, self.lane = units, context, lane
        self.micro_batches = 0
        self.exact = False  # gradient codecs are off in this step
        self.queue: deque[Unit] = deque()  # units of this backward, in the order of submission
        self.complete: set[Unit] = set()
        self.pending: deque[Ticket] = deque()

    def open(self, units: Sequence[Unit]) -> None:
        """Note that a backward begins, and that its units are reduced in this order."""
        self.queue.extend(u for u in units if u.trainable)

    def completed(self, unit: Unit) -> None:
        """Note that the unit's last gradient of this micro-batch has arrived."""
        self.complete.add(unit)
        self._submit_complete()

    def close(self) -> None:
        """Note that the backward ends: parameters without a gradient contribute zeros."""
        self.complete.update(self.queue)
        self._submit_complete()

    def join_ends(self, ends: Axis) -> None:
        """Add up the tied parameters' sums of the pipeline's two ends.

        This is done last, because the other end may be late.
        """
        for unit in self.units:
            if unit.tied and unit.trainable:
                for ticket in self.pending:  # a chain may begin before older ones of its unit have ended
                    if ticket.label == unit.name:
                        self.lane.wait(ticket)
                self.context.issued.add("t", unit)
                chain = sum_ends(unit, ends, self.exact, self.context)
                self.lane.follow()
                self.pending.append(self.lane.submit(unit.name, (hop_spec("reduce", ends),), chain))

    def wait(self) -> None:
        """Return when every sum is there."""
        while self.pending:
            self.lane.wait(self.pending.popleft())
        self.lane.drain()

    def abort(self) -> None:
        """Finish the chains in flight and forget the rest of the step."""
        self.wait()
        self.queue.clear()
        self.complete.clear()

    def _submit_complete(self) -> None:
        while self.queue and self.queue[0] in self.complete:
            unit = self.queue.popleft()
            self.complete.discard(unit)
            self._submit(unit)

    def _submit(self, unit: Unit) -> None:
        micro_batch, last = unit.gradients.backwards, unit.gradients.backwards == self.micro_batches - 1
        staging, frame = unit.gradients.close_micro_batch(last) or (None, self.context.frame())
        reduction = Reduction(unit, self.context, micro_batch, last, self.exact)
        plan, chain = reduction.hop_specs(), reduction.chain(staging)
        self.context.issued.add("r", unit, str(last))
        if not plan:
            deque(chain, maxlen=0)
            return
        self.lane.follow()  # the gradients are the compute stream's latest
        # The staging is the compute stream's: it comes free when that has waited for the chain.
        self.pending.append(self.lane.submit(unit.name, plan, chain, release=frame.close))
        # The bound is on staging memory; where there is none (G = 1) the backward need not wait.
        while staging is not None and len(self.pending) > self.context.policy.pending_reductions:
            self.lane.wait(self.pending.popleft())


@dataclass(frozen=True)
class ReduceHop(Leg):
    """One hop of a reduction, from level ``number`` - 1 to ``number``."""

    number: int


@dataclass(frozen=True)
class Reduction:
    """Reduces one unit's gradients of one micro-batch into ``grad``; after the last also over OS/G and replicas.

    A hop uses the unit's codec for its link. Where there is none it sends the identity: a raw gradient in the
    parameters' own dtype (exact), sums in at least fp32. Replicas reduce-scatter down to an equal share each, then
    gather the shares back, so that every replica holds the owner's bits.

    micro_batch: its number in the step. The first overwrites ``grad``. last: it is reduced to OS.
    exact: codecs are off in this step.
    """

    unit: Unit
    context: Context
    micro_batch: int
    last: bool
    exact: bool

    def hop_specs(self) -> tuple[HopSpec, ...]:
        """Return the collectives of ``chain``, in their order."""
        axes = self.unit.axes
        order = [*range(1, axes.g + 1)]
        if self.last:
            order += [*range(axes.g + 1, axes.all + 1), *range(axes.all, axes.os, -1)]
        return axes.hop_specs("reduce", order)

    def chain(self, staging: Slice | None) -> Chain:
        """Yield each collective's Work. staging, parameter dtype: the micro-batch's gradients; None: they
        are in ``grad``.
        """
        unit, axes, sums = self.unit, self.unit.axes, self.unit.gradients.slice
        if axes.g:
            assert staging is not None
            hops = self._hops(range(1, axes.g + 1))
            yield from descend(unit, hops, staging, sums, self.context, accumulate=self.micro_batch > 0)
        if not self.last:
            return
        hops = self._hops(range(axes.g + 1, axes.all + 1))
        yield from descend(unit, hops, sums, sums, self.context)
        for number in range(axes.all, axes.os, -1):
            axis = axes.axis(number)
            codec = None if self.exact else unit.codecs.gradients.get(axis.link)
            yield from share_back(unit, axis, number, codec or Identity(unit.sum_dtype), sums, self.context)
        if unit.codecs.mixes:
            sums.clear_padding()

    def _hops(self, numbers: range) -> list[ReduceHop]:
        """Make the hops of these levels. Only the first level's codec may take raw gradients; others take sums."""
        unit = self.unit
        codecs = EXACT if self.exact else unit.codecs
        raw, sums = Identity(unit.dtype), Identity(unit.sum_dtype)
        hops: list[ReduceHop] = []
        for number in numbers:
            axis = unit.axes.axis(number)
            unsummed = number == 1 and (unit.axes.g > 0 or self.last and self.micro_batch == 0)
            codec = codecs.gradients.get(axis.link) or (raw if unsummed else sums)
            hops.append(ReduceHop(axis, codec, number))
        return hops


def descend(
    unit: Unit,
    hops: Sequence[ReduceHop],
    source: Slice,
    target: Slice,
    context: Context,
    *,
    accumulate: bool = False,
    watches: Sequence[Watch] = (),
) -> Chain:
    """Reduce-scatter from the source's level down to the last hop's. The sums go to ``target``.

    accumulate: they are added to what it holds. Every hop sends messages to the others, and sums theirs, decoded,
    into the slice of the next level; so each hop leaves 1/size of the elements. In place (target is source) the sums
    of every hop stay where they are. watches: see the quantised messages, beside those of the context's rounding.
    """
    with context.frame() as frame:
        for group in fused(hops):
            number = group[-1].number
            sums = target
            if source.buffer is not target.buffer and group[-1] is not hops[-1]:
                empty = frame.take(unit.layout.level_numel(number), target.buffer.dtype)
                sums = Slice(unit.layout, empty, number)
            seen = (*context.rounding.watches(unit, GRADIENTS), *watches)
            yield from _descend_by(unit, group, source, sums, context, accumulate and sums is target, seen)
            source = sums


def fused(hops: Sequence[ReduceHop]) -> Iterator[list[ReduceHop]]:
    """Yield the hops by groups: quantised ones in a row pass their sums straight on."""
    group: list[ReduceHop] = []
    for hop in hops:
        if group and not (isinstance(group[-1].codec, Blockwise) and isinstance(hop.codec, Blockwise)):
            yield group
            group = []
        group.append(hop)
    if group:
        yield group


def _descend_by(
    unit: Unit,
    group: Sequence[ReduceHop],
    source: Slice,
    sums: Slice,
    context: Context,
    accumulate: bool,
    watches: Sequence[Watch],
) -> Chain:
    """Take one hop, or several that are fused."""
    hop = group[0]
    rows = source.hop(hop.number - 1, hop.axis.size, hop.axis.index)
    if len(group) > 1:
        out = sums.flat(group[-1].number)
        yield from reduce_through(group, rows, out, context, accumulate=accumulate, watches=watches)
        return
    apart = None if sums.buffer is source.buffer else sums.flat(hop.number)
    one = isinstance(hop.codec, Identity) and len(unit.layout.regions) == 1
    whole = one and hop.axis.size > 2  # nothing is copied
    yield from reduce(hop, rows, apart, context, accumulate=accumulate, whole=whole, watches=watches)


def share_back(unit: Unit, axis: Axis, number: int, codec: Codec, sums: Slice, context: Context) -> Chain:
    """Return the sums of level ``number`` to replicas: this rank's share goes to the others of the axis, in place.

    The owner, too, takes the decoded values, so that replicas stay equal to the bit.
    """
    share, out = sums.rows(number, 1), sums.rows(number - 1, axis.size)
    watches = context.rounding.watches(unit, GRADIENTS)
    yield from give_back(Leg(axis, codec), share, out, context, watches=watches)


def sum_ends(unit: Unit, ends: Axis, exact: bool, context: Context) -> Chain:
    """Sum a tied parameter's two ends into this rank's OS slice of ``grad``, in the codec of gradients for their
    link.

    The first and the last pipeline stage hold it (tied embeddings), each in a unit of its own with one name and
    layout, and each has reduced its own gradients. Both add up the same decoded messages, so masters, moments (whose
    noise goes by name and element) and what refreshes send stay the same bits at both.
    """
    codec = (None if exact else unit.codecs.gradients.get(ends.link)) or Identity(unit.sum_dtype)
    rows, out = unit.gradients.slice.rows(unit.axes.os, 1), unit.gradients.slice.flat(unit.axes.os)
    watches = context.rounding.watches(unit, GRADIENTS)
    yield from sum_all(Leg(ends, codec), rows, out, context, watches=watches)
    if unit.codecs.mixes:
        unit.gradients.slice.clear_padding()
