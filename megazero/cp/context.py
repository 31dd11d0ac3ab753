"""The context-parallel view of the data-parallel ranks, which layers are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.comm.codec import Blockwise, codec_of
from megazero.comm.hops import Traffic
from megazero.comm.peers import Observer, Peers
from megazero.comm.timing import Waits
from megazero.comm.wire import Coding
from megazero.mesh.grid import own_spans
from megazero.mesh.mesh import Mesh


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share samples, as one of them sees them. Each holds an equal part of every sequence.

    heads: Those that swap heads for sequence; together they have the chunks of a sequence that ``own_spans`` gives
        their group, cut in their order. With one group that is the sequence.
    keys: Those of other groups with the same heads, on this rank's node and then across nodes, which gather keys and
        values. A group's number is that across nodes, then that on the node.
    codec: The format of keys and values that are gathered across nodes; None sends them as they are.
    observers: They are called after each such gather.
    """

    heads: Peers = Peers()
    keys: tuple[Peers, Peers] = (Peers(), Peers())
    codec: Blockwise | None = None
    observers: list[Observer] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        traffic: Traffic | None = None,
        waits: Waits | None = None,
        coding: Coding | None = None,
        seed: int = 0,
    ) -> ContextParallel:
        """Return a mesh's. coding, seed: of keys and values across nodes, and of their transform's signs."""
        if mesh.grid.cp == 1:
            return cls()
        known = {"kind": "cp", "traffic": traffic or Traffic(), "waits": waits or Waits()}
        heads, *keys = (Peers.of(a, **known, others=mesh.grid.others(a.spec)) for a in mesh.cp_axes)
        codec = codec_of(coding, seed=seed)
        assert codec is None or isinstance(codec, Blockwise)
        return cls(heads, (keys[0], keys[1]), codec)

    @property
    def groups(self) -> int:
        """Return how many groups gather each other's keys and values."""
        return self.keys[0].size * self.keys[1].size

    @property
    def group(self) -> int:
        inside, across = self.keys
        return across.rank * inside.size + inside.rank

    @property
    def size(self) -> int:
        return self.heads.size * self.groups

    @property
    def rank(self) -> int:
        return self.group * self.heads.size + self.heads.rank

    def own(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the tokens of this rank of a tensor that has those of whole sequences along ``dim``. Where they lie
        together it is a view.
        """
        return _taken(x, own_spans(x.shape[dim], self.rank, self.heads.size, self.groups), dim)

    def own_queries(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return in the same way the tokens whose queries this rank has between the swaps: its group's."""
        return _taken(x, self.queries(x.shape[dim]), dim)

    def queries(self, length: int) -> list[range]:
        """Return the positions of these queries in a sequence of ``length`` tokens, in their order."""
        return own_spans(length, self.group, 1, self.groups)


def _taken(x: Tensor, spans: Sequence[range], dim: int) -> Tensor:
    parts = [x.narrow(dim, span.start, len(span)) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
