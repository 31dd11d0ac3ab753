"""The engine's model and optimizer state as checkpoint records: flat slices with global coordinates.

With outer replicas the plain kinds of weights hold the anchor: whoever reads the model reads that. What a replica has
of its own ('master', the optimizer's state, ...) is there under ``of_replica(kind, its number)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from megazero.checkpoint.placement import Placement, Places
from megazero.checkpoint.records import SliceRecord
from megazero.comm.codec import Identity
from megazero.comm.hops import Traffic, run_through
from megazero.kernels.arena import Arena
from megazero.mesh.mesh import all_gather_flat
from megazero.zero.engine import Engine
from megazero.zero.grad_norm import sum_partial
from megazero.zero.layout import Slice, Slot
from megazero.zero.reduce import ReduceHop, descend, share_back
from megazero.zero.rounding import KINDS
from megazero.zero.unit import Unit

WEIGHTS, MASTER, RESIDUAL, ERRORS = "weights", "master", "residual", "rounding errors"
MOMENTUM, LOST, MOVED = "outer momentum", "outer residual", "outer squares"
SUMS, LEFT = "outer sums", "outer squares under way"  # of a fragment on its way between replicas
NOT_OPTIMIZER = (WEIGHTS, MASTER, RESIDUAL, LOST)


def save_records(engine: Engine, placements: Mapping[str, Places] | None = None) -> list[SliceRecord]:
    """Return what this rank saves: its OS slice of every parameter. This is collective under error feedback.

    The kinds are: 'weights' in the parameters' dtype (under the delta refresh R, after ``engine.refresh``); 'master'
    (at least fp32) where that is another dtype; the optimizer's elementwise state, by torch's names; and under error
    feedback 'residual', summed over senders. By default a parameter's placement is its own name and shape. Buffers
    that have a placement are saved as they are, as weights and masters.
    """
    engine.optimizer.ensure_state()
    masters = any(_keeps_masters(engine, unit) for unit in engine.units)
    records = _buffer_records(engine, placements, (WEIGHTS, MASTER) if masters else (WEIGHTS,))
    for unit in engine.units:
        if unit.delta and unit.weights.stale:
            raise RuntimeError(
                "save_records() needs engine.refresh() before it: R is behind the master weights"
            )
        owed, level = _owed(engine, unit), unit.axes.os
        weights = unit.weights.copy_slice if unit.delta else unit.master.slice
        for piece, held in zip(unit.layout.pieces(level), weights.flat(level), strict=True):
            for slot, placement, low, high, at in _placed(placements, unit.layout.ranges_of(piece)):
                own, start = slice(at, at + high - low), at - piece.compact
                # Views: the store converts the weights as it writes them.
                tensors = {WEIGHTS: held[start : start + high - low]}
                if _keeps_masters(engine, unit):
                    tensors[MASTER] = unit.master.value[own]
                if owed is not None:
                    tensors[RESIDUAL] = owed[own]
                tensors.update(engine.optimizer.elementwise_state(unit, own.start, own.stop))
                record = _record(engine, placement, unit, slot, (low, high), tensors)
                make = partial(engine.optimizer.decoded, unit, own.start, own.stop)
                records.append(replace(record, make=make))
    return records


def _keeps_masters(engine: Engine, unit: Unit) -> bool:
    """Tell whether checkpoints hold master weights beside the weights."""
    return unit.dtype != unit.sum_dtype or engine.policy.codecs.delta


def _buffer_records(
    engine: Engine, placements: Mapping[str, Places] | None, kinds: Sequence[str]
) -> list[SliceRecord]:
    """Return the buffers with a placement, which all ranks of a stage hold whole. The first of them saves."""
    mesh, placed = engine.mesh, placements or {}
    owner = mesh.dp_rank == mesh.tp.index == mesh.replica == 0
    return [
        SliceRecord(placement, 0, held.numel(), dict.fromkeys(kinds, held.view(-1)), owner)
        for name, buffer in engine.module.named_buffers()
        if name in placed
        for placement, held in placed[name].held(buffer)
    ]


def of_replica(kind: str, replica: int) -> str:
    """Return the kind under which a checkpoint holds what an outer replica has of its own."""
    return f"replica {replica} {kind}"


def replica_kinds(stored: Iterable[str], replica: int) -> list[str]:
    """Return the kinds, without the replica's number, that a checkpoint holds of an outer replica."""
    begin = of_replica("", replica)
    return [kind.removeprefix(begin) for kind in stored if kind.startswith(begin)]


