"""Where the parameters of a shard lie in a message.

FSDP2 lays the shards of a group's parameters one behind the other, without alignment. In a message a quantised
parameter has blocks of its own, so that no block holds elements of two, of which tensor-parallel ranks may replicate
one and split the other. The exact ones follow in a region of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megazero.comm.wire import filled
from megazero.kernels.arena import Take


@dataclass(frozen=True)
class Region:
    """One region of a message: ``numel`` elements, and (start in the row, numel, place in the region) of each run."""

    runs: tuple[tuple[int, int, int], ...]
    numel: int

    def fill(self, region: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows [..., n] into the region [..., numel]; the rest of it is zero."""
        if sum(numel for _, numel, _ in self.runs) < self.numel:
            region.zero_()
        for start, numel, place in self.runs:
            region[..., place : place + numel].copy_(rows[..., start : start + numel])

    def empty(self, region: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the region [..., numel] back into rows [..., n]."""
        for start, numel, place in self.runs:
            rows[..., start : start + numel].copy_(region[..., place : place + numel])


@dataclass(frozen=True)
class Packing:
    """The coded region and, where there is one, the exact region of the rows [n] of one group."""

    regions: tuple[Region, ...]

    @classmethod
    def of(cls, numels: Sequence[int], exact: Sequence[bool], block: int, shares: int = 1) -> Packing:
        """Lay out parameters of ``numels`` elements of a row. Each region is cut into ``shares`` equal parts.

        With all of them exact there is the exact region alone.
        """
        starts = [sum(numels[:i]) for i in range(len(numels))]
        regions: list[Region] = []
        for aligned, kind in ((block, False), (1, True)):
            runs: list[tuple[int, int, int]] = []
            place = 0
            for start, numel, is_exact in zip(starts, numels, exact, strict=True):
                if is_exact is kind and numel:
                    if runs and aligned == 1 and sum(runs[-1][:2]) == start:  # they go on without a gap
                        runs[-1] = (runs[-1][0], runs[-1][1] + numel, runs[-1][2])
                    else:
                        runs.append((start, numel, place))
                    place = filled(place + numel, aligned)
            if runs:
                regions.append(Region(tuple(runs), filled(place, aligned * shares)))
        return cls(tuple(regions))

    @property
    def numel(self) -> int:
        return sum(region.numel for region in self.regions)

    def pack(self, rows: torch.Tensor, take: Take) -> list[torch.Tensor]:
        """Return the regions [..., numel] of rows [..., n], in the rows' dtype, in buffers from ``take``."""
        packed = []
        for region in self.regions:
            shape = (*rows.shape[:-1], region.numel)
            packed.append(take(rows.shape[:-1].numel() * region.numel, rows.dtype).view(shape))
            region.fill(packed[-1], rows)
        return packed

    def unpack(self, packed: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Copy regions [..., numel] back into rows [..., n], of any float dtype."""
        for region, values in zip(self.regions, packed, strict=True):
            region.empty(values, rows)

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the regions [..., numel] of a tensor [..., numel of all] that has them one behind the other."""
        return list(whole.split([region.numel for region in self.regions], dim=-1))
