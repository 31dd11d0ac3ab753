"""What moves between ranks for one unit: the gather chain and the reduce chain.

Both are generators for comm.lane: they yield each collective's Work and go on when it has finished. Gathers
take the sub-axes outermost first, reductions innermost first: one collective and one message per sub-axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megazero.comm.codec import Codec, Identity
from megazero.comm.hops import start_exchange, start_gather
from megazero.comm.lane import Chain
from megazero.comm.traffic import Traffic
from megazero.mesh.mesh import Axis
from megazero.zero.policy import Codecs
from megazero.zero.unit import Unit


def gather_plan(unit: Unit, axes: Sequence[Axis]) -> tuple[str, ...]:
    """Axes of ``gather``'s collectives, in order."""
    levels = unit.levels
    stale = unit.copy_version != unit.master_version
    order = [*range(levels.os, levels.p, -1)] if stale else []
    return tuple(axes[level - 1].name for level in [*order, *range(levels.p, 0, -1)])


def gather(unit: Unit, axes: Sequence[Axis], traffic: Traffic) -> Chain:
    """Make the full parameters present: refresh the P copy if it is stale, then gather over P.

    Refresh: encode the OS slice once per master version, all-gather the messages over the axes between P and OS,
    in place inside the P copy. Then all-gather what was received over the P axes, and decode into full; the
    owner, too, uses the decoded values.
    """
    wire, levels = unit.wire, unit.levels
    messages = unit.copy
    if unit.copy_version != unit.master_version:
        messages = unit.open_copy()
        (own,) = wire.within(levels.os, levels.p)
        unit.encode(messages[own.start : own.start + own.numel])
        for level in range(levels.os, levels.p, -1):
            yield _gather(
                axes[level - 1],
                wire.within(level - 1, levels.p),
                wire.within(level, levels.p),
                messages,
                messages,
                "refresh",
                traffic,
            )
        unit.copy_version = unit.master_version
        if not levels.p:
            unit.decode(messages)
    unit.materialise_full()
    if not levels.p:
        return
    every = unit.full if unit.direct else unit.new_wire(0)
    for level in range(levels.p, 0, -1):
        mine = wire.within(level, levels.p) if level == levels.p else wire.pieces(level)
        source = messages if level == levels.p else every
        yield _gather(axes[level - 1], wire.pieces(level - 1), mine, every, source, "gather", traffic)
    unit.decode(every)


def _gather(axis, outs, owns, target, source, kind, traffic) -> dist.Work:
    """One hop between buffers of one region each: ``outs`` in target from ``owns`` in source."""
    (out,), (own,) = outs, owns
    return start_gather(
        axis,
        target[out.start : out.start + out.numel],
        source[own.start : own.start + own.numel],
        kind,
        traffic,
    )


def reduce_plan(unit: Unit, last: bool, axes: Sequence[Axis]) -> tuple[str, ...]:
    """Axes of ``reduce``'s collectives, in order."""
    levels = unit.levels
    order = [*range(1, levels.g + 1)]
    if last:
        order += [*range(levels.g + 1, levels.all + 1), *range(levels.all, levels.os, -1)]
    return tuple(axes[level - 1].name for level in order)


@dataclass(frozen=True)
class MicroBatch:
    """Whose gradients a reduction takes: the step's first (overwrites ``grad``), its last, its only one."""

    first: bool
    last: bool

    @property
    def single(self) -> bool:
        return self.first and self.last


def reduce(
    unit: Unit,
    staging: torch.Tensor | None,
    which: MicroBatch,
    codecs: Codecs,
    axes: Sequence[Axis],
    traffic: Traffic,
) -> Chain:
    """Sum one micro-batch's gradients (``staging``) into ``grad``; after the last, over OS/G and the replicas.

    A hop's codec is the policy's for its link, else identity: in the parameters' own dtype for what is still a raw
    gradient (exact), at least fp32 for sums. Replicas: reduce-scatter down to an equal share each, then gather
    back, so every replica holds the owner's bits.
    """
    levels, grad = unit.levels, unit.grad
    assert grad is not None
    sums, raw = Identity(unit.sum_dtype), Identity(unit.dtype)
    source, base = staging, 0
    for level in range(1, levels.g + 1):
        assert source is not None
        final = level == levels.g
        target = grad if final else source.new_empty(unit.layout.level_numel(level), dtype=unit.sum_dtype)
        axis = axes[level - 1]
        hop = Hop(axis, level, codecs.gradients(axis.link) or (raw if level == 1 else sums))
        yield from _reduce(unit, hop, (source, base), (target, level), final and not which.first, traffic)
        source, base = target, level
    if not which.last:
        return
    for level in range(levels.g + 1, levels.all + 1):
        axis = axes[level - 1]
        exact = raw if level == 1 and which.single else sums
        hop = Hop(axis, level, codecs.gradients(axis.link) or exact)
        yield from _reduce(unit, hop, (grad, levels.g), (grad, levels.g), False, traffic)
    for level in range(levels.all, levels.os, -1):
        axis = axes[level - 1]
        yield from _return(unit, Hop(axis, level, codecs.gradients(axis.link) or sums), traffic)


@dataclass(frozen=True)
class Hop:
    """One collective of a reduction: over ``axis``, between level - 1 and ``level``, in the codec's format."""

    axis: Axis
    level: int
    codec: Codec


def _reduce(
    unit: Unit,
    hop: Hop,
    source: tuple[torch.Tensor, int],
    target: tuple[torch.Tensor, int],
    accumulate: bool,
    traffic: Traffic,
) -> Chain:
    """Reduce-scatter from level - 1 to the hop's level; source and target are (compact buffer, its level).

    In place (target is the source buffer) is safe: messages have left before the sum is written.
    """
    rows = unit.regions_of(source[0], hop.level - 1, source[1], hop.axis.size)
    messages = hop.codec.encode(*rows)
    received = torch.empty_like(messages)
    yield start_exchange(hop.axis, received, messages, traffic)
    coded, *exact = [r.view(-1) for r in unit.regions_of(target[0], hop.level, target[1], 1)]
    hop.codec.decode_sum(received, coded, accumulate, *exact)


def _return(unit: Unit, hop: Hop, traffic: Traffic) -> Chain:
    """The way back of replicas: this rank's share of the sums to the others of the axis, in place in ``grad``.

    The owner, too, takes the decoded values, so that replicas stay equal to the bit.
    """
    grad, g = unit.grad, unit.levels.g
    assert grad is not None
    messages = hop.codec.encode(*unit.regions_of(grad, hop.level, g, 1))
    regions = unit.regions_of(grad, hop.level - 1, g, hop.axis.size)
    in_place = len(regions) == 1 and messages.dtype == grad.dtype
    received = regions[0] if in_place else messages.new_empty(hop.axis.size, messages.shape[1])
    yield start_gather(hop.axis, received.view(-1), messages.view(-1), "reduce", traffic)
    hop.codec.decode(received, *regions)  # nothing where it landed in place
