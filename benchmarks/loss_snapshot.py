"""A run of loss.py that stops half way and goes on, bit for bit, on the same layout."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megazero.mesh.mesh import Mesh
from megazero.zero import Engine
from megazero.zero.records import load_rank_tensors, rank_tensors

if TYPE_CHECKING:
    from benchmarks.loss_run import Training

LOOP = ("step", "sent", "skipped", "seconds", "cpu_seconds", "curve", "errors")


@dataclass(frozen=True)
class Snapshot:
    """folder: of one run. until: of time.monotonic(), when a run that can stop does."""

    folder: Path
    until: float

    def due(self, mesh: Mesh) -> bool:
        """Whether rank 0's time is over; collective."""
        late = torch.tensor([time.monotonic() > self.until], device=mesh.device)
        return bool(mesh.gather_rows(late)[0])

    def save(self, training: Training) -> None:
        """Collective. A file is whole or not there; a folder in which one rank's is of another step is not loaded."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "loop": {name: getattr(training, name) for name in LOOP},
            "scaling": training.scaling.state(),
            "engine": held(training.engine),
        }
        file = self._file(training.mesh)
        torch.save(state, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
        training.mesh.gather_rows(torch.zeros(1, device=training.mesh.device))  # all have written

    def load(self, training: Training) -> bool:
        """Whether there was one; collective."""
        file, mesh = self._file(training.mesh), training.mesh
        state = torch.load(file, map_location=mesh.device) if file.exists() else {"loop": {"step": 0}}
        steps = mesh.gather_rows(torch.tensor([state["loop"]["step"]], device=mesh.device))
        if not (steps == steps[0]).all() or not steps[0]:
            return False
        for name, value in state["loop"].items():
            setattr(training, name, value)
        training.scaling.load_state(state["scaling"])
        restore(training.engine, state["engine"])
        return True

    def _file(self, mesh: Mesh) -> Path:
        return self.folder / f"rank-{mesh.rank}.pt"


def held(engine: Engine) -> dict[str, Any]:
    """What this rank's engine goes on from."""
    engine.refresh()
    engine.settle()
    return {
        "masters": [unit.master for unit in engine.units],
        "copies": [unit.copy if unit.delta else None for unit in engine.units],
        "optimizer": [dict(engine.optimizer.torch.state[run.leaf]) for run in engine.optimizer.runs],
        "own": rank_tensors(engine),
        "outer": outer_tensors(engine),
        "state": engine.state(),
    }


def outer_tensors(engine: Engine) -> list[torch.Tensor]:
    """What outer steps keep, and what is on its way."""
    if engine.outer is None:
        return []
    every = [t for a in engine.outer.anchors.values() for t in (a.value, a.momentum, a.residual)]
    flying = engine.outer.flight.sums.values() if engine.outer.flight else ()
    return [*(t for t in every if t is not None), *flying]


def restore(engine: Engine, state: dict[str, Any]) -> None:
    for unit, master, copy in zip(engine.units, state["masters"], state["copies"], strict=True):
        unit.master.copy_(master)
        if unit.delta:
            unit.copy.copy_(copy)
    engine.optimizer.ensure_state()
    for run, kept in zip(engine.optimizer.runs, state["optimizer"], strict=True):
        for name, value in engine.optimizer.torch.state[run.leaf].items():
            value.copy_(kept[name])
    if engine.outer is not None:
        engine.outer.load_state(state["state"]["outer"])
        for tensor, kept in zip(outer_tensors(engine), state["outer"], strict=True):
            tensor.copy_(kept)
    engine.invalidate(anchored=True)
    load_rank_tensors(engine, state["own"])
    engine.load_state(state["state"])
    engine.refresh()  # as `held` did: its bytes were counted before
