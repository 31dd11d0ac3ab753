"""Finds out in every step whether a rank has a reason to save and stop (ops/exit_conditions.py)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from megazero.mesh.mesh import Mesh
from megazero.mesh.waiting import waiting
from megazero.ops.exit_conditions import ExitConditions
from megazero.train.callbacks.callback import Callback, TrainedStep


class Exits(Callback):
    """Exchanges whether ranks have a reason to stop. ``reason``: why all ranks stop, or None.

    asked: the reason that a callback of this rank gave. any_time: callbacks may ask, so evaluations look for it.
    """

    exchanged = MappingProxyType({"stops": "max"})

    def __init__(self, conditions: ExitConditions, any_time: bool = False) -> None:
        self.conditions = conditions
        self.polled = any_time or conditions.can_stop_at_once
        self.reason: str | None = None
        self.asked: str | None = None
        self._own: str | None = None

    def numbers(self) -> Mapping[str, float]:
        self._own = self._look()
        return {"stops": float(self._own is not None)}

    def after_step(self, step: TrainedStep) -> None:
        self.reason = self.conditions.agreed_reason(self._own, step.numbers["stops"] > 0)

    def ask(self, mesh: Mesh) -> bool:
        """Tell whether the run is to stop, outside of steps, which exchange that themselves. Collective."""
        if self.polled:
            own = self._look()
            flag = torch.tensor([float(own is not None)], device=mesh.device)
            with waiting:  # on CUDA the host waits where it reads
                any_stops = bool(mesh.gather_rows(flag).any())
            self.reason = self.conditions.agreed_reason(own, any_stops)
        return self.reason is not None

    def _look(self) -> str | None:
        return self.asked or self.conditions.own_reason()
