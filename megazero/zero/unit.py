"""A unit: parameters that are gathered together, in one flat buffer, with the owners of their state.

Nobody writes a unit. Its state is written by the owners alone: each class's own methods.

| owner | state |
|---|---|
| ``Master`` (masters.py) | this rank's slice of the master weights |
| ``Weights`` (weights.py) | full parameters and the P copy, by gathers and refreshes; who uses them |
| ``Gradients`` (gradients.py) | gradients on their way, and their sums |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from megazero.kernels.arena import Arena
from megazero.zero.form import Form
from megazero.zero.gradients import Gradients
from megazero.zero.masters import Master
from megazero.zero.weights import Weights


@dataclass(frozen=True, eq=False)
class Unit(Form):
    """What a unit is, and the owners of its state."""

    master: Master
    weights: Weights
    gradients: Gradients


def make_unit(form: Form, values: Mapping[str, torch.Tensor], arena: Arena) -> Unit:
    """Make a unit of these parameter values [shape of each]. arena: of staging, one for all units of an engine."""
    weights = Weights(form, values)
    own = {field.name: getattr(form, field.name) for field in fields(form)}
    return Unit(**own, master=weights.master, weights=weights, gradients=Gradients(form, arena))
