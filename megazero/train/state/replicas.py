"""How a checkpoint of outer replicas is loaded.

The same replicas go on where they were, on the same layout bit for bit. Others (another number of them, none, other
kinds of outer state) go on from one model. If the replicas had trained since they last met, the outer step that is
due is taken first, with its residuals; else these go into the inner weights, so that the next outer gradient has
them. Anchor and outer momentum are exact; inner moments and residuals are means over the replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import store
from megazero.checkpoint.placement import Placement
from megazero.checkpoint.records import SliceRecord
from megazero.config.options.fields import section_of
from megazero.config.options.sections import OuterConfig
from megazero.train.parallelize import make_outer
from megazero.train.state.origin import world_group
from megazero.zero import Engine
from megazero.zero.outer import Anchor, outer_update
from megazero.zero.records import (
    LOST,
    MASTER,
    MOMENTUM,
    RESIDUAL,
    WEIGHTS,
    in_replica,
    load_kinds,
    load_records,
    load_replica_records,
    of_replica,
    replica_kinds,
    slice_records,
)
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class ReplicaCheckpoint:
    """A checkpoint with the own state of ``count`` outer replicas. layout: that of the run that loads it."""

    path: Path
    manifest: store.Manifest
    state: Mapping[str, Any]
    layout: Mapping[str, Any]

    @property
    def count(self) -> int:
        return len(self.state["replicas"])

    @property
    def kinds(self) -> list[str]:
        """What it holds of each replica."""
        return replica_kinds(self.manifest.kinds, 0)

    def continues(self, engine: Engine) -> bool:
        """Whether the engine's replicas are those of the checkpoint, with the same kinds of outer state."""
        outer = engine.outer
        return (
            outer is not None
            and engine.mesh.grid.outer == self.count
            and outer.outer.feedback == (LOST in self.kinds)
            and bool(outer.outer.momentum) == (MOMENTUM in self.manifest.kinds)
        )

    def fill(self, records: list[SliceRecord], kinds: Mapping[str, str]) -> store.LoadedState:
        return store.load(
            self.path,
            records=records,
            group=world_group(),
            kinds=kinds,
            layout=self.layout,
            checked=True,
            convert=True,
        )


def load_replicas(
    saved: ReplicaCheckpoint, engine: Engine, placements: Mapping[str, Placement]
) -> tuple[Mapping[str, Any], store.LoadedState]:
    """Load weights, moments and outer state. Return the counters that this rank goes on from, too. Collective."""
    anchor = MASTER if MASTER in saved.manifest.kinds else WEIGHTS
    if not saved.continues(engine):
        return _merge(saved, engine, placements)
    kinds = {MASTER: anchor} | ({MOMENTUM: MOMENTUM} if MOMENTUM in saved.manifest.kinds else {})
    every = [of_replica(kind, replica) for kind in saved.kinds for replica in range(saved.count)]
    records = load_replica_records(engine, placements, RESIDUAL in saved.kinds)
    loaded = saved.fill(records, kinds | {kind: kind for kind in every})
    engine.invalidate(anchored=True)
    return saved.state["replicas"][engine.mesh.replica], loaded


def _merge(
    saved: ReplicaCheckpoint, engine: Engine, placements: Mapping[str, Placement]
) -> tuple[Mapping[str, Any], store.LoadedState]:
    """Load the replicas one after the other, and go on from their mean as the module says."""
    stored = saved.manifest.kinds
    loaded = saved.fill(
        load_records(engine, placements, optimizer=False), load_kinds(engine, list(stored), ())
    )
    anchors = {unit: unit.master.clone() for unit in engine.units}
    momentum: dict[Unit, torch.Tensor] = {}
    if MOMENTUM in stored:
        momentum = {unit: torch.zeros_like(unit.master) for unit in engine.units}
        saved.fill(_records_of(engine, placements, MOMENTUM, momentum), {MOMENTUM: MOMENTUM})
    lost = _load_means(saved, engine, placements)
    states = saved.state["replicas"]
    due = states[0]["engine"]["since_outer_step"] > 0  # the same in all
    rule = make_outer(section_of(OuterConfig, saved.manifest.configuration["outer"]))
    for unit, value in anchors.items():
        if due:
            gradient = torch.sub(value, unit.master).add_(lost[unit])
            outer_update(Anchor(value, momentum.get(unit), None), gradient, rule)
            unit.master.copy_(value)
        else:
            torch.sub(value, lost[unit], out=unit.master)
    engine.invalidate()
    if engine.outer is not None:
        engine.outer.begin(anchors, momentum)
    first = states[0]
    return {**first, "engine": {**first["engine"], "since_outer_step": 0}}, loaded


def _load_means(
    saved: ReplicaCheckpoint, engine: Engine, placements: Mapping[str, Placement]
) -> dict[Unit, torch.Tensor]:
    """Fill master weights and inner state with means over the replicas. Return the mean outer residual by unit."""
    lost = {unit: torch.zeros_like(unit.master) for unit in engine.units}
    totals: list[torch.Tensor] = []
    for replica in range(saved.count):
        own = load_records(engine, placements, True, RESIDUAL in saved.kinds)
        if LOST in saved.kinds:
            own += _records_of(engine, placements, LOST, lost)
        records = in_replica(own, replica)
        saved.fill(records, {kind: kind for kind in (of_replica(name, replica) for name in saved.kinds)})
        tensors = [r.tensors[kind] for r in own for kind in saved.kinds if kind in r.tensors]
        if totals:
            for total, tensor in zip(totals, tensors, strict=True):
                total.add_(tensor)
        else:
            totals = [tensor.clone() for tensor in tensors]
    for total, tensor in zip(totals, tensors, strict=True):
        tensor.copy_(total.div_(saved.count))
    return lost


def _records_of(
    engine: Engine, placements: Mapping[str, Placement], kind: str, held: Mapping[Unit, torch.Tensor]
) -> list[SliceRecord]:
    """Return the records of one kind of OS slices, by unit."""
    return [
        record
        for unit, tensor in held.items()
        for record in slice_records(engine, placements, unit, unit.levels.os, {kind: tensor})
    ]
