"""Gradients: when a unit's reduction begins, and what it sends, hop by hop.

``Reducer`` decides when: unit by unit as gradients complete, in one order on every rank, behind the backward.
``Reduction`` is what moves for one unit and micro-batch. It is a chain for comm.lane: it yields each collective's
Work and goes on when that has finished. It takes the sub-axes innermost first. On each it does an all-to-all, then
a sum by source index in at least fp32, with one collective and one message per sub-axis (the two hops of qgZ,
ZeRO++ section 4.2, on any mesh).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megazero.comm.codec import Blockwise, Codec, Identity, Noise, decoded, encoded
from megazero.comm.hops import HopSpec, hop_spec, other_rows, start_exchange, start_gather
from megazero.comm.lane import Chain, Lane, Ticket
from megazero.kernels.arena import Take
from megazero.mesh.grid import INTER
from megazero.mesh.mesh import Axis
from megazero.zero.context import Context
from megazero.zero.layout import Slice, Views
from megazero.zero.policy import Codecs
from megazero.zero.rounding import GRADIENTS, add_residual, commit_residual, lost_slice
from megazero.zero.scalars import StepPart
from megazero.zero.unit import Unit

EXACT = Codecs()


class Reducer(StepPart):
    """Submits reductions in the reverse of the forward's order of first use, whatever the order of gradients."""

    def __init__(self, units: Sequence[Unit], context: Context, lane: Lane) -> None:
        self.units, self.context, self.lane = units, context, lane
        self.micro_batches = 0
        self.exact = False  # gradient codecs are off in this step
        self.index = {u: i for i, u in enumerate(units)}
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
                self.context.issued.add(f"t{self.index[unit]}")
                chain = sum_ends(unit, ends, self.exact, self.context)
                self.lane.follow()
                self.pending.append(self.lane.submit(unit.name, (hop_spec("reduce", ends),), chain))

    def wait(self) -> None:
        """Return when every sum is there."""
        while self.pending:
            self.lane.wait(self.pending.popleft())
        self.lane.drain()

    def updated(self, made: bool) -> None:
        """After an update, take what the step's messages lost into the residuals."""
        rounding = self.context.rounding
        updates = rounding.updates + 1  # this one included, which the guard counts next
        for unit in self.units if made else ():
            commit_residual(unit, rounding.divisor, self.exact, updates)

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
        micro_batch = MicroBatchIndex(unit.backwards, unit.backwards == self.micro_batches - 1, self.exact)
        staging, frame = unit.close_micro_batch(micro_batch.last) or (None, self.context.frame())
        reduction = Reduction(unit, micro_batch, self.context)
        plan, chain = reduction.hop_specs(), reduction.chain(staging)
        self.context.issued.add(f"r{self.index[unit]} {micro_batch.last}")
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
class Reduction:
    """Reduces one unit's gradients of one micro-batch into ``grad``; after the last also over OS/G and replicas.

    A hop uses the unit's codec for its link. Where there is none it sends the identity: a raw gradient in the
    parameters' own dtype (exact), sums in at least fp32. Replicas reduce-scatter down to an equal share each, then
    gather the shares back, so that every replica holds the owner's bits.
    """

    unit: Unit
    micro_batch: MicroBatchIndex
    context: Context

    def hop_specs(self) -> tuple[HopSpec, ...]:
        """Return the collectives of ``chain``, in their order."""
        axes = self.unit.axes
        order = [*range(1, axes.g + 1)]
        if self.micro_batch.last:
            order += [*range(axes.g + 1, axes.all + 1), *range(axes.all, axes.os, -1)]
        return axes.hop_specs("reduce", order)

    def chain(self, staging: Slice | None) -> Chain:
        """Yield each collective's Work. staging, parameter dtype: the micro-batch's gradients; None: they
        are in ``grad``.
        """
        unit, axes, sums = self.unit, self.unit.axes, self.unit.grad_slice
        if axes.g:
            assert staging is not None
            yield from self.descend(self._hops(range(1, axes.g + 1)), staging, sums)
        if not self.micro_batch.last:
            return
        yield from self.descend(self._hops(range(axes.g + 1, axes.all + 1)), sums, sums)
        for level in range(axes.all, axes.os, -1):
            axis = axes.axis(level)
            codec = None if self.micro_batch.exact else unit.codecs.gradients(axis.link)
            yield from self.share_back(Hop(axis, level, codec or Identity(unit.sum_dtype)), sums)
        if unit.codecs.mixes:
            sums.clear_padding()
        if unit.carry is not None:
            carried = Slice(unit.layout, unit.carry, axes.os).rows(axes.os, 1)
            for rows, extra in zip(sums.rows(axes.os, 1), carried, strict=True):
                rows.add_(extra, alpha=self.context.rounding.divisor)

    def descend(self, hops: Sequence[Hop], source: Slice, target: Slice) -> Chain:
        """Reduce-scatter from the source's level down to the last hop's; the sums go to ``target``.

        They are added to what it holds, unless this is the step's first micro-batch. Every hop sends messages to
        the others, and sums theirs, decoded, into the slice of the next level; so each hop leaves 1/size of the
        elements. In place (target is source) the sums of every hop stay where they are. Later hops need only the
        slice inside, so the rest of the buffer is free to keep the errors of feedback.
        """
        unit = self.unit
        in_place = source.buffer is target.buffer
        messages: torch.Tensor | None = None
        current = self.context.frame()  # what comes free after this hop
        for i, hop in enumerate(hops):
            last, following = i == len(hops) - 1, self.context.frame()
            if messages is None:
                messages = self._encode(hop, source, current.take)
            received = current.take(messages.numel(), messages.dtype).view(messages.shape)
            work = start_exchange(hop.axis, received, messages, self.context.traffic)
            if hop.feedback and isinstance(hop.codec, Blockwise):
                self._keep_error(hop, source, messages)
            yield work
            if hop.feedback and isinstance(hop.codec, Identity):  # sent exactly: nothing was lost
                self._others(hop, lost_slice(unit), lambda rows, *_: [r.zero_() for r in rows])
            if hop.fused:
                messages = self._pass_on(hop, hops[i + 1], received, following.take)
            else:
                if in_place or last:
                    sums, accumulate = target, last and not in_place and not self.micro_batch.first
                else:
                    empty = following.take(unit.layout.level_numel(hop.level), target.buffer.dtype)
                    sums, accumulate = Slice(unit.layout, empty, hop.level), False
                self._sum(hop, received, source, sums, accumulate)
                source, messages = sums, None
            current.close()
            current = following

    def share_back(self, hop: Hop, sums: Slice) -> Chain:
        """Return the sums to replicas: this rank's share goes to the others of the axis, in place.

        The owner, too, takes the decoded values, so that replicas stay equal to the bit. For the same reason noise
        is drawn by element, not by sender: after the outer axes' way back several ranks hold the same share and
        round it.
        """
        start = self.unit.layout.pieces(hop.level)[0].start
        noise = self.context.rounding.noise_for(hop.codec, self.unit, f"return {hop.level}", start)
        share = sums.rows(hop.level, 1)
        with self.context.frame() as frame:
            messages = encoded(hop.codec, share, frame.take, noise)
            self._measure(hop, share, messages)
            size = hop.axis.size
            received, *rest = regions = sums.rows(hop.level - 1, size)
            if rest or messages.dtype != sums.buffer.dtype:  # else it lands in place
                received = frame.take(size * messages.numel(), messages.dtype).view(size, -1)
            yield start_gather(hop.axis, received.view(-1), messages.view(-1), "reduce", self.context.traffic)
            hop.codec.decode(received, *regions)  # nothing where it landed in place

    # -- parts -----------------------------------------------------------------------------------

    def _hops(self, levels: range) -> list[Hop]:
        """Make the hops of these levels. Only the first level's codec may take raw gradients; others take sums."""
        unit = self.unit
        codecs = EXACT if self.micro_batch.exact else unit.codecs
        raw, sums = Identity(unit.dtype), Identity(unit.sum_dtype)
        hops: list[Hop] = []
        for level in levels:
            axis = unit.axes.axis(level)
            unsummed = level == 1 and (unit.axes.g > 0 or self.micro_batch.single)
            once = unit.axes.crossing is not None and level > unit.axes.crossing and axis.link == INTER
            fed = once and unit.codecs.feedback
            # When rounding ends, a residual may be left. It goes with the next exact message, so that one is a sum.
            owing = fed and unit.residual is not None
            codec = codecs.gradients(axis.link) or (raw if unsummed and not owing else sums)
            as_it_lies = isinstance(codec, Identity) and len(unit.layout.regions) == 1 and axis.size > 2
            feedback = owing or fed and isinstance(codec, Blockwise)
            hops.append(Hop(axis, level, codec, whole=as_it_lies, feedback=feedback))
        for i, (hop, following) in enumerate(zip(hops, hops[1:], strict=False)):
            quantised = isinstance(hop.codec, Blockwise) and isinstance(following.codec, Blockwise)
            if quantised and not hop.feedback and not following.feedback:
                hops[i] = replace(hops[i], fused=True, whole=True)
                hops[i + 1] = replace(following, whole=True)
        return hops

    def _encode(self, hop: Hop, source: Slice, take: Take) -> torch.Tensor:
        """Return messages [size - 1, m] to the hop's other ranks, or [size, m] if the hop is whole.

        They lie in a buffer from ``take`` or in the source.
        """
        if hop.feedback and hop.level - 1 == self.unit.axes.crossing:
            add_residual(self.unit, source, self.context.rounding.divisor)
        regions = source.rows(hop.level - 1, hop.axis.size)
        noise = self._noise(hop)
        if hop.whole:
            messages = encoded(hop.codec, regions, take, noise)
            self._measure(hop, regions, messages)
            return messages
        if isinstance(hop.codec, Identity) and len(regions) == 1 and hop.axis.size == 2:
            other = 1 - hop.axis.index
            return encoded(hop.codec, [regions[0][other : other + 1]], take)  # sent from where it lies
        m = hop.codec.message_numel(*(r.shape[1] for r in regions))
        messages = take((hop.axis.size - 1) * m, hop.codec.wire_dtype).view(-1, m)

        def encode(rows: Views, at: slice, to: slice) -> None:
            drawn = noise and noise.at(at.start * regions[0].shape[1])
            hop.codec.encode(*rows, noise=drawn, out=messages[to])
            if not hop.feedback:  # else ``_keep_error`` has the difference
                self._measure(hop, rows, messages[to])

        self._others(hop, source, encode)
        return messages

    def _pass_on(self, hop: Hop, following: Hop, received: torch.Tensor, take: Take) -> torch.Tensor:
        """Return the next hop's messages, made straight from those received, without a buffer for the sum."""
        assert isinstance(hop.codec, Blockwise) and isinstance(following.codec, Blockwise)
        n, *rest = numels = [p.numel for p in self.unit.layout.pieces(hop.level)]
        codec, rows, exact = following.codec, following.axis.size, sum(rest)
        m = codec.message_numel(n // rows, exact // rows)
        out = take(rows * m, codec.wire_dtype).view(rows, m)
        noise = self._noise(following)
        messages = hop.codec.decode_sum_encode(received, n, codec, rows, exact=exact, noise=noise, out=out)
        if self.context.rounding.measures(self.unit, codec):
            with self.context.frame() as frame:
                sums = [frame.take(n, self.unit.sum_dtype) for n in numels]
                hop.codec.decode_sum(received, sums[0], False, *sums[1:])
                self._measure(following, [x.view(rows, -1) for x in sums], messages)
        return messages

    def _sum(self, hop: Hop, received: torch.Tensor, source: Slice, sums: Slice, accumulate: bool) -> None:
        """Sum into ``sums`` at the hop's level: first the own row as it is, then the others by source index.

        In place the own row is already there.
        """
        out = sums.flat(hop.level)
        in_place, own = source.buffer is sums.buffer, tuple[torch.Tensor, ...]()
        if not (hop.whole or in_place):
            own = source.row(hop.level - 1, hop.axis.size, hop.axis.index)
        accumulate = accumulate or in_place and not hop.whole
        hop.codec.decode_sum(received, out[0], accumulate, *out[1:], own=own)

    def _noise(self, hop: Hop) -> Noise | None:
        rounding = self.context.rounding
        where = f"reduce {hop.level} micro-batch {self.micro_batch.index} from {rounding.rank}"
        return rounding.noise_for(hop.codec, self.unit, where)

    def _others(self, hop: Hop, source: Slice, act: Callable[[Views, slice, slice], Any]) -> None:
        """Call ``act(rows, their place, their messages' place)`` for the ranks but this one (``other_rows``)."""
        for at, to in other_rows(hop.axis, hop.axis.index):
            act(source.row(hop.level - 1, hop.axis.size, at), at, to)

    def _measure(self, hop: Hop, rows: Sequence[torch.Tensor], messages: torch.Tensor) -> None:
        """Measure the rounding of messages [k, m] against rows [k, -1] per region, if this unit is the sample."""
        rounding, dtype = self.context.rounding, self.unit.sum_dtype

        def sent(take: Take) -> torch.Tensor:
            return decoded(hop.codec, messages, rows, take, dtype)[0]

        rounding.measure(self.unit, hop.codec, GRADIENTS, rows[0], sent)

    def _keep_error(self, hop: Hop, source: Slice, messages: torch.Tensor) -> None:
        """Keep the rounding error of the messages to other ranks; ``commit_residual`` takes it after a good step."""
        kept = lost_slice(self.unit).rows(hop.level - 1, hop.axis.size)

        def subtract(rows: Views, at: slice, to: slice) -> None:
            with self.context.frame() as frame:
                sent = decoded(hop.codec, messages[to], rows, frame.take)
                self.context.rounding.measure(self.unit, hop.codec, GRADIENTS, rows[0], lambda _: sent[0])
                for row, gone, lost in zip(rows, sent, kept, strict=True):
                    torch.sub(row, gone, out=lost[at])

        self._others(hop, source, subtract)


@dataclass(frozen=True)
class MicroBatchIndex:
    """Which micro-batch's gradients a reduction takes. The first overwrites ``grad``; the last is reduced to OS.

    index: the number of the micro-batch in the step. exact: codecs are off in this step.
    """

    index: int
    last: bool
    exact: bool = False

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def single(self) -> bool:
        return self.first and self.last


@dataclass(frozen=True)
class Hop:
    """One collective of a reduction: it goes over ``axis``, from level - 1 to ``level``, in the codec's format.

    fused: the sum goes straight into the next hop's messages. feedback: the rounding is fed back.
    whole: the own row is a message, too; else it is neither copied nor rounded. A fused hop and the one after it are
        whole, because no buffer has the sum between them. So is an exact hop of one region among more than two ranks:
        its rows are sent from where they lie.
    """

    axis: Axis
    level: int
    codec: Codec
    fused: bool = False
    whole: bool = False
    feedback: bool = False


def sum_ends(unit: Unit, ends: Axis, exact: bool, context: Context) -> Chain:
    """Sum a tied parameter's two ends into this rank's OS slice of ``grad``, in the codec of gradients for their
    link.

    The first and the last pipeline stage hold it (tied embeddings), each in a unit of its own with one name and
    layout, and each has reduced its own gradients. Both add up the same decoded messages, so masters, moments and
    what refreshes send (noise goes by name and element) stay the same bits at both.
    """
    codec = (None if exact else unit.codecs.gradients(ends.link)) or Identity(unit.sum_dtype)
    rounding = context.rounding
    rows = unit.grad_slice.rows(unit.axes.os, 1)
    start = unit.layout.pieces(unit.axes.os)[0].start
    # By end, not by rank: replicas of an end hold the same sum and must send the same bits.
    noise = rounding.noise_for(codec, unit, f"end {ends.index}", start)
    with context.frame() as frame:
        own = encoded(codec, rows, frame.take, noise)
        rounding.measure(unit, codec, GRADIENTS, rows[0], lambda take: decoded(codec, own, rows, take)[0])
        both = frame.take(2 * own.numel(), own.dtype).view(2, -1)
        yield start_gather(ends, both.view(-1), own.reshape(-1), "reduce", context.traffic)
        first, *rest = (r.view(-1) for r in rows)
        codec.decode_sum(both, first, False, *rest)
        if unit.codecs.mixes:
            unit.grad_slice.clear_padding()
