"""Data axes: which axes cut the states of a unit, and which of the ranks with the same states counts.

Every unit has its own. Most units lie on the mesh's data-parallel axes. Others may lie on a part of them, in another
order, or with other factors: an expert that each rank of the innermost axis has for itself, say, is cut by the axes
outside of it alone. One engine takes all of them, because a chain names the axes that it uses (comm/lane.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from megazero.comm.hops import HopSpec, hop_spec
from megazero.comm.made_once import made_once
from megazero.mesh.grid import nearest_chain
from megazero.mesh.mesh import Axis, Mesh
from megazero.zero.plan import Hops, UnitCut


@dataclass(frozen=True, eq=False)  # the units of one engine share the objects: equal is identical
class DataAxes:
    """The data-parallel axes of some units, as this rank sees them. A level is a number of axes (layout.py).

    axes: innermost first.
    p, g, os: how many of them cut the parameters, the accumulated gradients and the optimizer states. g is 0 where
        gradients are whole for the step.
    """

    axes: tuple[Axis, ...]
    p: int
    g: int
    os: int

    @staticmethod
    def of(mesh: Mesh) -> DataAxes:
        """Return the mesh's own data-parallel axes, cut by the mesh's shard factors."""
        return DataAxes.over(mesh.data_axes, mesh.grid.shards)

    @staticmethod
    def of_experts(mesh: Mesh) -> DataAxes:
        """Return the mesh's axes of the ranks that hold the same experts, cut by what is left of its factors."""
        return DataAxes.over(mesh.expert_axes, mesh.grid.expert_shards)

    @staticmethod
    def over(axes: Sequence[Axis], shards: tuple[int, int, int] = (1, 1, 1)) -> DataAxes:
        """Return these axes, innermost first, cut by the factors ``shards`` = (P, G, OS).

        Each factor is a product of the first few sizes: ``mesh.data_axes`` of 2 and 4 ranks take the factors 1, 2
        and 8. The ranks along the other axes hold replicas.
        Raises ValueError for other factors, which names the nearest legal ones, and for an axis that is given twice.
        """
        axes = [axis for axis in axes if axis.size > 1]
        names = [axis.name for axis in axes]
        if len(set(names)) < len(names):
            raise ValueError(
                f"data axes {names} have one twice: give each once, {list(dict.fromkeys(names))}"
            )
        products = list(accumulate((axis.size for axis in axes), mul, initial=1))
        if not set(shards) <= set(products) or list(shards) != sorted(shards):
            nearest = nearest_chain(shards, products)
            raise ValueError(
                f"shard factors P,G,OS = {','.join(map(str, shards))} over axes of {[a.size for a in axes]} ranks: "
                f"each is a product of the first few sizes, {products}, and none is below the one before it; nearest "
                f"legal: {','.join(map(str, nearest))}"
            )
        p, g, os = map(products.index, shards)
        return DataAxes(tuple(axes), p, g, os)

    @property
    def all(self) -> int:
        return len(self.axes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def indices(self) -> tuple[int, ...]:
        return tuple(axis.index for axis in self.axes)

    @cached_property
    def place(self) -> int:
        """The place of this rank's slice among those that all axes cut, in the order of elements (layout.py)."""
        place = 0
        for size, index in zip(self.sizes, self.indices, strict=True):
            place = place * size + index
        return place

    @cached_property
    def shards(self) -> tuple[int, int, int]:
        """P, G and OS: how many ranks share one copy of parameters, of accumulated gradients, of optimizer states."""
        p, g, os = (prod(self.sizes[:level]) for level in (self.p, self.g, self.os))
        return p, g, os

    @cached_property
    def counts(self) -> bool:
        """Whether this rank counts in norms, and saves. Among the ranks that hold one OS slice, only the first along
        every axis does.
        """
        return not any(self.indices[self.os :])

    def axis(self, level: int) -> Axis:
        """Return the axis between level - 1 and ``level``."""
        return self.axes[level - 1]

    @cached_property
    def cut(self) -> UnitCut:
        """How the axes cut a unit."""
        return UnitCut(tuple(axis.spec for axis in self.axes), self.p, self.g, self.os)

    @made_once
    def hop_specs(self, hops: Hops[Any]) -> tuple[HopSpec, ...]:
        """Return the collectives of these hops in their order."""
        return tuple(hop_spec(hop.kind, self.axis(hop.level)) for hop in hops)


def refuse_clashes(mesh: Mesh, every: Iterable[DataAxes]) -> None:
    """Raise ValueError for two axes of one name, by which chains are ordered."""
    known = dict(mesh.axes)
    for each in every:
        for axis in each.axes:
            if known.setdefault(axis.name, axis) is not axis:
                raise ValueError(
                    f"units lie on two axes with the name {axis.name!r}, by which the order of collectives is kept: "
                    f"take the mesh's own, mesh.axes[{axis.name!r}], or make the other with a name of its own"
                )
