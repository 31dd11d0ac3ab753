"""The context-parallel view of the data-parallel ranks, which layers are given."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.mesh.grid import INTER, INTRA
from megazero.mesh.mesh import Mesh


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share samples, as one of them sees them: their group, its index, and their number.

    Each holds an equal part of every sequence, contiguous, in the order of the ranks. With ``size`` 1 nothing
    communicates and ``group`` is not looked at.

    near: how many of the ranks share a node.
    traffic: It counts the bytes this rank sends, if given.
    waits: It times the waits for other ranks.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    near: int = 1
    traffic: Traffic | None = field(default=None, compare=False, repr=False)
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)

    @classmethod
    def of(cls, mesh: Mesh, traffic: Traffic | None = None, waits: Waits | None = None) -> ContextParallel:
        """Return a mesh's."""
        if mesh.grid.cp == 1:
            return cls()
        axis = mesh.cp
        return cls(axis.gather_group, axis.index, axis.size, mesh.grid.cp_near, traffic, waits or Waits())

    @property
    def link(self) -> str:
        """Return the slowest link that the ranks use."""
        return INTRA if self.near == self.size else INTER

    def count(self, row: int) -> None:
        """Add the bytes that this rank sends if each of the others receives ``row``."""
        if self.traffic is not None:
            self.traffic.add("cp", INTRA, row * (self.near - 1))
            self.traffic.add("cp", INTER, row * (self.size - self.near))

    def own(self, length: int) -> slice:
        """Return the positions of a sequence of ``length`` tokens that this rank holds."""
        share = length // self.size
        assert share * self.size == length, f"{length} tokens over {self.size} ranks: config/rules.py refuses"
        return slice(self.rank * share, (self.rank + 1) * share)
