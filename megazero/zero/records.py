"""The engine's model and optimizer state as checkpoint records: flat slices with global coordinates.

Where outer steps are taken the plain kinds of weights hold the anchor: whoever reads the model reads that. The
replica's own weights are there under ``OWN``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from megazero.checkpoint.placement import Placement, Places
from megazero.checkpoint.records import SliceRecord
from megazero.zero.engine import Engine
from megazero.zero.layout import Slot
from megazero.zero.outer import Anchor
from megazero.zero.rounding import KINDS
from megazero.zero.unit import Unit

WEIGHTS, MASTER, ERRORS = "weights", "master", "rounding errors"
MOMENTUM, LOST, OWN = "outer momentum", "outer residual", "replica master"
RESIDUAL = "residual"  # of gradients' error feedback, in checkpoints of earlier versions; nobody loads it
NOT_OPTIMIZER = (WEIGHTS, MASTER, RESIDUAL, MOMENTUM, LOST, OWN)


def save_records(engine: Engine, placements: Mapping[str, Places] | None = None) -> list[SliceRecord]:
    """Return what this rank saves: its OS slice of every parameter.

    The kinds are: 'weights' in the parameters' dtype (under the delta refresh R, after ``engine.refresh``); 'master'
    (at least fp32) where that is another dtype; and the optimizer's elementwise state, by torch's names. By default a
    parameter's placement is its own name and shape. Buffers that have a placement are saved as they are, as weights
    and masters.
    """
    engine.optimizer.ensure_state()
    masters = any(_keeps_masters(engine, unit) for unit in engine.units)
    records = _buffer_records(engine, placements, (WEIGHTS, MASTER) if masters else (WEIGHTS,))
    for unit in engine.units:
        if unit.delta and unit.weights.stale:
            raise RuntimeError(
                "save_records() needs engine.refresh() before it: R is behind the master weights"
            )
        level = unit.axes.os
        weights = unit.weights.copy_slice if unit.delta else unit.master.slice
        for piece, held in zip(unit.layout.pieces(level), weights.flat(level), strict=True):
            for slot, placement, low, high, at in _placed(placements, unit.layout.ranges_of(piece)):
                own, start = slice(at, at + high - low), at - piece.compact
                # Views: the store converts the weights as it writes them.
                tensors = {WEIGHTS: held[start : start + high - low]}
                if _keeps_masters(engine, unit):
                    tensors[MASTER] = unit.master.value[own]
                tensors.update(engine.optimizer.elementwise_state(unit, own.start, own.stop))
                records.append(_record(engine, placement, unit, slot, (low, high), tensors))
    return records


def _keeps_masters(engine: Engine, unit: Unit) -> bool:
    """Tell whether checkpoints hold master weights beside the weights."""
    return unit.dtype != unit.sum_dtype or engine.policy.codecs.delta


def _buffer_records(
    engine: Engine,
    placements: Mapping[str, Places] | None,
    kinds: Sequence[str],
    stand_ins: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> list[SliceRecord]:
    """Return the buffers with a placement, which all ranks of a stage hold whole. The first of them saves.

    stand_ins: by the id of a buffer, what is saved in its place.
    """
    mesh, placed = engine.mesh, placements or {}
    owner = mesh.dp_rank == mesh.tp.index == 0
    return [
        SliceRecord(placement, 0, held.numel(), dict.fromkeys(kinds, held.view(-1)), owner)
        for name, buffer in engine.module.named_buffers()
        if name in placed
        for placement, held in placed[name].held(stand_ins.get(id(buffer), buffer))
    ]


def save_replica_records(engine: Engine, placements: Mapping[str, Places] | None = None) -> list[SliceRecord]:
    """Return what this rank saves where outer steps are taken: the anchor's slices beside its replica's own state."""
    assert engine.outer is not None
    records = [_of_replica(record) for record in save_records(engine, placements)]
    for unit, anchor in engine.outer.anchors.items():
        tensors = {WEIGHTS: anchor.value} | _momentum(anchor)
        if unit.dtype != unit.sum_dtype:
            tensors[MASTER] = anchor.value
        records += _slice_records(engine, placements, unit, unit.axes.os, tensors)
    masters = any(_keeps_masters(engine, unit) for unit in engine.units)
    kinds = (WEIGHTS, MASTER) if masters else (WEIGHTS,)
    return [*records, *_lost_records(engine, placements), *_anchored_buffers(engine, placements, kinds)]


def load_replica_records(
    engine: Engine, placements: Mapping[str, Places] | None = None, optimizer: bool = True
) -> list[SliceRecord]:
    """Return the places into which a load of such a checkpoint writes. Call ``engine.invalidate(anchored=True)``
    after it."""
    assert engine.outer is not None
    records = [_of_replica(record) for record in load_records(engine, placements, optimizer)]
    for unit, anchor in engine.outer.anchors.items():
        tensors = {MASTER: anchor.value} | _momentum(anchor)
        records += _slice_records(engine, placements, unit, unit.axes.os, tensors)
    kinds = WEIGHTS, MASTER
    return [*records, *_lost_records(engine, placements), *_anchored_buffers(engine, placements, kinds)]


def _momentum(anchor: Anchor) -> dict[str, torch.Tensor]:
    return {} if anchor.momentum is None else {MOMENTUM: anchor.momentum}


def _of_replica(record: SliceRecord) -> SliceRecord:
    """Return the record with the weights, in their masters' dtype, as the replica's own."""
    own = {kind: tensor for kind, tensor in record.tensors.items() if kind not in (WEIGHTS, MASTER)}
    held = record.tensors.get(MASTER, record.tensors.get(WEIGHTS))
    assert held is not None
    return replace(record, tensors={OWN: held, **own})


def _anchored_buffers(
    engine: Engine, placements: Mapping[str, Places] | None, kinds: Sequence[str]
) -> list[SliceRecord]:
    """Return the anchors of buffers, or the buffers themselves where they do not train."""
    assert engine.outer is not None
    anchors = {id(buffer): held for buffer, held in engine.outer.buffers}
    return _buffer_records(engine, placements, kinds, anchors)


def _lost_records(engine: Engine, placements: Mapping[str, Places] | None) -> list[SliceRecord]:
    """Return the residuals of outer steps. Every data-parallel rank has a slice of its own."""
    assert engine.outer is not None
    return [
        record
        for unit, anchor in engine.outer.anchors.items()
        if anchor.residual is not None
        for record in _slice_records(engine, placements, unit, unit.axes.all, {LOST: anchor.residual})
    ]


def _slice_records(
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


def is_second_end(engine: Engine, unit: Unit) -> bool:
    """Whether this is the last stage's copy of a tied parameter: the first stage saves it."""
    return unit.tied and engine.mesh.ends is not None and engine.mesh.ends.index > 0


