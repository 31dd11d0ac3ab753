"""Master weights: the slices that the optimizer updates, of which all copies are made."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megazero.zero.form import Form
from megazero.zero.slices import Slice


class Master:
    """This rank's slice of a unit's master weights.

    value: compact [n/OS] (layout.py), at least fp32. It may be a part of the P copy (weights.py).
    version: how many values it has had. Copies note which one they hold.
    """

    def __init__(self, form: Form, room: torch.Tensor | None, values: Mapping[str, torch.Tensor]) -> None:
        """room: memory for it, else it gets its own. values: of the parameters, [shape of each]."""
        level, layout = form.axes.os, form.layout
        if room is None:
            room = torch.empty(layout.level_numel(level), dtype=form.sum_dtype, device=form.device)
        self.value, self.slice, self.version = room.zero_(), Slice(layout, room, level), 1
        for slot, low, high, at in layout.ranges(level):
            self.value[at : at + high - low].copy_(values[slot.name].reshape(-1)[low:high])

    def scale_rows(self, name: str, factors: torch.Tensor) -> None:
        """Multiply what it has of a parameter by ``factors``, one for each of its rows. Copies are behind it then."""
        for slot, low, high, at in self.slice.layout.ranges(self.slice.level):
            if slot.name == name:
                rows = torch.arange(low, high, device=factors.device) // (slot.numel // slot.shape[0])
                self.value[at : at + high - low].mul_(factors[rows])

    def changed(self) -> None:
        """Note that the value has changed: every copy is behind it."""
        self.version += 1
