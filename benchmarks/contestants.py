"""The same decoder, data and optimizer under megazero and under torch's own data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.llama import llama
from megazero import zero
from megazero.config import resolve_shards
from megazero.mesh.mesh import create_mesh
from megazero.models import Decoder, initializer
from megazero.zero.records import held_bytes

ADAMW = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=True)
CLIP = 1.0


@dataclass(frozen=True)
class Shape:
    layers: int = 8
    hidden: int = 256
    ffn: int = 688
    heads: int = 4
    vocabulary: int = 4096
    sequence: int = 256
    micro_batch: int = 8
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def tokens(self) -> int:
        return self.sequence * self.micro_batch * self.micro_batches


Step = Callable[[], torch.Tensor]  # returns this rank's loss per token, detached


def decoder(shape: Shape, device: str = "cpu") -> Decoder:
    config = llama(shape)
    model = Decoder(config, device=device, dtype=shape.dtype)
    if device != "meta":
        model.initialize(1)
    return model


def batches(shape: Shape, device: torch.device) -> list[torch.Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    g = torch.Generator().manual_seed(rank)
    size = (shape.micro_batch, shape.sequence)
    return [
        torch.randint(0, shape.vocabulary, size, generator=g).to(device) for _ in range(shape.micro_batches)
    ]


def ours(
    shards: str | tuple[int, int, int],
    shape: Shape,
    ranks_per_node: int,
    device: torch.device,
    policy: zero.Policy | None = None,
) -> tuple[Step, zero.Engine]:
    """A megazero step of a preset or of (P, G, OS); the engine for its byte counts."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    factors = resolve_shards(shards, world, min(world, ranks_per_node)).factors
    mesh = create_mesh(shards=factors, ranks_per_node=ranks_per_node, device=device)
    model = decoder(shape, "meta")
    engine = zero.shard(
        model,
        mesh=mesh,
        policy=policy,
        units=model.units(),
        optimizer=ADAMW,
        clip_norm=CLIP,
        init=initializer(model, 1),
    )
    data = batches(shape, device)

    def step() -> torch.Tensor:
        engine.begin_step(len(data), divisor=shape.tokens * world)
        total = torch.zeros((), device=device)
        for tokens in data:
            loss = model(tokens, tokens).sum()
            loss.backward()
            total += loss.detach()
        engine.step()
        return total / shape.tokens

    return step, engine


def bare(shape: Shape, device: torch.device) -> Step:
    """One rank of plain torch."""
    return _torch_step(decoder(shape).to(device), shape, device)


def ddp(shape: Shape, device: torch.device) -> Step:
    """DDP at its best: gradients are views of its buckets, one all-reduce a step."""
    return _torch_step(
        DistributedDataParallel(decoder(shape).to(device), gradient_as_bucket_view=True), shape, device
    )


def fsdp2(shape: Shape, device: torch.device, replicas: int = 1) -> Step:
    """fully_shard on every layer and the root; with replicas a 2-D mesh (HSDP)."""
    world = dist.get_world_size()
    dims = (replicas, world // replicas) if replicas > 1 else (world,)
    names = ("replicate", "shard")[-len(dims) :]
    mesh = init_device_mesh(device.type, dims, mesh_dim_names=names)
    model = decoder(shape).to(device)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _torch_step(model, shape, device)


def _torch_step(model: torch.nn.Module, shape: Shape, device: torch.device) -> Step:
    optimizer = ADAMW(model.parameters())
    data = batches(shape, device)

    def step() -> torch.Tensor:
        total = torch.zeros((), device=device)
        for i, tokens in enumerate(data):
            last = i == len(data) - 1
            quiet = (
                model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
            )
            with quiet:
                loss = model(tokens, tokens).sum() / shape.tokens
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def bytes_in_step(preset: str, shape: Shape, ranks_per_node: int, device: torch.device) -> dict[str, int]:
    """What a rank holds between the last backward and the update: where every P copy is present."""
    _, engine = ours(preset, shape, ranks_per_node, device)
    data = batches(shape, device)
    engine.begin_step(len(data))
    for tokens in data:
        engine.module(tokens, tokens).sum().backward()
    for unit in engine.units:
        if unit.levels.p:
            engine.gatherer.release(unit)
    engine.optimizer.ensure_state()
    held = held_bytes(engine)
    engine.step()
    return held
