"""What the patch refuses, by name: models, meshes and policies whose messages it cannot carry rightly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from megazero.patches.options import MessageOptions
from megazero.patches.two_hops import ranks_on_a_node

DEFAULTS = {"_all_gather_comm": "DefaultAllGather", "_reduce_scatter_comm": "DefaultReduceScatter"}


def nodes_of(group: dist.ProcessGroup, ranks_per_node: int) -> int:
    """Return on how many nodes a process group has ranks."""
    return len({rank // ranks_per_node for rank in dist.get_process_group_ranks(group)})


def group_problems(name: str, groups: list[Any]) -> Iterator[str]:
    """Say what is wrong with torch's groups of one module, whatever their mesh."""
    if len(groups) > 1:
        yield (
            f"{name} has {len(groups)} parameter groups (shard_placement_fn gave its parameters several meshes), for "
            "which FSDP2 takes no collectives of others: call fully_shard on the modules of each mesh apart"
        )
    for group in groups:
        if not isinstance(group.mesh_info, FSDPMeshInfo):
            yield f"{name} is replicated and not sharded (replicate()): use fully_shard"
            continue
        for attribute, default in DEFAULTS.items():
            comm = type(getattr(group, attribute)).__name__
            if comm != default:
                yield f"{name} has {comm} set, which the patch would replace: leave that out, or the patch"
        if group._all_reduce_hook is not None:
            yield f"{name} has an all-reduce hook, which the patch would replace: leave that out, or the patch"


def mesh_problems(name: str, group: Any, ranks_per_node: int, options: MessageOptions) -> Iterator[str]:
    """Say what is wrong with the mesh of one group on nodes of this size."""
    info, h = group.mesh_info, ranks_per_node
    shards = dist.get_process_group_ranks(info.shard_process_group)
    try:
        on_node = ranks_on_a_node(shards, h)
    except ValueError as error:
        yield f"{name}: {error}"
        return
    if isinstance(info, HSDPMeshInfo):
        replicas = dist.get_process_group_ranks(info.replicate_process_group)
        if on_node < len(shards) or nodes_of(info.replicate_process_group, h) < len(replicas):
            yield (
                f"{name}: a 2-D mesh of {len(replicas)} replicas x {len(shards)} shards does not lie on nodes of {h} "
                f"ranks: each node must hold one replica; nearest: ({len(replicas) * len(shards) // h}, {h}), or a "
                "1-D mesh"
            )
        if options.wire.weights is not None:
            yield (
                f"{name}: weights do not cross nodes on a 2-D mesh (HSDP), so a format for them has no effect: leave "
                "weights='none', or give fully_shard a 1-D mesh"
            )
        if options.wire.gradients_intra is not None:
            yield (
                f"{name}: inside a node a 2-D mesh (HSDP) reduces by FSDP2's own reduce-scatter: leave "
                "gradients_intra_node='none', or give fully_shard a 1-D mesh"
            )
        return
    if options.wire.gradients_intra is not None and on_node == 1:
        yield (
            f"{name}: no node holds two ranks of the mesh, so gradients_intra_node has no effect: leave it out"
        )
    after = group.post_forward_mesh_info
    if after is not None and after is not info and nodes_of(after.shard_process_group, h) > 1:
        yield (
            f"{name}: reshard_after_forward={after.shard_mesh_size} gathers over several nodes of {h} ranks, past "
            f"the patch; nearest: reshard_after_forward={h}, True or False"
        )
