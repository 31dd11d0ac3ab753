"""The names of megatron-core that the patch replaces, and in which versions they are known to mean the same."""

from __future__ import annotations

import importlib

from megazero.patches.names import Needed, check_version

KNOWN = ((0, 13), (0, 19))  # the first and the last version that were tried
CORE = "megatron.core"
BUFFER = f"{CORE}.distributed.param_and_grad_buffer"
FINALIZE = f"{CORE}.distributed.finalize_model_grads"
DDP = f"{CORE}.distributed.distributed_data_parallel"
BASE = f"{CORE}.distributed.data_parallel_base"
OPTIMIZER = f"{CORE}.optimizer.distrib_optimizer"
STATE = f"{CORE}.parallel_state"
# Wrappers with communication of their own, which build it before they call _BaseDataParallel.
WRAPPERS = f"{CORE}.distributed"
OTHER_WRAPPERS = ("FullyShardedDataParallel", "TorchFullyShardedDataParallel")
# Megatron-FSDP inside megatron-core and as a package of its own: module -> what a model becomes, its first version's
# and (from 0.6 of the package on) its second one's.
MEGATRON_FSDP = {
    f"{package}.{module}": name
    for package in (f"{CORE}.distributed.fsdp.src.megatron_fsdp", "megatron_fsdp")
    for module, name in (("megatron_fsdp", "MegatronFSDP"), ("experimental.module", "FsdpModule"))
}
LAYER_WISE = f"{CORE}.optimizer.layer_wise_optimizer", "LayerWiseDistributedOptimizer"

# A name without parameters is called by Megatron alone.
NEEDED: Needed = {
    BUFFER: {
        "_coalescing_manager": None,
        "dist_all_gather_func": None,
        "dist_reduce_scatter_func": None,
        "_ParamAndGradBucketGroup.start_param_sync": ("self", "force_sync"),
        "_ParamAndGradBucketGroup.finish_param_sync": ("self",),
        "_ParamAndGradBucketGroup.start_grad_sync": ("self",),
        "_ParamAndGradBucketGroup.register_grad_ready": ("self", "param"),
    },
    FINALIZE: {
        "_unshard_if_dtensor": ("tensor",),
        "_reshard_if_dtensor": ("tensor_to_shard", "reference_tensor"),
        "_allreduce_word_embedding_grads": ("model",),
    },
    DDP: {"DistributedDataParallel.__init__": ("self", "config", "ddp_config", "module")},
    BASE: {"_BaseDataParallel.__init__": ("self", "config", "module")},
    OPTIMIZER: {
        "DistributedOptimizer.__init__": ("self", "config"),
        "DistributedOptimizer.step_with_ready_grads": ("self",),
        "DistributedOptimizer.load_state_dict": ("self", "state_dict"),
    },
}


def check_names() -> tuple[str, list[str]]:
    """Return megatron-core's version, and notes for the user on a version that was not tried.

    Raises ValueError where there is none, or as ``check_version``; then nothing may be patched.
    """
    try:
        version = str(importlib.import_module(CORE).__version__)
    except ImportError as error:
        raise ValueError(
            f"megatron_core_patch needs megatron-core, which cannot be imported: {error}"
        ) from error
    return version, check_version("megatron_core_patch", "megatron-core", version, KNOWN, NEEDED, newer=True)


def exists(module: str, name: str) -> bool:
    """Whether an optional part of Megatron's can be imported and has this name."""
    try:
        return hasattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):  # it is not there, or not for this torch
        return False
