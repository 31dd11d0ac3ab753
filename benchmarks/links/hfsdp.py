"""Megatron's HFSDP as a contestant (megatron-fsdp): parameters and gradients are sharded inside a node, the optimizer
over all ranks. It is written for CUDA. Without a device its streams and events stand still here, and each collective
is waited for where it is issued; nothing else of it is changed.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.harness import device
from benchmarks.steps import CLIP, AdamW, Shape, Step, decoder, torch_step, world_group
from megazero.models.layer import DecoderLayer


@cache
def _package() -> Any:
    """Return the package, in its own right: beside an older megatron-core it takes that one's configuration."""
    with mock.patch.dict(sys.modules, {"megatron.core": None}):
        import megatron_fsdp
    if not torch.cuda.is_available():
        _stand_still()
    return megatron_fsdp


def _stand_still() -> None:
    nothing = lambda *_, **__: None  # noqa: E731
    event = SimpleNamespace(record=nothing, wait=nothing, synchronize=nothing, query=lambda: True)
    stream = SimpleNamespace(wait_stream=nothing, wait_event=nothing, record_event=lambda *_: event)
    cuda: dict[str, Any] = {"Stream": lambda *_, **__: stream, "Event": lambda *_, **__: event}
    cuda |= {
        "current_stream": lambda *_: stream,
        "stream": lambda _: nullcontext(),
        "current_device": lambda: 0,
    }
    cuda |= {"synchronize": nothing, "empty_cache": nothing}
    for name, value in cuda.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = lambda self, *_, **__: self


@cache
def _mesh(
    world: Any, device_type: str, nodes: int, ranks_per_node: int
) -> tuple[DeviceMesh, dist.ProcessGroup]:
    mesh = init_device_mesh(
        device_type, (nodes, ranks_per_node, 1), mesh_dim_names=("across", "inside", "tp")
    )
    return mesh, mesh["across", "inside"]._flatten("all").get_group()


def hfsdp_step(shape: Shape, ranks_per_node: int, outer: str) -> Step:
    """Return a step that crosses nodes once. outer: 'optim' for HFSDP, 'no_shard' for its HSDP.

    Its own optimizer wrapper makes an update without gradients first, which counts as AdamW's first: it is not taken.
    Its master is made of bf16 weights.
    """
    package, where = _package(), device()
    mesh, every = _mesh(world_group(), where.type, dist.get_world_size() // ranks_per_node, ranks_per_node)
    precision = package.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=shape.dtype
    )
    model = package.fully_shard_model(
        decoder(shape),
        device_mesh=mesh,
        dp_shard_dim="inside",
        dp_outer_dim="across",
        tp_dim="tp",
        hybrid_fsdp_group=every,
        fsdp_unit_modules=[DecoderLayer],
        outer_dp_sharding_strategy=outer,
        calculate_per_token_loss=True,  # sums: its HFSDP never divides (0.6.1), and gloo cannot while it adds
        device=where,
        mixed_precision_policy=precision,
        sync_model_each_microbatch=False,
        preproc_state_dict_for_dcp_ckpt=False,
    )

    def clip(held: list[torch.Tensor]) -> torch.Tensor:
        own = [p.grad.to_local() for p in held if p.grad is not None]  # type: ignore[attr-defined]
        torch._foreach_div_(own, dist.get_world_size())
        squared = torch.stack([torch.linalg.vector_norm(g.float()) for g in own]).square().sum()
        dist.all_reduce(squared, group=every if outer == "optim" else mesh["inside"].get_group())
        norm = squared.sqrt()
        torch._foreach_mul_(own, (CLIP / (norm + 1e-6)).clamp(max=1.0))
        return norm

    optimizer = AdamW(model.parameters(), False, clip)

    class Installed:
        def step(self) -> torch.Tensor:
            model.finish_grad_sync()
            norm = optimizer.step()
            model.install_optimized_model_weights()
            model.zero_grad_buffer()
            return norm

    def quiet(last: bool) -> AbstractContextManager:
        model.is_last_microbatch = last
        return nullcontext()

    return torch_step(model, Installed(), shape, where, quiet)
