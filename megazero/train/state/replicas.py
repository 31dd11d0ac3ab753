"""How a checkpoint of outer replicas is loaded.

The same replicas go on where they were, on the same layout bit for bit. Others (another number of them, none, other
kinds of outer state, other fragments) go on from one model. A fragment that was on its way is taken up. Where the
replicas had trained since they last met, the outer step that is due is taken then, with its residuals; else these go
into the inner weights, so that the next outer gradient has them. Anchor and outer momentum are exact; inner moments
and residuals are means over the replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import store
from megazero.checkpoint.placement import Places
from megazero.checkpoint.records import SliceRecord
from megazero.config.options.fields import section_of
from megazero.config.options.sections import OuterConfig
from megazero.mesh.mesh import world_group
from megazero.train.parallelize import make_outer
from megazero.zero import Engine, Outer
from megazero.zero.outer import Anchor, mix, outer_update
from megazero.zero.records import (
    LOST,
    MASTER,
    MOMENTUM,
    RESIDUAL,
    SUMS,
    WEIGHTS,
    in_replica,
    kinds_to_load,
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
        """What it holds of each replica that is loaded."""
        return [kind for kind in replica_kinds(self.manifest.kinds, 0) if kind != RESIDUAL]

    @property
    def counters(self) -> Mapping[str, Any]:
        """The counters of its outer steps, the same in all replicas."""
        return self.state["replicas"][0]["engine"]["outer"]

    @property
    def outer(self) -> Outer:
        """How its replicas met."""
        saved = self.manifest.configuration
        return make_outer(section_of(OuterConfig, saved["outer"]), saved["model"]["num_layers"])

    def continues(self, engine: Engine) -> bool:
        """Whether the engine has the replicas of the checkpoint, with the same fragments and kinds of outer state."""
        outer = engine.outer
        return (
            outer is not None
            and engine.mesh.grid.outer == self.count
            and outer.outer.fragments == self.outer.fragments
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
        )


def load_replicas(
    saved: ReplicaCheckpoint, engine: Engine, placements: Mapping[str, Places]
) -> tuple[Mapping[str, Any], store.LoadedState]:
    """Load weights, moments and outer state. Return the counters that this rank goes on from, too. Collective."""
    anchor = MASTER if MASTER in saved.manifest.kinds else WEIGHTS
    if not saved.continues(engine):
        return _merge(saved, engine, placements)
    kinds = {MASTER: anchor} | {kind: kind for kind in (MOMENTUM, SUMS) if kind in saved.manifest.kinds}
    assert engine.outer is not None
    engine.outer.resume(saved.counters)
    every = [of_replica(kind, replica) for kind in saved.kinds for replica in range(saved.count)]
    records = load_replica_records(engine, placements)
    loaded = saved.fill(records, kinds | {kind: kind for kind in every})
    engine.invalidate(anchored=True)
    return saved.state["replicas"][engine.mesh.replica], loaded


def _merge(
    saved: ReplicaCheckpoint, engine: Engine, placements: Mapping[str, Places]
) -> tuple[Mapping[str, Any], store.LoadedState]:
    """Load the replicas one after the other, and go on from their mean as the module says."""
    stored = saved.manifest.kinds
    loaded = saved.fill(
        load_records(engine, placements, optimizer=False), kinds_to_load(engine, list(stored), ())
    )
    anchors = {unit: unit.master.value.clone() for unit in engine.units}
    momentum: dict[Unit, torch.Tensor] = {}
    if MOMENTUM in stored:
        momentum = {unit: torch.zeros_like(unit.master.value) for unit in engine.units}
        saved.fill(_records_of(engine, placements, MOMENTUM, momentum), {MOMENTUM: MOMENTUM})
    lost = _load_means(saved, engine, placements)
    arrived = _load_flight(saved, engine, placements)
    rule, since = saved.outer, saved.counters["since"]
    for unit, value in anchors.items():
        anchor, met = Anchor(value, momentum.get(unit), None), since[rule.fragment_of(unit.name)] == 0
        if unit in arrived:
            outer_update(anchor, arrived[unit].div_(saved.count), rule)
            mix(unit.master.value, value, rule.mixing)
            met = True
        if met and rule.mixing == 1:
            torch.sub(value, lost[unit], out=unit.master.value)
        else:
            outer_update(anchor, torch.sub(value, unit.master.value).add_(lost[unit]), rule)
            unit.master.value.copy_(value)
    engine.invalidate()
    if engine.outer is not None:
        engine.outer.begin(anchors, momentum)
    return saved.state["replicas"][0], loaded


def _load_flight(
    saved: ReplicaCheckpoint, engine: Engine, placements: Mapping[str, Places]
) -> dict[Unit, torch.Tensor]:
    """Return the sums over the replicas of the fragment that was on its way, [n/OS] by unit."""
    if SUMS not in saved.manifest.kinds:
        return {}
    fragment, _ = saved.counters["flight"]
    units = [unit for unit in engine.units if saved.outer.fragment_of(unit.name) == fragment]
    sums = {unit: torch.zeros_like(unit.master.value) for unit in units}
    saved.fill(_records_of(engine, placements, SUMS, sums), {SUMS: SUMS})
    return sums


def _load_means(
    saved: ReplicaCheckpoint, engine: Engine, placements: Mapping[str, Places]
) -> dict[Unit, torch.Tensor]:
    """Fill master weights and inner state with means over the replicas. Return the mean outer residual by unit."""
    lost = {unit: torch.zeros_like(unit.master.value) for unit in engine.units}
    totals: list[torch.Tensor] = []
    for replica in range(saved.count):
        own = load_records(engine, placements)
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
    engine: Engine, placements: Mapping[str, Places], kind: str, held: Mapping[Unit, torch.Tensor]
) -> list[SliceRecord]:
    """Return the records of one kind of OS slices, by unit."""
    return [
        record
        for unit, tensor in held.items()
        for record in slice_records(engine, placements, unit, unit.axes.os, {kind: tensor})
    ]
