"""Gradients: when a unit's reduction begins, and what it sends, hop by hop.

``Reducer`` decides when: unit by unit as gradients complete, in one order on every rank, behind the backward.
``reduction`` is what moves for one unit and micro-batch, by the hops of its plan (plan.py). It is a chain for
comm.lane: it yields each collective's Work and goes on when that has finished. It takes the sub-axes innermost first.
On each it does an all-to-all, then a sum by source index in at least fp32, with one collective and one message per
sub-axis (the two hops of qgZ, ZeRO++ section 4.2, on any mesh).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from megazero.comm.codec import Blockwise, Codec, Identity
from megazero.comm.hops import give_back, hop_spec, reduce, reduce_through, sum_all
from megazero.comm.lane import Chain, Lane, Ticket
from megazero.comm.wire import mixes
from megazero.mesh.mesh import Axis
from megazero.zero.context import Context
from megazero.zero.plan import EXCHANGE, Hop, Hops
from megazero.zero.rounding import GRADIENTS
from megazero.zero.slices import Slice, clear
from megazero.zero.unit import Unit


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
        """Return when no chain is in flight."""
        while self.pending:
            self.lane.wait(self.pending.popleft())
        self.lane.drain()

    def finish(self) -> None:
        """Return when every sum is there, and its padding zero."""
        self.wait()
        clear(self._mixed)

    @cached_property
    def _mixed(self) -> list[torch.Tensor]:
        """The padding of all sums that a format may have mixed with values."""
        mixed = (u for u in self.units if u.trainable and any(map(mixes, u.codecs.gradients.values())))
        return [gap for unit in mixed for gap in unit.gradients.slice.gaps]

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
        done = unit.gradients.backwards
        first, last = done == 0, done == self.micro_batches - 1
        staging, frame = unit.gradients.close_micro_batch(last) or (None, self.context.frame())
        hops = unit.plan.reduction(last, first and last, self.exact)
        chain = reduction(unit, hops, staging, self.context, accumulate=not first, last=last)
        self.context.issued.add("r", unit, str(last))
        if not hops:
            deque(chain, maxlen=0)
            return
        self.lane.follow()  # the gradients are the compute stream's latest
        # The staging is the compute stream's: it comes free when that has waited for the chain.
        self.pending.append(
            self.lane.submit(unit.name, unit.axes.hop_specs(hops), chain, release=frame.close)
        )
        # The bound is on staging memory; where there is none (G = 1) the backward need not wait.
        while staging is not None and len(self.pending) > self.context.policy.pending_reductions:
            self.lane.wait(self.pending.popleft())


def reduction(
    unit: Unit, hops: Hops[Codec], staging: Slice | None, context: Context, *, accumulate: bool, last: bool
) -> Chain:
    """Reduce one unit's gradients of a micro-batch into ``grad`` by these hops (``UnitPlan.reduction``).

    Replicas reduce-scatter down to an equal share each, then gather the shares back, so that every replica holds the
    owner's bits.

    staging, parameter dtype: the micro-batch's gradients; None: they are in ``grad``. accumulate: what ``grad`` holds
    is of earlier micro-batches; the first overwrites it. last: this micro-batch is the step's last.
    """
    g, sums = unit.axes.g, unit.gradients.slice
    down = [hop for hop in hops if hop.verb == EXCHANGE]
    if staging is not None:
        yield from descend(unit, down[:g], staging, sums, context, accumulate=accumulate)
    if not last:
        return
    yield from descend(unit, down[g:], sums, sums, context)
    for hop in hops[len(down) :]:
        yield from share_back(unit, hop, sums, context)


def descend(
    unit: Unit,
    hops: Sequence[Hop[Codec]],
    source: Slice,
    target: Slice,
    context: Context,
    *,
    accumulate: bool = False,
) -> Chain:
    """Reduce-scatter from the source's level down to the last hop's, all of verb EXCHANGE. The sums go to ``target``.

    accumulate: they are added to what it holds. Every hop sends messages to the others, and sums theirs, decoded,
    into the slice of the next level; so each hop leaves 1/size of the elements. In place (target is source) the sums
    of every hop stay where they are.
    """
    with context.frame() as frame:
        for group in fused(hops):
            sums = target
            if source.buffer is not target.buffer and group[-1] is not hops[-1]:
                level = group[-1].level
                empty = frame.take(unit.layout.level_numel(level), target.buffer.dtype)
                sums = Slice(unit.layout, empty, level)
            yield from _descend_by(unit, group, source, sums, context, accumulate and sums is target)
            source = sums


def fused(hops: Sequence[Hop[Codec]]) -> Iterator[list[Hop[Codec]]]:
    """Yield the hops by groups: quantised ones in a row pass their sums straight on."""
    group: list[Hop[Codec]] = []
    for hop in hops:
        if group and not (isinstance(group[-1].format, Blockwise) and isinstance(hop.format, Blockwise)):
            yield group
            group = []
        group.append(hop)
    if group:
        yield group


def _descend_by(
    unit: Unit,
    group: Sequence[Hop[Codec]],
    source: Slice,
    sums: Slice,
    context: Context,
    accumulate: bool,
) -> Chain:
    """Take one hop, or several that are fused."""
    watches = context.rounding.watches(unit, GRADIENTS)
    legs = [unit.leg(hop) for hop in group]
    leg, level = legs[0], group[0].level
    rows = source.hop(level - 1, leg.axis.size, leg.axis.index)
    if len(group) > 1:
        out = sums.flat(group[-1].level)
        yield from reduce_through(legs, rows, out, context, accumulate=accumulate, watches=watches)
        return
    apart = None if sums.buffer is source.buffer else sums.flat(level)
    one = isinstance(leg.codec, Identity) and len(unit.layout.regions) == 1
    whole = one and leg.axis.size > 2  # nothing is copied
    yield from reduce(leg, rows, apart, context, accumulate=accumulate, whole=whole, watches=watches)


def share_back(unit: Unit, hop: Hop[Codec], sums: Slice, context: Context) -> Chain:
    """Return the sums of the hop's level to replicas: this rank's share goes to the others of the axis, in place.

    The owner, too, takes the decoded values, so that replicas stay equal to the bit.
    """
    share, out = sums.rows(hop.level, 1), sums.rows(hop.level - 1, hop.axis.size)
    watches = context.rounding.watches(unit, GRADIENTS)
    yield from give_back(unit.leg(hop), share, out, context, watches=watches)


def sum_ends(unit: Unit, ends: Axis, exact: bool, context: Context) -> Chain:
    """Sum a tied parameter's two ends into this rank's OS slice of ``grad``, in the codec of gradients for their
    link.

    The first and the last pipeline stage hold it (tied embeddings), each in a unit of its own with one name and
    layout, and each has reduced its own gradients. Both add up the same decoded messages, so masters, moments (whose
    noise goes by name and element) and what refreshes send stay the same bits at both.
    """
    leg = unit.leg(unit.plan.ends(ends.spec, exact), ends)
    rows, out = unit.gradients.slice.rows(unit.axes.os, 1), unit.gradients.slice.flat(unit.axes.os)
    watches = context.rounding.watches(unit, GRADIENTS)
    if mixes(leg.codec):
        unit.gradients.slice.clear_padding()
    yield from sum_all(leg, rows, out, context, watches=watches)
