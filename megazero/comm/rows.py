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
    drawn: the element from which noise is drawn for them.
    """

    rows: Views
    at: slice
    to: slice
    drawn: int


class Rows:
    """Rows [size, ...] of each region: row i goes to index i of an axis, and the row at place ``own`` stays.

    ``own`` is this rank's index. If it is another place, the rows of the other ranks are by index around it. A region
    may lie in pieces where its rows are sent as they are. Keep the object where its buffers stay.

    drawn_by_message: noise counts the elements of messages, from which the own row is absent, not those of all rows.
    """

    def __init__(self, regions: Sequence[torch.Tensor], own: int, drawn_by_message: bool = False) -> None:
        self.regions = tuple(r.flatten(1) if r.is_contiguous() else r for r in regions)
        self.own, self.drawn_by_message = own, drawn_by_message

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
        return (RowRun(self.regions, all_of_them, all_of_them, 0),)

    @cached_property
    def others(self) -> tuple[RowRun, ...]:
        """The rows of other ranks, in two runs at most. Their messages lie side by side."""
        runs, n = [], self.regions[0][0].numel()
        before, after = slice(0, self.own), slice(self.own + 1, len(self.regions[0]))
        for at, to in ((before, before), (after, slice(self.own, after.stop - 1))):
            if at.stop > at.start:
                rows = tuple(region[at] for region in self.regions)
                runs.append(RowRun(rows, at, to, (to if self.drawn_by_message else at).start * n))
        return tuple(runs)
