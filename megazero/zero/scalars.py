"""The one exchange of a step, by columns: its parts write numbers, ranks exchange them, its parts read them.

Between the last backward and the update every rank sends one row of fp64 numbers to all others. A part of the step
(``StepPart``) has some columns of it. The engine knows no part's numbers: it lets all write, exchanges the rows, lets
all read, and tells all whether the update was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch

from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.mesh.levels import short
from megazero.mesh.mesh import Mesh
from megazero.mesh.waiting import waiting

Sums = tuple[float, ...]
Rows = tuple[Sums, ...]
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class StepInfo:
    """grad_norm: global norm of the divided gradients before clipping. skipped: it was not finite.

    sampled: the name of the unit whose rounding was measured. errors: ||sent - exact|| / ||exact|| over all ranks
        of its 'weights' and 'gradients', each only if it was sent quantised. zeroed: the share of the elements in its
        messages of gradients, over all ranks, that are not 0 and arrive as 0 (padding is 0); None if none was sent
        quantised. An element that lives on in a later message counts, too, so this bounds from above the share of
        dead ones, which arrive as 0 in every message. A transform leaves few.
    """

    grad_norm: float
    skipped: bool
    sampled: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    zeroed: float | None = None


class StepPart:
    """Takes part in every step of an engine. Each method is called on every rank alike; the defaults do nothing.

    columns: how many numbers it has in every rank's row. summed: how many of them, the first ones, are added up over
    the ranks.
    """

    columns: int = 0
    summed: int = 0

    def write(self, row: torch.Tensor) -> None:
        """Write this rank's numbers to ``row``, fp64 [columns] on the device. Every gradient's sum is there."""

    def read(self, rows: Rows, sums: Sums) -> Mapping[str, Any]:
        """Read the numbers of all ranks before the update. Return this part's fields of StepInfo.

        rows: [columns] by rank. sums: [summed]. May raise, on every rank.
        """
        return NOTHING

    def updated(self, made: bool) -> None:
        """Note the end of a step. made: the master weights were updated; else the step was skipped."""

    def aborted(self) -> None:
        """Note that the open step was given up. Its gradients are discarded."""

    def state(self) -> dict[str, Any]:
        """Return its entries of ``Engine.state``, in JSON types."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore its entries of ``Engine.state``, after the weights were loaded."""


class StepScalars:
    """Exchanges the rows of a step's parts. Its tensors are used in every step.

    This is the one exchange of scalars in a step, and the one place where the host waits for the device in it.
    hop: the name of the waits in the exchange. row: this rank's, fp64 [k].
    """

    def __init__(self, mesh: Mesh, waits: Waits, parts: Sequence[StepPart]) -> None:
        self.mesh, self.waits, self.parts = mesh, waits, parts
        self.hop = f"exposed_scalar_{short(mesh.grid.link(0, mesh.world_size - 1))}"
        self.counts: list[int] | None = None

    def write(self) -> None:
        """Let the parts write this rank's row."""
        if self.counts != [part.columns for part in self.parts]:
            self._make()
        for part, own in zip(self.parts, self.own, strict=True):
            part.write(own)

    def _make(self) -> None:
        """Make the tensors for rows with the parts' columns, and behind them their sums."""
        self.counts = [part.columns for part in self.parts]
        world, k = self.mesh.world_size, sum(self.counts)
        starts = accumulate(self.counts, initial=0)
        self.places = [slice(at, at + n) for at, n in zip(starts, self.counts, strict=False)]
        self.received = torch.zeros(world + 1, k, dtype=torch.float64, device=self.mesh.device)
        self.rows, self.sums = self.received[:world], self.received[world]
        self.row = torch.zeros(k, dtype=torch.float64, device=self.mesh.device)
        self.own = self.row.split(self.counts)

    def exchange(self, traffic: Traffic) -> None:
        """Exchange the rows, and add up the columns that are summed. On CUDA this is only enqueued."""
        with self.waits(self.hop):
            self.mesh.gather_rows(self.row, self.rows)
        for link, rows in self.mesh.grid.rows_sent.items():
            if rows:
                traffic.add("scalar", link, rows * self.row.nbytes)
        summed = [
            slice(place.start, place.start + part.summed)
            for part, place in zip(self.parts, self.places, strict=True)
            if part.summed
        ]
        for columns in summed:
            torch.sum(self.rows[:, columns], 0, out=self.sums[columns])

    def read(self) -> dict[str, Any]:
        """Let the parts read the rows. Return the fields of StepInfo."""
        with waiting:  # on CUDA for all that the step has enqueued
            received = self.received.tolist()
        found: dict[str, Any] = {}
        for part, place in zip(self.parts, self.places, strict=True):
            every = tuple(tuple(row[place]) for row in received)
            found.update(part.read(every[:-1], every[-1][: part.summed]))
        return found
