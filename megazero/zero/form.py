"""What a unit is. Nothing of it changes; weights.py and gradients.py hold what does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from megazero.comm.codec import Codec, at_least_fp32
from megazero.comm.wire import Codecs
from megazero.zero.axes import DataAxes
from megazero.zero.layout import Slot, UnitLayout


@dataclass(frozen=True, eq=False)
class Form:
    """What a unit is: parameters that are gathered together, and how.

    params: by name. trainable: the names of those with a gradient. layout, axes: how the axes cut its flat buffer.
    dtype: of the parameters. lifetime: of the P copy (policy.py). codecs: the wire formats.
    part: of the module, a virtual pipeline stage. tied: the pipeline's other end holds the same parameter, in a unit
    of the same name.
    """

    name: str
    params: Mapping[str, nn.Parameter]
    trainable: tuple[str, ...]
    layout: UnitLayout
    axes: DataAxes
    dtype: torch.dtype
    device: torch.device
    lifetime: str
    codecs: Codecs[Codec]
    part: int
    tied: bool

    @cached_property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of master weights and sums of gradients."""
        return at_least_fp32(self.dtype)

    @cached_property
    def delta(self) -> bool:
        """Whether refreshes send differences."""
        return self.codecs.delta and self.axes.p < self.axes.os

    @cached_property
    def slots(self) -> Mapping[str, Slot]:
        return {slot.name: slot for slot in self.layout.slots}
