"""What moves between ranks for one unit's parameters: the gather chain.

A generator for comm.lane: it yields each collective's Work and goes on when it has finished. Gathers take the
sub-axes outermost first, one collective and one message per sub-axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megazero.comm.hops import start_gather
from megazero.comm.lane import Chain, Leg
from megazero.comm.traffic import Traffic
from megazero.mesh.mesh import Axis
from megazero.zero.rounding import WEIGHTS, Rounding
from megazero.zero.unit import Unit


def gather_plan(unit: Unit, axes: Sequence[Axis]) -> tuple[Leg, ...]:
    """``gather``'s collectives, in order."""
    levels = unit.levels
    stale = unit.copy_version != unit.master_version
    order = [("refresh", level) for level in range(levels.os, levels.p, -1)] if stale else []
    return legs([*order, *(("gather", level) for level in range(levels.p, 0, -1))], axes)


def legs(order: Sequence[tuple[str, int]], axes: Sequence[Axis]) -> tuple[Leg, ...]:
    hops = [(kind, axes[level - 1]) for kind, level in order]
    return tuple(Leg(axis.name, f"{kind}_{axis.link.removesuffix('_node')}") for kind, axis in hops)


def gather(unit: Unit, axes: Sequence[Axis], rounding: Rounding, traffic: Traffic) -> Chain:
    """Make the full parameters present: refresh the P copy if it is stale, then gather over P.

    Refresh: encode the OS slice (or its difference to R) once per master version, all-gather the messages over
    the axes between P and OS. Then all-gather the P copy over the P axes, and decode into full; the owner, too,
    uses the decoded values.
    """
    wire, levels = unit.wire, unit.levels
    if unit.copy_version != unit.master_version:
        yield from _refresh(unit, axes, rounding, traffic)
    unit.materialise_full()
    if not levels.p:
        return
    every = unit.full if unit.direct else unit.new_wire(0)
    for level in range(levels.p, 0, -1):
        mine = wire.within(level, levels.p) if level == levels.p else wire.pieces(level)
        source = unit.copy if level == levels.p else every
        yield _gather(axes[level - 1], wire.pieces(level - 1), mine, every, source, "gather", traffic)
    unit.decode(every)


def _refresh(unit: Unit, axes: Sequence[Axis], rounding: Rounding, traffic: Traffic) -> Chain:
    wire, levels = unit.refresh_wire, unit.levels
    messages = unit.open_refresh()
    (own,) = wire.within(levels.os, levels.p)
    start = unit.layout.pieces(levels.os)[0].start
    unit.encode(messages[own.start : own.start + own.numel], rounding.noise(unit, "refresh", start))
    for level in range(levels.os, levels.p, -1):
        outs, mine = wire.within(level - 1, levels.p), wire.within(level, levels.p)
        yield _gather(axes[level - 1], outs, mine, messages, messages, "refresh", traffic)
    unit.receive(messages)
    unit.copy_version = unit.master_version
    if rounding.measures(unit, unit.refresh_codec):
        sent = unit.used().to(unit.sum_dtype)
        rounding.add(unit, unit.refresh_codec, WEIGHTS, unit.master, sent)


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
