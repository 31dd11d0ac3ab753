"""The guard of quantised messages: every step measures the rounding error of one unit, in turn.

Where the error is above the policy's bound, all ranks send that unit exactly from the next step on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

import torch

from megazero.zero.policy import Policy
from megazero.zero.rounding import (
    GRADIENTS,
    KINDS,
    MEASURED,
    WEIGHTS,
    Rounding,
    relative_errors,
    zeroed_share,
)
from megazero.zero.scalars import Rows, StepPart
from megazero.zero.unit import Unit


class Guard(StepPart):
    """Compares the measured errors with the policy's bounds, and counts the updates that choose the next sample.

    fallen: the units of all stages that send exactly, by name, and which kinds. replica: this rank's outer replica.
    Where nothing is rounded it has no columns.
    """

    def __init__(self, rounding: Rounding, units: Sequence[Unit], policy: Policy, replica: int) -> None:
        self.rounding, self.units, self.replica = rounding, units, replica
        self.columns = self.summed = 0 if policy.codecs.exact else MEASURED
        self.bounds = {WEIGHTS: policy.weight_error_bound, GRADIENTS: policy.gradient_error_bound}
        self.fallen: dict[str, list[str]] = {}
        self._above: list[tuple[str, str]] = []  # units and kinds that fall back when the step ends

    def write(self, row: torch.Tensor) -> None:
        if self.columns:
            self.rounding.take(out=row)

    def read(self, rows: Rows, sums: Rows) -> Mapping[str, Any]:
        """Find what falls back. All ranks of a replica have the same errors and decide alike."""
        name = self.rounding.sampled
        assert name is not None
        if not self.columns:
            return {"sampled": name}
        measured = sums[self.replica]
        errors = relative_errors(measured)
        known = self.fallen.get(name, ())
        self._above = [
            (name, kind)
            for kind, error in errors.items()
            if error > (self.bounds[kind] or inf) and kind not in known
        ]
        told = tuple(
            f"{kind} of unit {name!r}: relative rounding error {errors[kind]:.3g} is above the bound "
            f"{self.bounds[kind]:g}; exact from the next step on"
            for _, kind in self._above
        )
        return {"sampled": name, "errors": errors, "zeroed": zeroed_share(measured), "fallbacks": told}

    def updated(self, made: bool) -> None:
        self.rounding.updates += int(made)
        self._send_exactly(self._above)
        self._above = []

    def aborted(self) -> None:
        self.rounding.abort()

    def state(self) -> dict[str, Any]:
        return {"updates": self.rounding.updates, "fallen_back": self.fallen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Names of units that are not here are ignored."""
        self.rounding.updates = int(state["updates"])
        self._send_exactly((name, kind) for name, kinds in state["fallen_back"].items() for kind in kinds)

    def _send_exactly(self, fallen: Iterable[tuple[str, str]]) -> None:
        for name, kind in fallen:
            if name in self.rounding.names:
                kinds = {*self.fallen.get(name, ()), kind}
                self.fallen[name] = [k for k in KINDS if k in kinds]
            for unit in self.units:
                if unit.name == name:
                    (unit.weights if kind == WEIGHTS else unit.gradients).send_exactly()
