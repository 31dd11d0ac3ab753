"""Cut a trainer's data-parallel groups at the node boundary, into an axis inside a node and one across nodes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megazero.mesh.grid import AxisSpec
from megazero.mesh.launch import Launch, read_launch
from megazero.mesh.levels import INTER, INTRA
from megazero.mesh.mesh import Axis, GroupSettings, create_axes, discover_ranks_per_node
from megazero.mesh.objects import gather_objects

# What Megatron-LM's nccl_communicator_config_path sets of a communicator, beside the priority of its stream.
NCCL_CONFIG = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")


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
    """Return the ranks per node: the override, or what launcher and host names say. Collective."""
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


# The axes cut under each default process group, in order, with what they were cut from. The list lives as long as
# that group, and the next patch reuses it: torch names groups by their number, so the name of a destroyed one would
# be given again.
_cuts: WeakKeyDictionary[Any, list[tuple[Hashable, dict[tuple[int, ...], TwoHops]]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class NcclOptions:
    """How a communicator of NCCL is made. A call makes new options of torch's, which torch writes into."""

    timeout: timedelta
    high_priority: bool
    config: tuple[tuple[str, Any], ...]

    def __call__(self) -> Any:
        made = dist.ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        made._timeout = self.timeout
        for name, value in self.config:
            setattr(made.config, name, value)
        return made


def settings_like(group: dist.ProcessGroup, device: torch.device) -> GroupSettings:
    """Return how the group's communicator on this device was made: timeout, and NCCL's stream and configuration."""
    given = getattr(group._get_backend(device), "options", None)
    timeout, nccl = getattr(given, "_timeout", None), getattr(dist, "ProcessGroupNCCL", None)
    if given is None or nccl is None or not isinstance(given, nccl.Options):
        return GroupSettings(timeout)
    config = ((name, getattr(given.config, name, None)) for name in NCCL_CONFIG)
    said = tuple((name, value) for name, value in config if value is not None)
    return GroupSettings(timeout, NcclOptions(given._timeout, given.is_high_priority_stream, said))


def cut_groups(
    groups: Mapping[str, Sequence[int]],
    ranks_per_node: int,
    device: torch.device,
    settings: Mapping[str, GroupSettings],
) -> dict[tuple[int, ...], TwoHops]:
    """Return the two axes of each group of this rank, by the group's ranks.

    groups: name -> ranks, in the group's order; every rank gives the same names in the same order. Groups of the
    same ranks share their axes. settings: how their communicators are made, by name; a group without settings has
    torch's defaults. If every rank has cut the same groups before, under this default group, the same axes are
    returned. This is collective over all ranks. Raises ValueError on every rank if any rank's group cannot be cut.
    """
    cuts = _cuts.setdefault(dist.distributed_c10d._get_default_group(), [])
    wanted = tuple((name, tuple(ranks), settings.get(name)) for name, ranks in groups.items())
    made_of = wanted, ranks_per_node, device
    same = {number for number, (other, _) in enumerate(cuts) if other == made_of}
    sizes, problem = dict[str, int](), ""
    try:
        sizes = {name: ranks_on_a_node(ranks, ranks_per_node) for name, ranks in groups.items()}
    except ValueError as error:
        problem = str(error)
    every = gather_objects((problem, same))
    if problem := next((text for text, _ in every if text), ""):
        raise ValueError(problem)
    if common := set.intersection(*(numbers for _, numbers in every)):
        return cuts[max(common)][1]
    hops = _make_hops(groups, sizes, device, settings)
    cuts.append((made_of, hops))
    return hops


def _make_hops(
    groups: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
    device: torch.device,
    settings: Mapping[str, GroupSettings],
) -> dict[tuple[int, ...], TwoHops]:
    """Make the communicators of groups that have so many ranks on a node, by name. Collective over all ranks."""
    made: dict[tuple[int, ...], str] = {}
    wanted: list[tuple[AxisSpec, Sequence[int], GroupSettings]] = []
    for name, ranks in groups.items():
        # A group of the same ranks already has its axes. Groups of one rank keep the number equal on every rank.
        twin = made.setdefault(tuple(ranks), name) != name
        how = settings.get(name, GroupSettings())
        wanted += [
            (spec, inside, how)
            for spec, inside in _axes(name, [dist.get_rank()] if twin else ranks, 1 if twin else sizes[name])
        ]
    axes = {axis.name: axis for axis in create_axes(wanted, device)}
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
