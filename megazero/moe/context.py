"""The ranks that share the experts, as layers are given them."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.comm.codec import Blockwise
from megazero.comm.hops import Traffic
from megazero.comm.peers import Peers
from megazero.comm.timing import Waits
from megazero.mesh.mesh import Mesh
from megazero.products.product import PLAIN, Product

ALONE = Peers()


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that share a layer's experts, as one of them sees them: its index, and their number.

    Each holds an equal share, in the order of the ranks. With ``size`` 1 nothing communicates.

    inside: the ranks of its node. across: those with its place at other nodes that share the experts, too. codec: in
    which rows go to other nodes before experts, and gradients of outputs; None: exactly. product: how the experts
    multiply.
    """

    rank: int = 0
    size: int = 1
    inside: Peers = ALONE
    across: Peers = ALONE
    codec: Blockwise | None = None
    product: Product = PLAIN

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        traffic: Traffic | None = None,
        waits: Waits | None = None,
        codec: Blockwise | None = None,
        product: Product = PLAIN,
    ) -> ExpertParallel:
        """Return a mesh's."""
        if mesh.grid.ep == 1:
            return cls(product=product)
        traffic, waits = traffic or Traffic(), waits or Waits()
        inside, across = (Peers.of(axis, kind="ep", traffic=traffic, waits=waits) for axis in mesh.ep_axes)
        return cls(mesh.grid.ep_axis.index(mesh.rank), mesh.grid.ep, inside, across, codec, product)

    def own(self, experts: int) -> range:
        """Return which of a layer's experts this rank holds."""
        share = experts // self.size
        assert share * self.size == experts, f"{experts} experts over {self.size} ranks: mesh/grid.py refuses"
        return range(self.rank * share, (self.rank + 1) * share)
