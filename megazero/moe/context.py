"""The ranks that share the experts, as layers are given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from megazero.comm.hops import Traffic, start_route
from megazero.comm.timing import Waits
from megazero.mesh.mesh import Axis, Mesh

KIND = "ep"  # of the hops


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that share a layer's experts, as one of them sees them: their axis, its index, and their number.

    Each holds an equal share, in the order of the ranks. With ``size`` 1 nothing communicates, and ``axis`` is not
    looked at. traffic: it counts the bytes that this rank sends. waits: it times the waits for other ranks.
    """

    axis: Axis | None = None
    rank: int = 0
    size: int = 1
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)

    @classmethod
    def of(cls, mesh: Mesh, traffic: Traffic | None = None, waits: Waits | None = None) -> ExpertParallel:
        """Return a mesh's."""
        if mesh.grid.ep == 1:
            return cls()
        return cls(mesh.ep, mesh.ep.index, mesh.ep.size, traffic or Traffic(), waits or Waits())

    def own(self, experts: int) -> range:
        """Return which of a layer's experts this rank holds."""
        share = experts // self.size
        assert share * self.size == experts, f"{experts} experts over {self.size} ranks: mesh/grid.py refuses"
        return range(self.rank * share, (self.rank + 1) * share)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first ``sent[0]`` of the rows [n, ...] to rank 0, and so on; return those received, by source.

        received: how many come from each rank. Rows have any dtype. This waits for the other ranks.
        """
        assert self.axis is not None, "this ExpertParallel has no process groups: it cannot communicate"
        out, each = rows.new_empty(sum(received), *rows.shape[1:]), prod(rows.shape[1:])
        sizes = [n * each for n in received], [n * each for n in sent]
        own = rows.contiguous().view(-1)
        work = start_route(self.axis, out.view(-1), own, *sizes, KIND, self.traffic)
        with self.waits("exposed_ep_intra"):
            work.wait()
        return out
