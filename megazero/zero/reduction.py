"""What moves between ranks for one unit's gradients: the reduce chain, and error feedback.

A generator for comm.lane. Reductions take the sub-axes innermost first: all-to-all, then a sum by source index in
at least fp32; one collective and one message per sub-axis (qgZ's two hops, ZeRO++ section 4.2, on any mesh).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megazero.comm.codec import Blockwise, Codec, Identity, Noise
from megazero.comm.hops import start_exchange, start_gather
from megazero.comm.lane import Chain, Leg
from megazero.comm.traffic import Traffic
from megazero.mesh.grid import INTER
from megazero.mesh.mesh import Axis
from megazero.zero.movement import legs
from megazero.zero.rounding import GRADIENTS, Rounding
from megazero.zero.unit import EXACT, Unit


def reduce_plan(unit: Unit, last: bool, axes: Sequence[Axis]) -> tuple[Leg, ...]:
    """``reduce``'s collectives, in order."""
    levels = unit.levels
    order = [*range(1, levels.g + 1)]
    if last:
        order += [*range(levels.g + 1, levels.all + 1), *range(levels.all, levels.os, -1)]
    return legs([("reduce", level) for level in order], axes)


@dataclass(frozen=True)
class MicroBatch:
    """Whose gradients a reduction takes: the step's first (overwrites ``grad``), its last, its only one.

    index: of the micro-batch in the step. exact: codecs are off in this step.
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
class Slice:
    """A compact buffer of a level: the whole unit (0), a G slice, ..."""

    buffer: torch.Tensor
    level: int

    def rows(self, unit: Unit, level: int, count: int) -> list[torch.Tensor]:
        """The part of a deeper level, as [count, -1] per region."""
        return unit.regions_of(self.buffer, level, self.level, count)


@dataclass(frozen=True)
class Hop:
    """One collective of a reduction: over ``axis``, from level - 1 to ``level``, in the codec's format.

    fused: its sum goes straight into the next hop's messages. whole: the own row, too, is a message (of fused hops
    and those after them, since no buffer has the sum, and of exact rows that can be sent from where they lie); else
    what stays here is neither copied nor rounded. feedback: its rounding is fed back.
    """

    axis: Axis
    level: int
    codec: Codec
    fused: bool = False
    whole: bool = False
    feedback: bool = False


def reduce(
    unit: Unit,
    staging: torch.Tensor | None,
    which: MicroBatch,
    axes: Sequence[Axis],
    rounding: Rounding,
    traffic: Traffic,
) -> Chain:
    """Sum one micro-batch's gradients (``staging``) into ``grad``; after the last, over OS/G and the replicas.

    A hop's codec is the unit's for its link, else identity: in the parameters' own dtype for what is still a raw
    gradient (exact), at least fp32 for sums. Replicas: reduce-scatter down to an equal share each, then gather
    back, so every replica holds the owner's bits.
    """
    levels, grad = unit.levels, unit.grad
    assert grad is not None
    sums = Slice(grad, levels.g)
    context = _Reduction(unit, which, rounding, traffic)
    if levels.g:
        assert staging is not None
        hops = _hops(unit, which, axes, range(1, levels.g + 1))
        yield from context.down(hops, Slice(staging, 0), sums)
    if not which.last:
        return
    yield from context.down(_hops(unit, which, axes, range(levels.g + 1, levels.all + 1)), sums, sums)
    for level in range(levels.all, levels.os, -1):
        axis = axes[level - 1]
        codec = None if which.exact else unit.codecs.gradients(axis.link)
        yield from context.back(Hop(axis, level, codec or Identity(unit.sum_dtype)), sums)
    if unit.carry is not None:
        carried = Slice(unit.carry, levels.os).rows(unit, levels.os, 1)
        for rows, extra in zip(sums.rows(unit, levels.os, 1), carried, strict=True):
            rows.add_(extra, alpha=rounding.divisor)


def _hops(unit: Unit, which: MicroBatch, axes: Sequence[Axis], levels: range) -> list[Hop]:
    """Hops of these levels; the first level's codec may take raw gradients, all others take sums."""
    codecs = EXACT if which.exact else unit.codecs
    raw, sums = Identity(unit.dtype), Identity(unit.sum_dtype)
    hops: list[Hop] = []
    for level in levels:
        axis = axes[level - 1]
        unsummed = level == 1 and (unit.levels.g > 0 or which.single)
        once = unit.crossing is not None and level > unit.crossing and axis.link == INTER
        fed = once and unit.codecs.feedback
        # A residual that is left when rounding ends goes with the next exact message, which then is a sum.
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


