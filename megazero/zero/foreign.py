"""Finds modules of other frameworks that ZeRO must not take as they are, by the signs they carry."""

from __future__ import annotations

from torch import nn

# Classes that reduce or shard by themselves: of torch, megatron-core, DeepSpeed and apex. By name: none is imported.
_WRAPPERS = frozenset(
    {
        "DataParallel",
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "TorchFullyShardedDataParallel",
        "FSDPModule",
        "ReplicateModule",
        "DeepSpeedEngine",
    }
)


def refuse_foreign_parallelism(module: nn.Module) -> None:
    """Raise ValueError for another framework's data parallelism or DTensors, and for expert-parallel parameters."""
    for name, inner in module.named_modules():
        wrapper = next((c for c in _class_names(inner) if c in _WRAPPERS), None)
        if wrapper is not None:
            label = f"submodule {name!r}" if name else "the module"
            raise ValueError(
                f"{label} is a {wrapper}, which reduces or shards gradients by itself, and zero.shard would do so a "
                "second time: give zero.shard the plain module (a wrapper's .module; no fully_shard or replicate)"
            )
    for name, param in module.named_parameters():
        if "DTensor" in _class_names(param):
            raise ValueError(
                f"parameter {name!r} is a DTensor, which another framework has sharded: give zero.shard the module "
                "with plain parameters (for tensor parallelism this rank's own part, and create_mesh(tp=...))"
            )
        if getattr(param, "allreduce", True) is False:
            raise ValueError(
                f"parameter {name!r} has allreduce=False, megatron's sign for experts that are split over an "
                "expert-parallel group: data-parallel ranks hold other experts there, and zero.shard would mix them; "
                "build the module with expert_model_parallel_size 1"
            )


def _class_names(x: object) -> list[str]:
    return [c.__name__ for c in type(x).__mro__]
