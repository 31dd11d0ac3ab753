"""What a run continues from, bit for bit, on the same layout: its files, and the state of an engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.mesh.mesh import Mesh
from megazero.zero import Engine
from megazero.zero.records import load_rank_tensors, rank_tensors


@dataclass(frozen=True)
class Snapshot:
    """The files of one run. until: the time.monotonic() at which a run that can stop does."""

    folder: Path
    until: float

    def due(self, mesh: Mesh) -> bool:
        """Return whether rank 0's time is over. Collective."""
        late = torch.tensor([time.monotonic() > self.until], device=mesh.device)
        return bool(mesh.gather_rows(late)[0])

    def save(self, mesh: Mesh, state: dict[str, Any]) -> None:
        """Write this rank's state of a run (``Training.state``), whole or not at all. Collective."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self._file(mesh)
        torch.save(state, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
        mesh.gather_rows(torch.zeros(1, device=mesh.device))  # all have written

    def load(self, mesh: Mesh) -> dict[str, Any] | None:
        """Return this rank's state, or None unless all ranks have one of the same step. Collective."""
        file = self._file(mesh)
        state = torch.load(file, map_location=mesh.device) if file.exists() else {"loop": {"step": 0}}
        steps = mesh.gather_rows(torch.tensor([state["loop"]["step"]], device=mesh.device))
        return state if steps[0] and (steps == steps[0]).all() else None

    def _file(self, mesh: Mesh) -> Path:
        return self.folder / f"rank-{mesh.rank}.pt"


def held(engine: Engine) -> dict[str, Any]:
    """Return what this rank's engine continues from."""
    engine.refresh()
    engine.settle()
    return {
        "masters": [unit.master.value for unit in engine.units],
        "copies": [unit.weights.copy if unit.delta else None for unit in engine.units],
        "optimizer": [dict(engine.optimizer.torch.state[run.leaf]) for run in engine.optimizer.runs],
        "own": rank_tensors(engine),
        "outer": outer_tensors(engine),
        "state": engine.state(),
    }


def outer_tensors(engine: Engine) -> list[torch.Tensor]:
    """Return what outer steps keep, and what is under way between replicas."""
    if engine.outer is None:
        return []
    every = [t for a in engine.outer.anchors.values() for t in (a.value, a.momentum, a.residual)]
    flying = engine.outer.flight.sums.values() if engine.outer.flight else ()
    return [*(t for t in every if t is not None), *flying]


def restore(engine: Engine, state: dict[str, Any]) -> None:
    """Continue from what ``held`` returned."""
    for unit, master, copy in zip(engine.units, state["masters"], state["copies"], strict=True):
        unit.master.value.copy_(master)
        if unit.delta:
            unit.weights.copy.copy_(copy)
    engine.optimizer.ensure_state()
    for run, kept in zip(engine.optimizer.runs, state["optimizer"], strict=True):
        for name, value in engine.optimizer.torch.state[run.leaf].items():
            value.copy_(kept[name])
    if engine.outer is not None:
        engine.outer.resume(state["state"]["outer"])
        for tensor, kept in zip(outer_tensors(engine), state["outer"], strict=True):
            tensor.copy_(kept)
    engine.invalidate(anchored=True)
    load_rank_tensors(engine, state["own"])
    engine.load_state(state["state"])
    engine.refresh()  # as `held` did: its bytes were counted before