@dataclass(frozen=True)
class _Reduction:
    """Hops of one unit's reduction of one micro-batch."""

    unit: Unit
    which: MicroBatch
    rounding: Rounding
    traffic: Traffic

    def down(self, hops: Sequence[Hop], source: Slice, target: Slice) -> Chain:
        """Reduce-scatter from the source's level down to the last hop's, added to ``target`` unless this is the
        step's first micro-batch. In place (target is source) the sums of every hop stay where they are."""
        unit = self.unit
        in_place = source.buffer is target.buffer
        messages: torch.Tensor | None = None
        for i, hop in enumerate(hops):
            last = i == len(hops) - 1
            if messages is None:
                messages = self._encode(hop, source)
            received = torch.empty_like(messages)
            work = start_exchange(hop.axis, received, messages, self.traffic)
            if hop.feedback and isinstance(hop.codec, Blockwise):
                self._keep_error(hop, source, messages)
            yield work
            if hop.feedback and isinstance(hop.codec, Identity):
                self._others(hop, _lost(unit), lambda rows, *_: [r.zero_() for r in rows])
            if hop.fused:
                messages = self._pass_on(hop, hops[i + 1], received)
                continue
            if in_place or last:
                sums, accumulate = target, last and not in_place and not self.which.first
            else:
                empty = target.buffer.new_empty(unit.layout.level_numel(hop.level))
                sums, accumulate = Slice(empty, hop.level), False
            self._sum(hop, received, source, sums, accumulate)
            source, messages = sums, None

    def back(self, hop: Hop, sums: Slice) -> Chain:
        """The way back of replicas: this rank's share of the sums to the others of the axis, in place.

        The owner, too, takes the decoded values, so that replicas stay equal to the bit. For the same reason draws
        go by element, not by sender: after the outer axes' way back several ranks hold a share, and round it.
        """
        start = self.unit.layout.pieces(hop.level)[0].start
        noise = self.rounding.noise(self.unit, f"return {hop.level}", start)
        share = sums.rows(self.unit, hop.level, 1)
        messages = hop.codec.encode(*share, noise=noise)
        self._measure(hop, share, messages)
        regions = sums.rows(self.unit, hop.level - 1, hop.axis.size)
        in_place = len(regions) == 1 and messages.dtype == sums.buffer.dtype
        received = regions[0] if in_place else messages.new_empty(hop.axis.size, messages.shape[1])
        yield start_gather(hop.axis, received.view(-1), messages.view(-1), "reduce", self.traffic)
        hop.codec.decode(received, *regions)  # nothing where it landed in place

    def _encode(self, hop: Hop, source: Slice) -> torch.Tensor:
        """Messages [size - 1, m] to the hop's other ranks; of a whole hop [size, m]."""
        if hop.feedback and hop.level - 1 == self.unit.crossing:
            self._add_residual(source)
        regions = source.rows(self.unit, hop.level - 1, hop.axis.size)
        noise = self._noise(hop)
        if hop.whole:
            messages = hop.codec.encode(*regions, noise=noise)
            self._measure(hop, regions, messages)
            return messages
        if isinstance(hop.codec, Identity) and len(regions) == 1 and hop.axis.size == 2:
            other = 1 - hop.axis.index
            return hop.codec.encode(regions[0][other : other + 1])  # sent from where it lies
        m = hop.codec.message_numel(*(r.shape[1] for r in regions))
        messages = torch.empty(hop.axis.size - 1, m, dtype=hop.codec.wire_dtype, device=source.buffer.device)

        def encode(rows: list[torch.Tensor], at: slice, to: slice) -> None:
            start = at.start * regions[0].shape[1]
            hop.codec.encode(*rows, noise=noise.at(start), out=messages[to])
            if not hop.feedback:  # else ``_keep_error`` has the difference
                self._measure(hop, rows, messages[to])

        self._others(hop, source, encode)
        return messages

    def _pass_on(self, hop: Hop, following: Hop, received: torch.Tensor) -> torch.Tensor:
        assert isinstance(hop.codec, Blockwise) and isinstance(following.codec, Blockwise)
        n, *exact = numels = [p.numel for p in self.unit.layout.pieces(hop.level)]
        messages = hop.codec.decode_sum_encode(
            received, n, following.codec, following.axis.size, exact=sum(exact), noise=self._noise(following)
        )
        if self.rounding.measures(self.unit, following.codec):
            sums = [received.new_empty(n, dtype=self.unit.sum_dtype) for n in numels]
            hop.codec.decode_sum(received, sums[0], False, *sums[1:])
            self._measure(following, [x.view(following.axis.size, -1) for x in sums], messages)
        return messages

    def _measure(self, hop: Hop, rows: Sequence[torch.Tensor], messages: torch.Tensor) -> None:
        """Note what messages [k, m] lost of rows [k, -1] per region, if the unit is the step's sample."""
        if self.rounding.measures(self.unit, hop.codec):
            sent = [torch.empty_like(r, dtype=self.unit.sum_dtype) for r in rows]
            hop.codec.decode(messages, *sent)
            self.rounding.add(self.unit, hop.codec, GRADIENTS, rows[0], sent[0])

    def _sum(self, hop: Hop, received: torch.Tensor, source: Slice, sums: Slice, accumulate: bool) -> None:
        """Sum into ``sums`` at the hop's level: the own row as it is (in place it is there), then the others by
        source index."""
        unit, own = self.unit, hop.axis.index
        out = [r.view(-1) for r in sums.rows(unit, hop.level, 1)]
        if hop.whole:
            hop.codec.decode_sum(received, out[0], accumulate, *out[1:])
            return
        if source.buffer is not sums.buffer:
            for piece, rows in zip(out, source.rows(unit, hop.level - 1, hop.axis.size), strict=True):
                piece.add_(rows[own]) if accumulate else piece.copy_(rows[own])
        hop.codec.decode_sum(received, out[0], True, *out[1:])

    def _noise(self, hop: Hop) -> Noise:
        where = f"reduce {hop.level} micro-batch {self.which.index} from {self.rounding.rank}"
        return self.rounding.noise(self.unit, where)

    def _others(
        self, hop: Hop, source: Slice, act: Callable[[list[torch.Tensor], slice, slice], Any]
    ) -> None:
        """``act(rows, where they are, where their messages are)`` of every rank but this one, in at most two runs."""
        regions, own = source.rows(self.unit, hop.level - 1, hop.axis.size), hop.axis.index
        for first, last, to in ((0, own, 0), (own + 1, hop.axis.size, own)):
            if last > first:
                act([r[first:last] for r in regions], slice(first, last), slice(to, to + last - first))

    # -- error feedback ---------------------------------------------------------------------------

    def _add_residual(self, source: Slice) -> None:
        unit = self.unit
        assert unit.crossing is not None
        held = Slice(unit.open_residual(), unit.crossing).rows(unit, unit.crossing, 1)
        for rows, residual in zip(source.rows(unit, unit.crossing, 1), held, strict=True):
            rows.add_(residual, alpha=self.rounding.divisor)

    def _keep_error(self, hop: Hop, source: Slice, messages: torch.Tensor) -> None:
        """What the messages to other ranks lost; ``commit_residual`` takes it after a good step."""
        kept = _lost(self.unit).rows(self.unit, hop.level - 1, hop.axis.size)

        def subtract(rows: list[torch.Tensor], at: slice, to: slice) -> None:
            sent = [torch.empty_like(r) for r in rows]
            hop.codec.decode(messages[to], *sent)
            if self.rounding.measures(self.unit, hop.codec):
                self.rounding.add(self.unit, hop.codec, GRADIENTS, rows[0], sent[0])
            for row, gone, lost in zip(rows, sent, kept, strict=True):
                torch.sub(row, gone, out=lost[at])

        self._others(hop, source, subtract)


