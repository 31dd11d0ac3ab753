"""What a unit is. Nothing of it changes; weights.py and gradients.py hold what does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from megazero.comm.codec import Codec, Identity, at_least_fp32
from megazero.comm.hops import Leg
from megazero.comm.made_once import made_once
from megazero.comm.wire import Codecs
from megazero.mesh.mesh import Axis
from megazero.zero.axes import DataAxes
from megazero.zero.layout import Slot, UnitLayout
from megazero.zero.plan import Hop, UnitPlan


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
    def plan(self) -> UnitPlan[Codec]:
        """What moves for the unit."""
        coded, *exact = (numel for _, numel in self.layout.regions)
        width, sums = self.dtype.itemsize, self.sum_dtype.itemsize
        return UnitPlan(coded, sum(exact), self.axes.cut, self.codecs, width, sums)

    @cached_property
    def delta(self) -> bool:
        """Whether refreshes send differences."""
        return self.plan.delta

    @made_once
    def leg(self, hop: Hop[Codec], axis: Axis | None = None) -> Leg:
        """Return a hop's axis as this rank sees it, and its codec. axis: if it is none of the unit's data axes."""
        codec = hop.format or Identity(self.dtype if hop.raw else self.sum_dtype)
        return Leg(axis or self.axes.axis(hop.level), codec)

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The names of the parameters without a gradient."""
        return frozenset(self.params) - frozenset(self.trainable)

    @cached_property
    def slots(self) -> Mapping[str, Slot]:
        return {slot.name: slot for slot in self.layout.slots}