def save_replica_records(engine: Engine, placements: Mapping[str, Places] | None = None) -> list[SliceRecord]:
    """Return what this rank saves where there are outer replicas: its replica's own state, and the anchor's slices.

    The first replica writes the anchor, the outer momentum, and the sums of a fragment that is on its way, which is
    waited for. This is collective.
    """
    assert engine.outer is not None
    engine.outer.settle()
    own = [_master_in_full(record) for record in save_records(engine, placements)]
    records = in_replica([*own, *_lost_records(engine, placements)], engine.mesh.replica)
    for unit, anchor in engine.outer.anchors.items():
        tensors = {WEIGHTS: anchor.value}
        if unit.dtype != unit.sum_dtype:
            tensors[MASTER] = anchor.value
        if anchor.momentum is not None:
            tensors[MOMENTUM] = anchor.momentum
        shared = slice_records(engine, placements, unit, unit.axes.os, tensors)
        if engine.outer.flight is not None and unit in engine.outer.flight.sums:
            sums = {SUMS: engine.outer.flight.sums[unit]}
            shared += slice_records(engine, placements, unit, unit.axes.all, sums)
        for record in shared:
            records.append(replace(record, owner=record.owner and engine.mesh.replica == 0))
    return records


def _master_in_full(record: SliceRecord) -> SliceRecord:
    """Return the record with 'master', in its own dtype, and without 'weights'."""
    tensors = {MASTER: record.tensors[WEIGHTS], **record.tensors}
    del tensors[WEIGHTS]
    return replace(record, tensors=tensors)


def in_replica(records: Iterable[SliceRecord], replica: int) -> list[SliceRecord]:
    """Return the records with the kinds of an outer replica."""
    begin = of_replica("", replica)

    def made(make: Callable[[str], torch.Tensor], kind: str) -> torch.Tensor:
        return make(kind.removeprefix(begin))

    return [
        replace(
            record,
            tensors={of_replica(kind, replica): tensor for kind, tensor in record.tensors.items()},
            stored={of_replica(kind, replica): dtype for kind, dtype in record.stored.items()},
            make=record.make and partial(made, record.make),
        )
        for record in records
    ]


def load_replica_records(
    engine: Engine, placements: Mapping[str, Places] | None = None, residual: bool = False
) -> list[SliceRecord]:
    """Return the places into which a load writes if the outer replicas stay the same: all of this rank's state.

    residual: as in ``load_records``. Call ``engine.outer.resume`` before it, which makes room for the sums of a
    fragment on its way, and ``engine.invalidate(anchored=True)`` after it.
    """
    assert engine.outer is not None
    own = [*load_records(engine, placements, True, residual), *_lost_records(engine, placements)]
    records = in_replica(own, engine.mesh.replica)
    for unit, anchor in engine.outer.anchors.items():
        tensors = {MASTER: anchor.value} | ({} if anchor.momentum is None else {MOMENTUM: anchor.momentum})
        records += slice_records(engine, placements, unit, unit.axes.os, tensors)
    for unit, sums in engine.outer.flight.sums.items() if engine.outer.flight else ():
        records += slice_records(engine, placements, unit, unit.axes.all, {SUMS: sums})
    return records


def _lost_records(engine: Engine, placements: Mapping[str, Places] | None) -> list[SliceRecord]:
    """Return the residuals of outer steps. Every data-parallel rank has a slice of its own."""
    assert engine.outer is not None
    return [
        record
        for unit, anchor in engine.outer.anchors.items()
        if anchor.residual is not None
        for record in slice_records(engine, placements, unit, unit.axes.all, {LOST: anchor.residual})
    ]


def slice_records(
    engine: Engine,
    placements: Mapping[str, Places] | None,
    unit: Unit,
    level: int,
    tensors: Mapping[str, torch.Tensor],
) -> list[SliceRecord]:
    """Return the records of tensors by kind, compact slices of one level."""
    return [
        _record(
            engine,
            placement,
            unit,
            slot,
            (low, high),
            {kind: tensor[at : at + high - low] for kind, tensor in tensors.items()},
            unique=level == unit.axes.all,
        )
        for slot, placement, low, high, at in _placed(placements, unit.layout.ranges(level))
    ]