def _lost(unit: Unit) -> Slice:
    """Where a step's errors wait for its end: other ranks' rows of ``grad``, whose sums are not needed here; with
    replicas, whose way back fills those rows, ``unit.lost``."""
    assert unit.grad is not None and unit.crossing is not None
    if unit.levels.all == unit.levels.os:
        return Slice(unit.grad, unit.levels.g)
    if unit.lost is None:
        unit.lost = torch.empty_like(unit.open_residual())
    return Slice(unit.lost, unit.crossing)


def commit_residual(unit: Unit, axes: Sequence[Axis], divisor: float, exact: bool) -> None:
    """After an update: what the step's messages lost, divided as the gradients were, is the new residual.

    exact: codecs were off in this step. Then, and after a fallback, what was owed is paid: nothing is kept, and raw
    gradients may go in their own dtype again.
    """
    unit.carry = None
    if exact or unit.codecs.gradients_inter is None:
        unit.residual = unit.lost = None
    if unit.residual is None:
        return
    assert unit.crossing is not None
    unit.residual.zero_()
    errors, residual = _lost(unit), Slice(unit.residual, unit.crossing)
    for level in range(unit.crossing + 1, unit.levels.all + 1):
        axis = axes[level - 1]
        if axis.link != INTER:
            continue
        lost, kept = errors.rows(unit, level - 1, axis.size), residual.rows(unit, level - 1, axis.size)
        for new, old in zip(lost, kept, strict=True):
            old.copy_(new).div_(divisor)
            old[axis.index].zero_()


def residual_sum(unit: Unit, axes: Sequence[Axis], rank: int) -> torch.Tensor:
    """Compact [n/OS]: the residual summed over senders, and what is carried: all that rounding still owes this slice.

    Collective.
    """
    levels, device = unit.levels, unit.device
    owed = torch.zeros(unit.layout.level_numel(levels.os), dtype=unit.sum_dtype, device=device)
    if unit.residual is not None:
        assert unit.crossing is not None
        sums = Slice(unit.residual.clone(), unit.crossing)
        context = _Reduction(unit, MicroBatch(0, True), Rounding(0, rank, device), Traffic())
        hops = [
            Hop(axes[level - 1], level, Identity(unit.sum_dtype))
            for level in range(unit.crossing + 1, levels.all + 1)
        ]
        chains = [context.down(hops, sums, sums)]
        chains += [context.back(hop, sums) for hop in reversed(hops) if hop.level > levels.os]
        for chain in chains:
            for work in chain:
                work.wait()
        for out, rows in zip(
            Slice(owed, levels.os).rows(unit, levels.os, 1), sums.rows(unit, levels.os, 1), strict=True
        ):
            out.copy_(rows)
    return owed if unit.carry is None else owed.add_(unit.carry)
