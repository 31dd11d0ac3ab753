"""The levels of a cluster: a node, what holds nodes, the whole. Pure arithmetic: no torch, no environment.

Every cluster has two levels, node and cluster. --level-sizes puts others between them: a rack, then a site. Each
level joins the parts of the one below by one class of link, by which bytes, waits, formats and rates are kept apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NODE, CLUSTER = "node", "cluster"
BETWEEN = ("rack", "site")  # the levels between these, the lowest first; this is all that another one takes
INTRA, INTER = "intra_node", "inter_node"  # links that every cluster has: inside a node, and between nodes


@dataclass(frozen=True)
class Level:
    """One level: ``size`` consecutive world ranks. ``link`` is the class of link between its parts."""

    name: str
    size: int
    link: str


def make_levels(world_size: int, ranks_per_node: int, level_sizes: Sequence[int] = ()) -> tuple[Level, ...]:
    """Return the levels of so many ranks, the lowest first. level_sizes: the nodes of each between node and cluster.

    A level may be larger than the world, which then lies in one. Raises ValueError for sizes that do not divide.
    """
    _refuse(world_size // ranks_per_node, level_sizes)
    held = (min(nodes * ranks_per_node, world_size) for nodes in level_sizes)
    names = (NODE, *BETWEEN[: len(level_sizes)], CLUSTER)
    return tuple(map(Level, names, (ranks_per_node, *held, world_size), links_of(len(level_sizes))))


def links_of(between: int = 0) -> tuple[str, ...]:
    """Return the classes of links of a cluster with so many levels between node and cluster, the lowest first."""
    return (INTRA, INTER, *(f"inter_{name}" for name in BETWEEN[:between]))


def _refuse(nodes: int, level_sizes: Sequence[int]) -> None:
    """Raise ValueError, which names the nearest legal size, where levels do not hold whole ones of those below."""
    given, below = f"--level-sizes {' '.join(map(str, level_sizes))}", 1
    if len(level_sizes) > len(BETWEEN):
        raise ValueError(
            f"{given}: at most {len(BETWEEN)} levels ({', '.join(BETWEEN)}) lie between node and cluster"
        )
    for name, size in zip(BETWEEN, level_sizes, strict=False):
        if size % below:
            near = max(1, round(size / below)) * below
            raise ValueError(
                f"{given}: a {name} of {size} nodes does not hold whole parts of {below}; nearest: {near}"
            )
        if nodes % size and size % nodes:
            near = min((k for k in range(1, nodes + 1) if nodes % k == 0), key=lambda k: (abs(k - size), k))
            raise ValueError(f"{given}: {nodes} nodes do not divide into {name}s of {size}; nearest: {near}")
        below = size


def link_between(levels: Sequence[Level], a: int, b: int) -> str:
    """Return the link between two world ranks."""
    return next(level.link for level in levels if a // level.size == b // level.size)


def link_along(levels: Sequence[Level], size: int, stride: int) -> str:
    """Return the slowest link between ``size`` world ranks that are ``stride`` apart, the first of which is also the
    first of a part of the level that holds them."""
    return next(level.link for level in levels if size == 1 or size * stride <= level.size)


def short(link: str) -> str:
    """Return a link as names of axes and of waits have it: 'intra', 'inter', 'inter_rack'."""
    return link.removesuffix("_node")


def across(link: str) -> str:
    """Return in words which links these are: 'inside nodes', 'across nodes', 'across racks'."""
    return "inside nodes" if link == INTRA else f"across {link.removeprefix('inter_')}s"