def _owed(engine: Engine, unit: Unit) -> torch.Tensor | None:
    if not engine.policy.codecs.feedback and unit.feedback.carry is None:
        return None
    owed = residual_sum(engine, unit)
    if unit.tied and engine.mesh.ends is not None:  # both ends owe, the first one saves
        both = owed.new_empty(2, owed.numel())
        all_gather_flat(both.view(-1), owed, group=engine.mesh.ends.reduce_group)
        owed = both[0] + both[1]
    mesh, own = engine.mesh, [run for run in engine.optimizer.runs if run.unit is unit]
    with Arena().frame(mesh.device) as frame:  # so do ranks whose gradients are terms of one sum
        sum_partial(
            own, mesh.tp, frame, Traffic(), engine.waits, values=lambda run: owed[run.start : run.stop]
        )
    return owed


def residual_sum(engine: Engine, unit: Unit) -> torch.Tensor:
    """Return this slice's error-feedback residual: summed over senders, plus ``carry``.

    The result is compact, [n/OS], in at least fp32. This is collective.
    """
    axes = unit.axes
    owed = torch.zeros_like(unit.master.value)
    if unit.feedback.residual is not None:
        assert axes.crossing is not None
        # If replicas share a node the OS slice is the larger one: the rest's residual belongs to the other replicas.
        base = min(axes.os, axes.crossing)
        sums = Slice(unit.layout, unit.feedback.residual.new_zeros(unit.layout.level_numel(base)), base)
        sums.copy_(Slice(unit.layout, unit.feedback.residual, axes.crossing), axes.crossing)
        # A save's bytes are not a step's, and its buffers are not kept for the next step.
        context = replace(engine.reducer.context, traffic=Traffic(), arena=Arena())
        exact = Identity(unit.sum_dtype)
        levels = range(axes.crossing + 1, axes.all + 1)
        hops = [ReduceHop(axes.axis(n), exact, number=n) for n in levels]
        run_through(descend(unit, hops, sums, sums, context))
        for n in range(axes.all, axes.os, -1):
            run_through(share_back(unit, axes.axis(n), n, exact, sums, context))
        Slice(unit.layout, owed, axes.os).copy_(sums, axes.os)
    return owed if unit.feedback.carry is None else owed.add_(unit.feedback.carry)


def is_second_end(engine: Engine, unit: Unit) -> bool:
    """Whether this is the last stage's copy of a tied parameter: the first stage saves it and takes its residual."""
    return unit.tied and engine.mesh.ends is not None and engine.mesh.ends.index > 0


def _twin(engine: Engine, slot: Slot) -> bool:
    """Whether a tensor-parallel rank before this one holds the same: that one saves it, and takes its residual."""
    tp = engine.mesh.tp
    return engine.traits[slot.name].holders(tp.index, tp.size).start != tp.index


def load_records(
    engine: Engine,
    placements: Mapping[str, Places] | None = None,
    optimizer: bool = True,
    residual: bool = False,
) -> list[SliceRecord]:
    """Return where a load writes.

    Kind 'master' is for the weights, 'weights' for R; the optimizer's state is there if asked for. With ``residual``
    there is also the error-feedback residual, which the next step's gradient takes up. Call ``engine.invalidate()``
    after the load. The engine's own residuals and measurements are discarded with its old weights.
    """
    engine.optimizer.ensure_state()
    engine.rounding.forget()
    records = _buffer_records(engine, placements, (WEIGHTS, MASTER))
    for unit in engine.units:
        owed = torch.zeros_like(unit.master.value) if residual else None
        unit.feedback.begin(None if is_second_end(engine, unit) else owed)
        for slot, placement, low, high, at in _placed(placements, unit.layout.ranges(unit.axes.os)):
            tensors = {MASTER: unit.master.value[at : at + high - low]}
            if owed is not None and not (engine.traits[slot.name].partial and _twin(engine, slot)):
                tensors[RESIDUAL] = owed[at : at + high - low]
            if optimizer:
                state = engine.optimizer.elementwise_state(unit, at, at + high - low, loading=True)
                tensors.update(state)
            records.append(_record(engine, placement, unit, slot, (low, high), tensors))
        if engine.policy.codecs.delta:
            # Units that are exact as a whole have no R; a load wants every tensor of a kind.
            level = unit.axes.p if unit.delta else unit.axes.os
            copy = unit.weights.copy if unit.delta else torch.empty_like(unit.master.value, dtype=unit.dtype)
            records += slice_records(engine, placements, unit, level, {WEIGHTS: copy})
    return records


