"""The line at the start: the format of every hop, and the memory that the patch keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2_patch.group import Group
from megazero.log.units import human_bytes
from megazero.patches.names import release
from megazero.patches.report import gradient_words, short, weight_words

GRAD_DTYPE_FOLLOWS_PARAMETER = (2, 15)  # from here on reduce_dtype=None means the parameter's own dtype


def start_line(groups: Sequence[Group]) -> str:
    """Return the line of the groups, which are gathered by meshes and dtypes."""
    kinds: dict[tuple, list[Group]] = {}
    for group in groups:
        shards = group.shard_group.size() if group.replicas else 0
        kinds.setdefault((group.hops.ranks, shards, *_dtypes(group)), []).append(group)
    return f"fsdp2_patch on torch {torch.__version__}: " + ". ".join(map(_kind, kinds.values()))


def _dtypes(group: Group) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of gathered parameters and of reductions."""
    parameter = next((p for p in group.params if p.sharded_param.requires_grad), group.params[0])
    policy, own = parameter.mp_policy, parameter.sharded_param.dtype
    follows = release(torch.__version__) >= GRAD_DTYPE_FOLLOWS_PARAMETER
    usual = own if follows else policy.param_dtype or own
    return policy.param_dtype or own, policy.reduce_dtype or usual


def _kind(groups: list[Group]) -> str:
    hops, codecs = groups[0].hops, groups[0].codecs
    gathered, reduced = _dtypes(groups[0])
    shard = sum(group.shard_numel for group in groups)
    nodes, gradients = hops.inter.size, gradient_words([reduced], hops, codecs)
    how_many = f"{len(groups)} groups of {sum(len(group.params) for group in groups)} parameters"
    if not codecs.exact:
        exact = sum(id(p) in group.exact for group in groups for p in group.params)
        how_many += f" ({exact} of them exact, being small or replicated)"
    if groups[0].replicas:
        ranks = groups[0].shard_group.size()
        return (
            f"{how_many} on a 2-D mesh of {nodes} replicas x {ranks}: gradients {short(reduced)} by FSDP2 inside a "
            f"node, {gradients}, there and back; weights stay inside the node"
        )
    weights = f"exact {short(gathered)}" if codecs.weights is None else weight_words(gathered, codecs)
    kept = human_bytes(nodes * _kept_bytes(groups, gathered))
    return (
        f"{how_many} on a 1-D mesh of {len(hops.ranks)} ranks = {nodes} nodes x {hops.intra.size}: gradients "
        f"{gradients}, once per step; weights {weights} across nodes, once per step. A rank keeps {kept} of weights "
        f"for later gathers inside the node, and {human_bytes(4 * nodes * shard)} of sums if they wait for the last "
        "backward"
    )


def _kept_bytes(groups: list[Group], gathered: torch.dtype) -> int:
    """Return the bytes of one rank's messages, of all groups, as ``KeptAllGather.kept`` has them."""
    total = 0
    for group in groups:
        codec, packing = group.format(group.codecs.weights, group.params, gathered)
        if packing is None:
            total += gathered.itemsize * group.shard_numel
        elif group.codecs.delta:
            total += gathered.itemsize * packing.numel
        else:
            total += codec.message_numel(*(region.numel for region in packing.regions))
    return total
