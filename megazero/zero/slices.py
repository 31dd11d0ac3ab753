"""Slices of a unit as buffers, with views that are made once. layout.py says where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from megazero.comm.made_once import made_once
from megazero.comm.rows import Rows, Views
from megazero.zero.layout import UnitLayout


@dataclass(frozen=True)
class Slice:
    """A compact buffer of one level's slice: the whole unit (0), a P slice, a G slice, ...

    Its views are made once, so a slice of a buffer that stays is kept (``Unit``).
    """

    layout: UnitLayout
    buffer: torch.Tensor
    level: int

    @made_once
    def flat(self, level: int) -> Views:
        """Return 1-D views of a deeper level's slice of this rank, in the buffer's dtype."""
        return tuple(self.buffer[p.span] for p in self.layout.within(level, self.level))

    @made_once
    def rows(self, level: int, count: int) -> Views:
        """Return the same as views [count, -1]."""
        return tuple(x.view(count, -1) for x in self.flat(level))

    @made_once
    def hop(self, level: int, size: int, index: int) -> Rows:
        """Return this rank's slice of a deeper level as a hop to the next level takes it: [size, -1], row by row."""
        return Rows(self.rows(level, size), index)

    @cached_property
    def parts(self) -> dict[str, torch.Tensor]:
        """Every parameter's part [its shape] of the whole unit's buffer."""
        assert not self.level
        first, slots = self.buffer.storage_offset(), self.layout.slots
        return {s.name: self.buffer.as_strided(s.shape, s.strides, first + s.start) for s in slots}

    def copy_(self, other: Slice, level: int) -> None:
        """Copy this rank's slice of a level, which both hold, from another buffer of any dtype."""
        for rows, given in zip(self.rows(level, 1), other.rows(level, 1), strict=True):
            rows.copy_(given)

    def clear_padding(self) -> None:
        """Make padding zero again, after messages whose codec mixes it with values (kernels/hadamard.py)."""
        clear(self.gaps)

    @cached_property
    def gaps(self) -> list[torch.Tensor]:
        """The padding."""
        return [self.buffer[low:high] for low, high in self.layout.gaps(self.level)]


def clear(gaps: list[torch.Tensor]) -> None:
    """Make these views zero in one operation."""
    if gaps:
        torch._foreach_zero_(gaps)
