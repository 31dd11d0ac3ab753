"""The rows that one hop moves, and views of them that are made once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from megazero.comm.codec import at_least_fp32
from megazero.kernels.arena import Take

Views = tuple[torch.Tensor, ...]  # one per region of a message: coded, exact


class RowRun(NamedTuple):
    """Neighbouring rows that are encoded in one operation.

    rows: [k, n] of each region. at: their places among all rows. to: the places of their messages.
    """

    rows: Views
    at: slice
    to: slice


class Rows:
    """Rows [size, ...] of each region: row i goes to index i of an axis, and the row at place ``own`` stays.

    ``own`` is this rank's index. If it is another place, the rows of the other ranks are by index around it. A region
    may lie in pieces where its rows are sent as they are. Keep the object where its buffers stay.
    """

    def __init__(self, regions: Sequence[torch.Tensor], own: int) -> None:
        self.regions = tuple(r.flatten(1) if r.is_contiguous() else r for r in regions)
        self.own = own

    @cached_property
    def kept(self) -> Views:
        """The row that stays [n], of each region."""
        return tuple(region[self.own].reshape(-1) for region in self.regions)

    def room(self, take: Take) -> Views:
        """Return buffers from ``take`` for the sums [n] of each region, in at least fp32."""
        return tuple(take(r[0].numel(), at_least_fp32(r.dtype)) for r in self.regions)

    @cached_property
    def every(self) -> tuple[RowRun, ...]:
        """All rows, in one run."""
        all_of_them = slice(0, len(self.regions[0]))
        return (RowRun(self.regions, all_of_them, all_of_them),)

    @cached_property
    def others(self) -> tuple[RowRun, ...]:
        """The rows of other ranks, in two runs at most. Their messages lie side by side."""
        runs = []
        before, after = slice(0, self.own), slice(self.own + 1, len(self.regions[0]))
        for at, to in ((before, before), (after, slice(self.own, after.stop - 1))):
            if at.stop > at.start:
                rows = tuple(region[at] for region in self.regions)
                runs.append(RowRun(rows, at, to))
        return tuple(runs)
