"""The context-parallel view of the data-parallel ranks, which layers are given."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.mesh.grid import INTRA
from megazero.mesh.mesh import Mesh


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share samples, as one of them sees them: their group, its index, and their number.

    Each holds ``size``-th of every sequence, contiguous, in the order of the ranks. With ``size`` 1 nothing communicates
    and ``group`` is not looked at.

    link: whether the ranks lie inside a node or across.
    traffic: It counts the bytes this rank sends, if given.
    waits: It times the waits for other ranks.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    link: str = INTRA
    traffic: Traffic | None = field(default=None, compare=False, repr=False)
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)

    @classmethod
    def of(cls, mesh: Mesh, traffic: Traffic | None = None, waits: Waits | None = None) -> ContextParallel:
        """Return a mesh's."""
        if mesh.grid.cp == 1:
            return cls()
        axis = mesh.cp
        return cls(axis.gather_group, axis.index, axis.size, axis.link, traffic, waits or Waits())

    def own(self, length: int) -> slice:
        """Return the positions of a sequence of ``length`` tokens that this rank holds."""
        share = length // self.size
        assert share * self.size == length, f"{length} tokens over {self.size} ranks: config/rules.py refuses"
        return slice(self.rank * share, (self.rank + 1) * share)
