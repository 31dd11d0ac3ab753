"""What moves between ranks for one unit: the gather chain and the reduce chain.

Both are generators for comm.lane: they yield each collective's Work and go on when it has finished. Gathers
take the sub-axes outermost first, reductions innermost first, one collective per sub-axis and region.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazero.comm.codec import Identity
from megazero.comm.hops import start_exchange, start_gather
from megazero.comm.lane import Chain
from megazero.comm.traffic import Traffic
from megazero.mesh.mesh import Axis
from megazero.zero.unit import Unit


def gather_plan(unit: Unit, axes: Sequence[Axis]) -> tuple[str, ...]:
    """Axes of ``gather``'s collectives, in order."""
    levels, regions = unit.levels, len(unit.layout.regions)
    stale = unit.copy_version != unit.master_version
    order = [*range(levels.os, levels.p, -1)] if stale else []
    order += range(levels.p, 0, -1)
    return tuple(axes[level - 1].name for level in order for _ in range(regions))


def gather(unit: Unit, axes: Sequence[Axis], traffic: Traffic) -> Chain:
    """Make the full parameters present: refresh the P copy if it is stale, then gather over P.

    Refresh: encode the OS slice once per master version, all-gather over the axes between P and OS, in place
    inside the P copy. Then all-gather over the P axes into the full buffer.
    """
    layout, levels = unit.layout, unit.levels
    if unit.copy_version != unit.master_version:
        unit.encode()
        for level in range(levels.os, levels.p, -1):
            outs, owns = layout.within(level - 1, levels.p), layout.within(level, levels.p)
            for out, own in zip(outs, owns, strict=True):
                yield start_gather(
                    axes[level - 1],
                    unit.copy[out.start : out.start + out.numel],
                    unit.copy[own.start : own.start + own.numel],
                    "refresh",
                    traffic,
                )
        unit.copy_version = unit.master_version
    unit.materialise_full()
    for level in range(levels.p, 0, -1):
        for out, own in zip(layout.pieces(level - 1), layout.pieces(level), strict=True):
            first = level == levels.p
            source = (
                unit.copy[own.compact : own.compact + own.numel]
                if first
                else unit.full[own.start : own.start + own.numel]
            )
            yield start_gather(
                axes[level - 1], unit.full[out.start : out.start + out.numel], source, "gather", traffic
            )


def reduce_plan(unit: Unit, last: bool, axes: Sequence[Axis]) -> tuple[str, ...]:
    """Axes of ``reduce``'s collectives, in order."""
    levels, regions = unit.levels, len(unit.layout.regions)
    order = [*range(1, levels.g + 1)]
    if last:
        order += [*range(levels.g + 1, levels.all + 1), *range(levels.all, levels.os, -1)]
    return tuple(axes[level - 1].name for level in order for _ in range(regions))


def reduce(
    unit: Unit,
    staging: torch.Tensor | None,
    first: bool,
    last: bool,
    single: bool,
    axes: Sequence[Axis],
    traffic: Traffic,
) -> Chain:
    """Sum one micro-batch's gradients (``staging``) into ``grad``; after the last, over OS/G and the replicas.

    first: ``grad`` is overwritten, not added to. single: the step has one micro-batch. Wire dtype of a hop:
    the parameters' own for what is still a raw gradient (exact), at least fp32 for sums. Replicas: reduce-
    scatter down to an equal share each, then gather back, so every replica holds the owner's bits.
    """
    levels, grad = unit.levels, unit.grad
    assert grad is not None
    sums, raw = Identity(unit.sum_dtype), Identity(unit.dtype)
    source, base = staging, 0
    for level in range(1, levels.g + 1):
        assert source is not None
        final = level == levels.g
        target = grad if final else source.new_empty(unit.layout.level_numel(level), dtype=unit.sum_dtype)
        codec = raw if level == 1 else sums
        yield from _hop(
            unit, axes[level - 1], level, (source, base), (target, level), codec, final and not first, traffic
        )
        source, base = target, level
    if not last:
        return
    for level in range(levels.g + 1, levels.all + 1):
        codec = raw if level == 1 and single else sums
        yield from _hop(
            unit, axes[level - 1], level, (grad, levels.g), (grad, levels.g), codec, False, traffic
        )
    for level in range(levels.all, levels.os, -1):
        outs, owns = unit.layout.within(level - 1, levels.g), unit.layout.within(level, levels.g)
        for out, own in zip(outs, owns, strict=True):
            yield start_gather(
                axes[level - 1],
                grad[out.start : out.start + out.numel],
                grad[own.start : own.start + own.numel],
                "reduce",
                traffic,
            )


def _hop(
    unit: Unit,
    axis: Axis,
    level: int,
    source: tuple[torch.Tensor, int],
    target: tuple[torch.Tensor, int],
    codec: Identity,
    accumulate: bool,
    traffic: Traffic,
) -> Chain:
    """Reduce-scatter from level - 1 to ``level``; source and target are (compact buffer, its level).

    In place (target is the source buffer) is safe: messages have left before the sum is written.
    """
    (src, src_base), (dst, dst_base) = source, target
    inputs, outputs = unit.layout.within(level - 1, src_base), unit.layout.within(level, dst_base)
    for inp, out in zip(inputs, outputs, strict=True):
        messages = codec.encode(src[inp.start : inp.start + inp.numel].view(axis.size, -1))
        received = torch.empty_like(messages)
        yield start_exchange(axis, received, messages, traffic)
        codec.decode_sum(received, dst[out.start : out.start + out.numel], accumulate)
