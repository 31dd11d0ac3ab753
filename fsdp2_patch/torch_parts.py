"""The parts of torch's FSDP2 that the patch stands on, private ones too, and the versions in which they were read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megazero.patches.names import Needed, check_version

KNOWN = ((2, 11), (2, 15))  # the first and the last version that were read
FSDP = "torch.distributed.fsdp"
GROUP = f"{FSDP}._fully_shard._fsdp_param_group"
STATE = f"{FSDP}._fully_shard._fsdp_state"
COLLECTIVES = f"{FSDP}._fully_shard._fsdp_collectives"
NEEDED: Needed = {
    FSDP: {
        "FSDPModule.unshard": ("self", "async_op"),
        "FSDPModule._get_fsdp_state": ("self",),
    },
    GROUP: {
        "foreach_reduce": (
            "fsdp_params",
            "reduce_scatter_comm",
            "gradient_divide_factor",
            "all_reduce_group",
            "all_reduce_grads",
            "all_reduce_hook",
        ),
    },
    STATE: {"FSDPState._root_pre_forward": ("self", "module", "args", "kwargs")},
    COLLECTIVES: {"dist.all_reduce": ("tensor", "op", "group")},
}
GROUPS_OWN = (
    "fsdp_params",
    "mesh_info",
    "post_forward_mesh_info",
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "_all_reduce_hook",
)
PARAMETERS_OWN = ("sharded_param", "padded_sharded_param_size", "mp_policy", "mesh_info", "_orig_size")


def check_torch() -> None:
    """Raise ConfigError for a version of torch that was not tried, or in which a name or a parameter is missing."""
    check_version("fsdp2_patch", "torch", torch.__version__, KNOWN, NEEDED, newer=False)


def param_groups(model: nn.Module) -> list[tuple[str, list[Any]]]:
    """Return the name of each module of ``fully_shard``, and torch's FSDPParamGroups of it, one for each mesh.

    Modules that were given to one call together share their groups; the first one is named.
    """
    states: dict[Any, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            states.setdefault(module._get_fsdp_state(), name or "the model")
    return [(name, groups_of(state)) for state, name in states.items()]


def groups_of(state: Any) -> list[Any]:
    """Return torch's FSDPParamGroups of a module's state. In torch 2.11 a module has one mesh, so at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def lacking_parts(groups: list[Any]) -> list[str]:
    """Return the attributes that torch's groups and their parameters should have and have not."""
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    return [
        f"{type(owner).__name__}.{name}"
        for owners, names in ((groups, GROUPS_OWN), (parameters, PARAMETERS_OWN))
        for owner in owners[:1]
        for name in names
        if not hasattr(owner, name)
    ]


def own_ranks(parameter: Any) -> frozenset[int]:
    """Return the ranks among which an FSDPParam is data-parallel or split: no other rank holds the same of it."""
    mesh, split = parameter.sharded_param.device_mesh, set(_split_dims(parameter))
    own = [_is_data_parallel(parameter, dim) or dim in split for dim in range(mesh.ndim)]
    return _ranks(mesh, own)


def split_ranks(parameter: Any) -> list[frozenset[int]]:
    """Return the ranks of each dimension that splits an FSDPParam and is not data-parallel (tensor, expert)."""
    mesh = parameter.sharded_param.device_mesh
    return [_ranks(mesh, [d == dim for d in range(mesh.ndim)]) for dim in _split_dims(parameter)]


def _split_dims(parameter: Any) -> list[int]:
    sharded = parameter.sharded_param
    return [
        dim
        for dim, placement in enumerate(sharded.placements)
        if placement.is_shard()
        and sharded.device_mesh.size(dim) > 1
        and not _is_data_parallel(parameter, dim)
    ]


def _is_data_parallel(parameter: Any, dim: int) -> bool:
    """Whether a dimension of a parameter's mesh is one over which FSDP2 shards or replicates it."""
    info, names = parameter.mesh_info, parameter.sharded_param.device_mesh.mesh_dim_names
    if names is None:  # the mesh is fully_shard's own
        return True
    own, dims = set(info.mesh.mesh_dim_names or ()), getattr(info, "dp_mesh_dims", None)
    if dims is not None:  # parameters on one mesh of all dimensions, of which fully_shard was told its own
        own |= {*dims.shard_names, *dims.replicate_names}
    return names[dim] in own


def _ranks(mesh: Any, free: list[bool]) -> frozenset[int]:
    """Return the ranks that differ from this one in the free dimensions of a mesh alone."""
    place = tuple(slice(None) if f else at for f, at in zip(free, mesh.get_coordinate(), strict=True))
    return frozenset(mesh.mesh[place].flatten().tolist())
