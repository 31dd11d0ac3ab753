"""Cut a trainer's data-parallel groups at the node boundary, into an axis inside a node and one across nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megazero.mesh.grid import INTER, INTRA, AxisSpec
from megazero.mesh.launch import Launch, read_launch
from megazero.mesh.mesh import Axis, create_axes, discover_ranks_per_node


@dataclass(frozen=True)
class TwoHops:
    """A data-parallel group: ``inter`` joins the nodes, ``intra`` the group's ranks on one node.

    The trainer gives shard i of a buffer to the i-th rank of the group. Ranks of a node are neighbours in the group,
    so i = (index along inter) * (size of intra) + (index along intra).
    """

    ranks: tuple[int, ...]
    inter: Axis
    intra: Axis

    @property
    def index(self) -> int:
        """Return which of the group's shards is this rank's."""
        return self.inter.index * self.intra.size + self.intra.index

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return the axes that have more than one rank, the inner one first."""
        return tuple(axis for axis in (self.intra, self.inter) if axis.size > 1)


def node_size(override: int | None) -> int:
    """Return the ranks per node, by the launcher's word and the host names, or the override. Collective."""
    launch, world_size = read_launch(), dist.get_world_size()
    if launch.world_size != world_size:  # the ranks were not started by a launcher that says so
        launch = Launch(dist.get_rank(), world_size, None, None)
    size = discover_ranks_per_node(launch, override)
    if world_size % size:
        raise ValueError(
            f"{world_size} ranks do not divide by {size} ranks per node: start as many on each node, or give another "
            "--ranks-per-node"
        )
    return size


def ranks_on_a_node(ranks: Sequence[int], ranks_per_node: int) -> int:
    """Return how many of the group's ranks share a node.

    Raises ValueError where nodes hold different numbers of them, or where ranks of a node are not neighbours.
    """
    nodes = [rank // ranks_per_node for rank in ranks]
    counts = {node: nodes.count(node) for node in nodes}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"data-parallel group {list(ranks)} has {sorted(counts.values())} ranks on its nodes of {ranks_per_node} "
            "ranks: choose parallel sizes so that every node holds equally many ranks of each data-parallel group"
        )
    if nodes != sorted(nodes):
        raise ValueError(
            f"data-parallel group {list(ranks)} goes back to a node of {ranks_per_node} ranks that it has left: "
            "ranks of a node must be neighbours in it"
        )
    return next(iter(counts.values()))


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return how long the group's messages on this device may take; None where its backend does not say."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def cut_groups(
    groups: Mapping[str, Sequence[int]],
    ranks_per_node: int,
    device: torch.device,
    timeout: timedelta | None = None,
) -> dict[tuple[int, ...], TwoHops]:
    """Return the two axes of each group of this rank, by the group's ranks.

    groups: name -> ranks, in the group's order; every rank gives the same names in the same order. Groups of the
    same ranks share their axes. timeout: of what is sent over them; None is torch's default. This is collective over
    all ranks. Raises ValueError on every rank where a group of any rank cannot be cut.
    """
    sizes, problem = dict[str, int](), ""
    try:
        sizes = {name: ranks_on_a_node(ranks, ranks_per_node) for name, ranks in groups.items()}
    except ValueError as error:
        problem = str(error)
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        raise ValueError(next(text for text in problems if text))
    made: dict[tuple[int, ...], str] = {}
    wanted: list[tuple[AxisSpec, Sequence[int]]] = []
    for name, ranks in groups.items():
        twin = (
            made.setdefault(tuple(ranks), name) != name
        )  # its axes are there: places of one rank keep the count
        wanted += _axes(name, [dist.get_rank()] if twin else ranks, 1 if twin else sizes[name])
    axes = {axis.name: axis for axis in create_axes(wanted, device, timeout)}
    return {
        ranks: TwoHops(ranks, axes[f"{name}_inter"], axes[f"{name}_intra"]) for ranks, name in made.items()
    }


def _axes(name: str, ranks: Sequence[int], size: int) -> list[tuple[AxisSpec, Sequence[int]]]:
    node, local = divmod(list(ranks).index(dist.get_rank()), size)
    inside, across = ranks[node * size : (node + 1) * size], ranks[local::size]
    return [
        (AxisSpec(f"{name}_intra", "data", len(inside), 1, INTRA), inside),
        (AxisSpec(f"{name}_inter", "data", len(across), 1, INTER), across),
    ]