def load_records(
    engine: Engine, placements: Mapping[str, Places] | None = None, optimizer: bool = True
) -> list[SliceRecord]:
    """Return where a load writes.

    Kind 'master' is for the weights, 'weights' for R; the optimizer's state is there if asked for. Call
    ``engine.invalidate()`` after the load. The engine's measurements are discarded with its old weights.
    """
    engine.optimizer.ensure_state()
    engine.rounding.forget()
    records = _buffer_records(engine, placements, (WEIGHTS, MASTER))
    for unit in engine.units:
        for slot, placement, low, high, at in _placed(placements, unit.layout.ranges(unit.axes.os)):
            tensors = {MASTER: unit.master.value[at : at + high - low]}
            if optimizer:
                state = engine.optimizer.elementwise_state(unit, at, at + high - low)
                tensors.update(state)
            records.append(_record(engine, placement, unit, slot, (low, high), tensors))
        if engine.policy.codecs.delta:
            # Units that are exact as a whole have no R; a load wants every tensor of a kind.
            level = unit.axes.p if unit.delta else unit.axes.os
            copy = unit.weights.copy if unit.delta else torch.empty_like(unit.master.value, dtype=unit.dtype)
            records += _slice_records(engine, placements, unit, level, {WEIGHTS: copy})
    return records


def kinds_to_load(engine: Engine, stored: Sequence[str], optimizer: Sequence[str]) -> dict[str, str]:
    """Map each kind of ``load_records`` to a kind in the checkpoint: the master falls back to the weights."""
    kinds = {MASTER: MASTER if MASTER in stored else WEIGHTS}
    if engine.outer is not None:
        keeps = {OWN: True, MOMENTUM: engine.outer.outer.momentum, LOST: engine.outer.outer.feedback}
        kinds |= {kind: kind for kind, kept in keeps.items() if kept and kind in stored}
    if engine.policy.codecs.delta:
        kinds[WEIGHTS] = WEIGHTS
    return {**kinds, **{kind: kind for kind in optimizer}}


def rank_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the state that only the same layout can load unchanged.

    Under the delta refresh these are the errors that were measured as R was brought up to date for the save.
    """
    if not engine.policy.codecs.delta:
        return {}
    measured = zip(KINDS, engine.rounding.sums, strict=True)
    return {f"{ERRORS} {kind}": sums for kind, sums in measured if sums.any()}


def load_rank_tensors(engine: Engine, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore ``rank_tensors``, after a load on the layout that saved."""
    for kind, sums in zip(KINDS, engine.rounding.sums, strict=True):
        if f"{ERRORS} {kind}" in tensors and engine.policy.codecs.delta:
            sums.copy_(tensors[f"{ERRORS} {kind}"])


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
    tp = engine.mesh.tp
    holders = engine.traits[slot.name].holders(tp.index, tp.size)
    twin = holders.start != tp.index or is_second_end(engine, unit)
    owner = not twin and (unit.axes.counts or unique)
    return SliceRecord(placement, *bounds, tensors, owner, stored={WEIGHTS: unit.dtype})


def _own_placement(slot: Slot) -> Placement:
    """Place the parameter as it is; tensors that are not 1-D or 2-D are stored flat."""
    shape = slot.shape if len(slot.shape) in (1, 2) else (slot.numel,)
    return Placement.plain(slot.name, shape)
