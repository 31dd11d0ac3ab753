"""Finds the largest layout of the same structure inside a world too large for this machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from megazero.config import RunConfig, World
from megazero.mesh.grid import context_problem, data_cuts


@dataclass(frozen=True)
class SubLayout:
    """The layout that is run.

    shards: the factors P, G and OS. notes: what differs from the configuration, in words; it is empty if nothing
    does. contexts: how many ranks that share samples swap heads, and how many groups of
    these gather keys. ep: the expert-parallel size. level_sizes: the nodes in each level between node and cluster.
    """

    tp: int
    pp: int
    world: World
    shards: tuple[int, int, int]
    notes: tuple[str, ...] = ()
    contexts: tuple[int, int] = (1, 1)
    ep: int = 1
    level_sizes: tuple[int, ...] = ()

    @property
    def cp(self) -> int:
        return self.contexts[0] * self.contexts[1]


def sub_layout(config: RunConfig, world: World, most: int) -> SubLayout:
    """Return the world as it is if it has at most ``most`` ranks, otherwise a smaller one of the same structure.

    The smaller one has as many data-parallel cuts (at P, G, OS and the boundaries of levels), in the same order, each
    the smallest factor apart. Its tensor and pipeline sizes are as large as ``most`` allows.

    Raises ValueError, which names the smallest number of ranks that has the structure.
    """
    parallel, contexts = config.parallel, config.context_levels(world)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    shards = config.shards(world).factors
    if world.world_size <= most:
        ep = parallel.expert_model_parallel_size
        levels = parallel.level_sizes
        return SubLayout(tp, pp, world, shards, contexts=contexts, ep=ep, level_sizes=levels)
    smaller = _smaller_cuts(config, world)
    full = config.data_ranks(world)
    d, *near = (smaller[ranks] for ranks in (config.shard_ranks(world), *full))
    pairs = [(t, p) for t in range(1, tp + 1) if tp % t == 0 for p in range(1, pp + 1)]
    pairs = [(t, p) for t, p in pairs if (t > 1) == (tp > 1) and (p > 1) == (pp > 1)]
    fitting = [(t, p) for t, p in pairs if t * p * d <= most]
    if not fitting:
        least = min(t * p for t, p in pairs) * d
        raise ValueError(
            f"--verify-ranks {most}: the structure of this layout (tensor, pipeline and {len(smaller) - 1} "
            f"data-parallel cuts) takes at least {least} ranks; nearest: {least}"
        )
    # A pipeline of 3 and more has stages in the middle, with neither embedding nor head: rather those than tensors.
    t, p = max(fitting, key=lambda pair: (min(pair[1], 3), pair[0] * pair[1], pair[1]))
    small = World(t * p * d, _node(config, world, t, p, d, near[0]))
    p_, g, os = (smaller[factor] for factor in shards)
    few, ep = _fewer_contexts(contexts, full[0], d, near), 1
    if parallel.expert_model_parallel_size > 1:
        ep = t * smaller[_apart(config)]
    notes = [
        f"sub-layout of {small.world_size} ranks for {world.world_size}, with {d} data-parallel ranks for "
        f"{config.shard_ranks(world)}; every cut of these (P, G, OS, node) is kept"
    ]
    if pp > 2 == p:
        notes.append("the sub-layout's pipeline has no rank between the first and the last")
    apart = t * (p if parallel.use_tp_pp_dp_mapping else 1)  # world ranks between data-parallel neighbours
    levels = tuple(max(1, apart * ranks // small.ranks_per_node) for ranks in near[1:])
    return SubLayout(t, p, small, (p_, g, os), tuple(notes), contexts=few, ep=ep, level_sizes=levels)


def _apart(config: RunConfig) -> int:
    """Return how many data-parallel ranks share the experts: a factor or a multiple of every cut."""
    parallel = config.parallel
    return max(1, parallel.expert_model_parallel_size // parallel.tensor_model_parallel_size)


def _fewer_contexts(contexts: tuple[int, int], node: int, d: int, near: Sequence[int]) -> tuple[int, int]:
    """Return as few ranks that swap heads, and groups that gather keys, inside a node and across, as there are of
    each kind. ``node``: the data-parallel ranks of a node; ``near``: those of the smaller layout, which has d in all.
    """

    def kinds(heads: int, keys: int, node: int) -> tuple[bool, ...]:
        inside = max(1, min(heads * keys, node) // heads)
        return heads > 1, heads > node, inside > 1, keys > inside

    wanted = kinds(*contexts, node)
    legal = [
        (heads, keys)
        for heads, keys in product(range(1, contexts[0] + 1), range(1, contexts[1] + 1))
        if not context_problem(heads * keys, d, near, keys) and (heads * keys > 1) == (contexts != (1, 1))
    ]

    def lost(each: tuple[int, int]) -> tuple[int, int]:
        return sum(a != b for a, b in zip(kinds(*each, near[0]), wanted, strict=True)), each[0] * each[1]

    return min(legal, key=lost)


def _smaller_cuts(config: RunConfig, world: World) -> dict[int, int]:
    """Map each cut of the configuration's data-parallel ranks to the cut of the smaller layout."""
    d, near = config.shard_ranks(world), config.data_ranks(world)
    cuts = sorted({*data_cuts(d, near, config.shards(world).factors), _apart(config)})
    out = {1: 1}
    for low, high in zip(cuts, cuts[1:], strict=False):
        ratio = high // low
        out[high] = out[low] * next(k for k in range(2, ratio + 1) if ratio % k == 0)
    return out


def _node(config: RunConfig, world: World, tp: int, pp: int, d: int, h: int) -> int:
    """Return the ranks of a node. It has as many data-parallel ranks as h says.

    There are several nodes where there were several.
    """
    parallel, nodes = config.parallel, world.world_size // world.ranks_per_node
    if nodes == 1:
        return tp * pp * d
    full_tp, full_pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if parallel.use_tp_pp_dp_mapping:
        inside = world.ranks_per_node >= full_tp * full_pp  # whole pipelines on a node
        return tp * pp * h if inside else tp * max(k for k in range(1, pp) if pp % k == 0)
    # Stages lie outside of the data-parallel ranks: on one node together only where these fill none.
    stages = max(1, world.ranks_per_node // (full_tp * config.shard_ranks(world)))
    together = max(k for k in range(1, pp + 1) if pp % k == 0 and k <= stages and (k < pp or d > h))
    return tp * h * together
