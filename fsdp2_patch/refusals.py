"""What the patch refuses, by name: models, meshes and policies whose messages it cannot carry rightly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from megazero.mesh.levels import INTRA
from megazero.patches.options import MessageOptions
from megazero.patches.two_hops import ranks_on_a_node

DEFAULTS = {"_all_gather_comm": "DefaultAllGather", "_reduce_scatter_comm": "DefaultReduceScatter"}


def nodes_of(group: dist.ProcessGroup, ranks_per_node: int) -> int:
    """Return on how many nodes a process group has ranks."""
    return len({rank // ranks_per_node for rank in dist.get_process_group_ranks(group)})


def not_sharded(model: nn.Module) -> str:
    """Say what is wrong with a model that has no module of FSDP2's."""
    for kind in (kind for module in model.modules() for kind in type(module).__mro__):
        if "megatron_fsdp" in kind.__module__.split(".") or kind is FullyShardedDataParallel:
            return (
                f"the model was sharded by {kind.__module__}.{kind.__name__}, whose messages the patch leaves: use "
                "torch's fully_shard, or Megatron's distributed optimizer with megatron_core_patch"
            )
    return (
        "no module of the model was given to fully_shard: call enable() behind that (a model whose parameters are "
        "DTensors alone, as a graph trainer makes it, has no messages of FSDP2's)"
    )


def group_problems(name: str, group: Any) -> Iterator[str]:
    """Say what is wrong with one of torch's groups, whatever its mesh."""
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        yield f"{name} is replicated and not sharded (replicate()): use fully_shard"
        return
    for attribute, default in DEFAULTS.items():
        comm = type(getattr(group, attribute)).__name__
        if comm != default:
            yield f"{name} has {comm} set, which the patch would replace: leave that out, or the patch"
    if group._all_reduce_hook is not None:
        yield f"{name} has an all-reduce hook, which the patch would replace: leave that out, or the patch"


def mesh_problems(name: str, group: Any, ranks_per_node: int) -> Iterator[str]:
    """Say what is wrong with the mesh of one group that crosses nodes of this size."""
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
            every = info.mesh.mesh.flatten().tolist()
            own = sum(rank // h == every[0] // h for rank in every)
            yield (
                f"{name}: a 2-D mesh of {len(replicas)} replicas x {len(shards)} shards does not lie on nodes of {h} "
                f"ranks: each node must hold one replica; nearest: ({len(every) // own}, {own}), or a 1-D mesh"
            )
        return
    after = group.post_forward_mesh_info
    if after is not None and after is not info and nodes_of(after.shard_process_group, h) > 1:
        yield (
            f"{name}: reshard_after_forward={after.shard_mesh_size} gathers over several nodes of {h} ranks, past "
            f"the patch; nearest: {f'reshard_after_forward={on_node}, ' * (on_node > 1)}True or False"
        )


def effect_problems(
    groups: Sequence[tuple[str, Any]], ranks_per_node: int, options: MessageOptions
) -> Iterator[str]:
    """Say which formats have no effect on any of the groups that cross nodes: all of a model's, by name."""
    if not groups:
        return
    infos = [group.mesh_info for _, group in groups]
    flat = [info.shard_process_group for info in infos if not isinstance(info, HSDPMeshInfo)]
    where = groups[0][0] if len(groups) == 1 else f"{groups[0][0]} and {len(groups) - 1} more"
    if options.wire.weights is not None and not flat:
        yield (
            f"{where}: weights do not cross nodes on a 2-D mesh (HSDP), so a format for them has no effect: leave "
            "weights='none', or give fully_shard a 1-D mesh"
        )
    if INTRA in options.wire.gradients and not flat:
        yield (
            f"{where}: inside a node a 2-D mesh (HSDP) reduces by FSDP2's own reduce-scatter: leave "
            "gradients_intra_node='none', or give fully_shard a 1-D mesh"
        )
    elif INTRA in options.wire.gradients and all(
        ranks_on_a_node(dist.get_process_group_ranks(group), ranks_per_node) == 1 for group in flat
    ):
        yield f"{where}: no node holds two ranks of a mesh, so gradients_intra_node has no effect: leave it out"
