"""What a rank of a zeropp run sends to other nodes in a step, by arithmetic alone: it imports nothing of megazero.

A module's parameters lie in one buffer: those that are rounded, then those that are not. Each begins with a block of
its own, and both regions are cut into equal parts of whole blocks, one of every rank that holds the same parameters.
Once a step a rank sends its part of the weights' differences to the ranks of other nodes with the same place, and to
each of these the gradients of that rank's part. A message is codes with a bf16 scale for each block, and then what is
not rounded, weights in 2 bytes and sums of gradients in 4. Both fill up 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

FILL = 16  # bytes


@dataclass(frozen=True)
class Llama:
    """A model of the Llama kind. ffn: the width of the MLP, or of each of the experts, where there are some."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    experts: int = 0

    def modules(self, tp: int, ep: int) -> list[tuple[list[int], bool]]:
        """The elements of the parameters of each module that one rank has, and whether it is apart: experts of
        data-parallel ranks that share them. No tensor-parallel rank has a part of an expert."""
        h, vocabulary = self.hidden, up(self.vocabulary, tp) // tp
        keys = h * max(self.groups, tp) // self.heads // tp
        attention = [h * h // tp, keys * h, keys * h, h * h // tp]
        words, norms = vocabulary * h, [h, h]
        if not self.experts:
            layers = [([*norms, *attention, *3 * [h * self.ffn // tp]], False)]
        else:
            others, experts = [*norms, *attention, self.experts * h], 3 * [self.experts // ep * h * self.ffn]
            layers = [(others, False), (experts, True)] if ep > tp else [(others + experts, False)]
        return [([words], False), *layers * self.layers, ([words, h], False)]


@dataclass(frozen=True)
class Across:
    """ranks: of the world. tp ranks are neighbours of one node, and so are ep ones. exact: parameters of at most so
    many elements are not rounded. block: elements of a scale."""

    model: Llama
    nodes: int
    ranks: int
    tp: int = 1
    ep: int = 1
    exact: int = 16384
    bits: int = 4
    block: int = 64

    def sent(self) -> dict[str, int]:
        """The bytes of one rank, by kind."""
        out = {"refresh": 0, "reduce": 0}
        for parameters, apart in self.model.modules(self.tp, self.ep):
            same = self.ranks // max(self.tp, self.ep if apart else 1)  # ranks that hold the same
            regions = [n for n in parameters if n > self.exact], [n for n in parameters if n <= self.exact]
            rounded, kept = (
                up(sum(up(n, self.block) for n in own), same * self.block) // same for own in regions
            )
            codes = up(rounded * self.bits // 8 + 2 * rounded // self.block, FILL)
            out["refresh"] += (self.nodes - 1) * (codes + up(2 * kept, FILL))
            out["reduce"] += (self.nodes - 1) * (codes + up(4 * kept, FILL))
        return out


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
