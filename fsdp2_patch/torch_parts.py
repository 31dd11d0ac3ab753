"""The parts of torch's FSDP2 that the patch stands on, private ones too, and the versions in which they were read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megazero.config.errors import ConfigError
from megazero.patches.names import Needed, missing, release

KNOWN = ((2, 12), (2, 15))  # the first and the last version that were read
FSDP = "torch.distributed.fsdp"
GROUP = f"{FSDP}._fully_shard._fsdp_param_group"
STATE = f"{FSDP}._fully_shard._fsdp_state"
COLLECTIVES = f"{FSDP}._fully_shard._fsdp_collectives"
NEEDED: Needed = {
    FSDP: {
        "FSDPModule.set_custom_all_gather": ("self", "comm"),
        "FSDPModule.set_custom_reduce_scatter": ("self", "comm"),
        "FSDPModule.set_all_reduce_hook": ("self", "hook"),
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
    first, last = (".".join(map(str, version)) for version in KNOWN)
    if not KNOWN[0] <= release(torch.__version__) <= KNOWN[1]:
        raise ConfigError(
            [
                f"fsdp2_patch: torch {torch.__version__} was not tried: it uses private parts; take {first} to {last}"
            ]
        )
    lacking = list(missing(NEEDED))
    if lacking:
        raise ConfigError([f"fsdp2_patch: torch {torch.__version__} lacks {text}" for text in lacking])


def param_groups(model: nn.Module) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the name of each module of ``fully_shard``, the module, and torch's FSDPParamGroups of it.

    Modules that were given to one call together share their groups; the first one is yielded.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if id(state) not in seen:
                seen.add(id(state))
                yield name or "the model", module, state._fsdp_param_groups


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


def other_placements(parameter: Any) -> list[Any]:
    """Return an FSDPParam's placements on the dimensions that are not data-parallel ones (tensor-parallel)."""
    sharded, info = parameter.sharded_param, parameter.mesh_info
    own, dims = set(info.mesh.mesh_dim_names or ()), getattr(info, "dp_mesh_dims", None)
    if dims is not None:  # parameters on one mesh of all dimensions, of which fully_shard was told its own
        own |= {*dims.shard_names, *dims.replicate_names}
    mesh = sharded.device_mesh
    if mesh.mesh_dim_names is None:
        return []
    placed = zip(mesh.mesh_dim_names, range(mesh.ndim), sharded.placements, strict=True)
    return [placement for name, dim, placement in placed if name not in own and mesh.size(dim) > 1]
