"""Which modules the engine takes. Those it would damage are refused by name before anything is changed."""

from __future__ import annotations

import torch
from torch import nn

TRAINED = (torch.bfloat16, torch.float32, torch.float64)
SCALED = (*TRAINED, torch.float16)  # where losses are scaled: gradients in fp16 become zero otherwise
# Of frozen parameters: what fp32 holds exactly and every backend sends.
FROZEN = (*SCALED, torch.uint8, torch.int8, torch.bool)


def refuse_unfit(module: nn.Module, dtype: torch.dtype | None, loss_scaled: bool = False) -> None:
    """Raise ValueError for modules, and for dtypes of parameters, that training would damage.

    dtype: ``Policy.dtype``, which floating-point parameters are converted to. loss_scaled: ``Policy.loss_scaled``.
    """
    for name, param in module.named_parameters():
        _refuse_dtype(name, param, dtype, SCALED if loss_scaled else TRAINED)
    for name, inner in module.named_modules():
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.max_norm is not None:
            raise ValueError(
                f"module {name or type(inner).__name__!r}: max_norm={inner.max_norm} writes into the weight in every "
                "forward, past the optimizer's own copy of it: use max_norm=None, and clip rows in the forward"
            )
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.sparse and inner.weight.requires_grad:
            raise ValueError(
                f"module {name or type(inner).__name__!r}: sparse=True gives sparse gradients, and what is reduced "
                "and sharded is dense: use sparse=False"
            )


def _refuse_dtype(
    name: str, param: nn.Parameter, dtype: torch.dtype | None, trained: tuple[torch.dtype, ...]
) -> None:
    legal = trained if param.requires_grad else FROZEN
    converts = dtype is not None and dtype != param.dtype
    if (dtype or param.dtype) in legal and (param.is_floating_point() or not converts):
        return
    kind = "trained" if param.requires_grad else "frozen"
    becomes = f", which Policy(dtype) makes {dtype}" if converts else ""
    if param.is_complex():
        cure = "keep torch.view_as_real of it as the parameter, and torch.view_as_complex in the forward"
    elif not param.is_floating_point():
        cure = "register it as a buffer: it is then left as it is"
    elif param.dtype == torch.float16 or dtype == torch.float16:
        cure = (
            "its gradients need loss scaling; nearest: bfloat16, module.bfloat16() or Policy(dtype=torch.bfloat16), "
            "or losses that you scale and Policy(loss_scaled=True)"
        )
    else:
        cure = "nearest: bfloat16, module.bfloat16() or Policy(dtype=torch.bfloat16)"
    raise ValueError(
        f"parameter {name!r} is {kind} and {param.dtype}{becomes}: {kind} parameters are "
        f"{', '.join(str(d).removeprefix('torch.') for d in legal)}; {cure}"
    )


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
