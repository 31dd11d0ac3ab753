"""The ranks that share the experts, as layers are given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from megazero.comm.codec import Blockwise
from megazero.comm.hops import Traffic, start_route
from megazero.comm.timing import Waits
from megazero.mesh.mesh import Axis, Mesh

KIND = "ep"  # of the hops


@dataclass(frozen=True)
class Holders:
    """The ranks along one axis that share experts, as one of them sends rows to them.

    traffic: it counts the bytes that this rank sends. waits: it times the waits for other ranks.
    """

    axis: Axis | None = None
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)

    @property
    def size(self) -> int:
        return self.axis.size if self.axis else 1

    @property
    def index(self) -> int:
        return self.axis.index if self.axis else 0

    def exchange(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], codec: Blockwise | None = None
    ) -> Tensor:
        """Send the first ``sent[0]`` of the rows [n, ...] to rank 0, and so on; return those received, by source.

        received: how many come from each rank. codec: in which rows [n, h] are sent; this rank's own are not rounded.
        Without one rows have any dtype. This waits for the other ranks.
        """
        if codec is None:
            return self._exchanged(rows.contiguous(), sent, received)
        own = self.index
        start, coming = sum(sent[:own]), sum(received[:own])
        kept = rows[start : start + sent[own]]
        leaving = rows.new_empty(len(rows) - len(kept), rows.shape[1])
        leaving[:start], leaving[start:] = rows[:start], rows[start + len(kept) :]
        others = [[n * (i != own) for i, n in enumerate(each)] for each in (sent, received)]
        came = self._exchanged(_encoded(codec, leaving), *others)
        out = rows.new_empty(sum(received), rows.shape[1])
        out[coming : coming + len(kept)] = kept
        for part, messages in (
            (out[:coming], came[:coming]),
            (out[coming + len(kept) :], came[coming:]),
        ):
            if len(part):
                codec.decode(messages, part)
        return out

    def _exchanged(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert self.axis is not None, "these Holders have no process groups: they cannot communicate"
        out, each = rows.new_empty(sum(received), *rows.shape[1:]), prod(rows.shape[1:])
        sizes = [n * each for n in received], [n * each for n in sent]
        work = start_route(self.axis, out.view(-1), rows.view(-1), *sizes, KIND, self.traffic)
        with self.waits(f"exposed_ep_{self.axis.link.removesuffix('_node')}"):
            work.wait()
        return out


ALONE = Holders()


@dataclass(frozen=True)
class ExpertParallel:
    """The ranks that share a layer's experts, as one of them sees them: its index, and their number.

    Each holds an equal share, in the order of the ranks. With ``size`` 1 nothing communicates.

    inside: the ranks of its node. across: those with its place at other nodes that share the experts, too. codec: in
    which rows go to other nodes before experts, and gradients of outputs; None: exactly.
    """

    rank: int = 0
    size: int = 1
    inside: Holders = ALONE
    across: Holders = ALONE
    codec: Blockwise | None = None

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        traffic: Traffic | None = None,
        waits: Waits | None = None,
        codec: Blockwise | None = None,
    ) -> ExpertParallel:
        """Return a mesh's."""
        if mesh.grid.ep == 1:
            return cls()
        traffic, waits = traffic or Traffic(), waits or Waits()
        inside, across = (Holders(axis, traffic, waits) for axis in mesh.ep_axes)
        return cls(mesh.grid.ep_axis.index(mesh.rank), mesh.grid.ep, inside, across, codec)

    def own(self, experts: int) -> range:
        """Return which of a layer's experts this rank holds."""
        share = experts // self.size
        assert share * self.size == experts, f"{experts} experts over {self.size} ranks: mesh/grid.py refuses"
        return range(self.rank * share, (self.rank + 1) * share)


def _encoded(codec: Blockwise, rows: Tensor) -> Tensor:
    """Return messages of rows [n, h], of which there may be none."""
    if len(rows):
        return codec.encode(rows)
    return rows.new_empty(0, codec.message_numel(rows.shape[1])).to(codec.wire_dtype)
