"""The engine's model and optimizer state as checkpoint records: flat slices with global coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megazero.checkpoint.placement import Placement
from megazero.checkpoint.records import SliceRecord
from megazero.zero.engine import Engine
from megazero.zero.layout import Slot
from megazero.zero.unit import Unit

WEIGHTS, MASTER = "weights", "master"


def save_records(engine: Engine, placements: Mapping[str, Placement] | None = None) -> list[SliceRecord]:
    """What this rank saves: its OS slice of every parameter.

    Kinds: 'weights' in the parameters' dtype; 'master' (at least fp32) where that is another dtype; the
    optimizer's elementwise state by torch's names. placements default to each parameter's own name and shape.
    """
    engine.optimizer.ensure_state()
    records = []
    for unit in engine.units:
        for slot, low, high, at in unit.layout.ranges(unit.levels.os):
            master = unit.master[at : at + high - low]
            tensors = {WEIGHTS: master.to(unit.dtype)}
            if unit.dtype != unit.sum_dtype:
                tensors[MASTER] = master
            tensors.update(engine.optimizer.elementwise_state(unit, at, at + high - low))
            records.append(_record(engine, placements, unit, slot, (low, high), tensors))
    return records


def load_records(
    engine: Engine, placements: Mapping[str, Placement] | None = None, optimizer: bool = True
) -> list[SliceRecord]:
    """Where a load writes: kind 'master' for the weights, and the optimizer's state if asked for.

    Call ``engine.invalidate()`` after the load.
    """
    engine.optimizer.ensure_state()
    records = []
    for unit in engine.units:
        for slot, low, high, at in unit.layout.ranges(unit.levels.os):
            tensors = {MASTER: unit.master[at : at + high - low]}
            if optimizer:
                tensors.update(engine.optimizer.elementwise_state(unit, at, at + high - low))
            records.append(_record(engine, placements, unit, slot, (low, high), tensors))
    return records


def load_kinds(stored: Sequence[str], optimizer: Sequence[str]) -> dict[str, str]:
    """Kind in ``load_records`` to kind in the checkpoint: the master falls back to the weights."""
    return {MASTER: MASTER if MASTER in stored else WEIGHTS, **{kind: kind for kind in optimizer}}


def optimizer_kinds(engine: Engine) -> list[str]:
    """Names of this rank's elementwise optimizer state; none on a rank that holds no slice."""
    engine.optimizer.ensure_state()
    runs = engine.optimizer.runs[:1]
    return sorted(name for r in runs for name in engine.optimizer.elementwise_state(r.unit, r.start, r.stop))


def _record(
    engine: Engine,
    placements: Mapping[str, Placement] | None,
    unit: Unit,
    slot: Slot,
    bounds: tuple[int, int],
    tensors: dict[str, torch.Tensor],
) -> SliceRecord:
    placement = (placements or {}).get(slot.name) or _own_placement(slot)
    twin = engine.traits[slot.name].replicated and engine.mesh.tp.index > 0
    return SliceRecord(placement, *bounds, tensors, owner=not (engine.mesh.is_replica or twin))


def _own_placement(slot: Slot) -> Placement:
    """The parameter as it is; tensors that are not 1-D or 2-D are stored flat."""
    shape = slot.shape if len(slot.shape) in (1, 2) else (slot.numel,)
    return Placement.plain(slot.name, shape)


def held_bytes(engine: Engine) -> dict[str, int]:
    """Bytes this rank holds now: 'parameters' (P copies, gathered buffers), 'gradients', 'optimizer' (master and
    moments). A master that is a part of the P copy counts as parameters only."""
    parameters, gradients, optimizer = set[int](), 0, 0
    total = 0
    for unit in engine.units:
        for tensor in (unit.full, unit.copy):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in parameters:
                parameters.add(storage.data_ptr())
                total += storage.nbytes()
        if unit.grad is not None:
            gradients += unit.grad.nbytes
        if unit.master.untyped_storage().data_ptr() not in parameters:
            optimizer += unit.master.nbytes
    for state in engine.optimizer.torch.state.values():
        optimizer += sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
    return {"parameters": total, "gradients": gradients, "optimizer": optimizer}