def kinds_to_load(
    engine: Engine, stored: Sequence[str], optimizer: Sequence[str], residual: bool = False
) -> dict[str, str]:
    """Map each kind of ``load_records`` to a kind in the checkpoint: the master falls back to the weights."""
    kinds = {MASTER: MASTER if MASTER in stored else WEIGHTS}
    if engine.policy.codecs.delta:
        kinds[WEIGHTS] = WEIGHTS
    if residual:
        kinds[RESIDUAL] = RESIDUAL
    return {**kinds, **{kind: kind for kind in optimizer}}


def rank_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the state that only the same layout can load unchanged.

    That is this rank's own residuals and, under the delta refresh, the errors that were measured as R was
    brought up to date for the save.
    """
    # A sum that was carried here and not yet paid (its step was skipped, say) is in no rank's own residual.
    own = [u for u in engine.units if u.feedback.residual is not None and u.feedback.carry is None]
    held = {f"{RESIDUAL} {u.name}": u.feedback.residual for u in own if u.feedback.residual is not None}
    if engine.policy.codecs.delta:
        measured = zip(KINDS, engine.rounding.sums, strict=True)
        held |= {f"{ERRORS} {kind}": sums for kind, sums in measured if sums.any()}
    if engine.outer is not None:
        held[MOVED] = engine.outer.moved
        if engine.outer.flight is not None:
            held[LEFT] = engine.outer.squares[:, 0].clone()
    return held


def load_rank_tensors(engine: Engine, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give every sender its own residual, after a load on the layout that saved. Nothing is carried."""
    for unit in engine.units:
        held = tensors.get(f"{RESIDUAL} {unit.name}")
        if held is not None and engine.policy.codecs.feedback:
            unit.feedback.restore(held)
    for kind, sums in zip(KINDS, engine.rounding.sums, strict=True):
        if f"{ERRORS} {kind}" in tensors and engine.policy.codecs.delta:
            sums.copy_(tensors[f"{ERRORS} {kind}"])
    if engine.outer is not None and MOVED in tensors:
        engine.outer.moved.copy_(tensors[MOVED])
        if LEFT in tensors:
            engine.outer.squares[:, 0].copy_(tensors[LEFT])


def optimizer_kinds(engine: Engine) -> list[str]:
    """Return the names of this rank's elementwise optimizer state; a rank that holds no slice has none."""
    engine.optimizer.ensure_state()
    optimizer = engine.optimizer
    return sorted(
        {name for r in optimizer.runs for name in optimizer.elementwise_state(r.unit, r.start, r.stop)}
    )


def _placed(
    placements: Mapping[str, Places] | None, ranges: Iterable[tuple[Slot, int, int, int]]
) -> Iterator[tuple[Slot, Placement, int, int, int]]:
    """Cut ranges of a layout where other stored tensors begin.

    Yields the slot, a placement, the flat range within its local tensor, and where that begins in the slice.
    """
    for slot, low, high, at in ranges:
        places = (placements or {}).get(slot.name) or _own_placement(slot)
        for placement, first, start, stop in places.cut(low, high):
            yield slot, placement, start, stop, at + first + start - low


def _record(
    engine: Engine,
    placement: Placement,
    unit: Unit,
    slot: Slot,
    bounds: tuple[int, int],
    tensors: dict[str, torch.Tensor],
    unique: bool = False,
) -> SliceRecord:
    """Return a record. unique: no other data-parallel rank holds the range, whatever the shards."""
    twin = _twin(engine, slot) or is_second_end(engine, unit)
    owner = not twin and (unit.axes.counts or unique)
    return SliceRecord(placement, *bounds, tensors, owner, stored={WEIGHTS: unit.dtype})


def _own_placement(slot: Slot) -> Placement:
    """Place the parameter as it is; tensors that are not 1-D or 2-D are stored flat."""
    shape = slot.shape if len(slot.shape) in (1, 2) else (slot.numel,)
    return Placement.plain(slot.name, shape)
