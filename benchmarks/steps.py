"""A training step of one decoder on the same data, by megazero's engine and by plain torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Taken
from megazero import zero
from megazero.config import RunConfig, resolve_shards
from megazero.config.layout.wire import Wire, asked_for
from megazero.config.options.sections import ZeroConfig
from megazero.mesh.mesh import Mesh, create_mesh
from megazero.models import Decoder, ModelConfig, initializer, make_model
from megazero.models.compilation import compile_decoder
from megazero.moe import ExpertParallel
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder, units_of

ADAMW = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=True)
CLIP = 1.0


def llama(sizes: Any) -> ModelConfig:
    """Return the model section of a Llama. sizes: has layers, hidden, ffn, heads, vocabulary and sequence, the
    longest.
    If it has experts, each is as wide as ffn, and a token goes to ``topk``. more: options of another family."""
    count, topk = getattr(sizes, "experts", 0), getattr(sizes, "topk", 2)
    experts = (
        {"num_experts": count, "moe_ffn_hidden_size": sizes.ffn, "moe_router_topk": topk} if count else {}
    )
    own = {name: value for name, value in options_of(sizes).items() if name != "seq_length"}
    longest = {"max_position_embeddings": sizes.sequence}
    return make_model(**{**own, **experts, **longest, **getattr(sizes, "more", {})})


def options_of(sizes: Any) -> dict[str, Any]:
    """Return a run's options for ``llama``'s model, with sequences of its longest length."""
    return {
        "model_family": "llama",
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "vocab_size": sizes.vocabulary,
        "seq_length": sizes.sequence,
    }


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
    experts: int = 0
    topk: int = 2
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.sequence * self.micro_batch * self.micro_batches


Step = Callable[[], Taken]  # its loss is per token


def decoder(shape: Shape, device: str = "cpu", ep: ExpertParallel | None = None) -> Decoder:
    config = llama(shape)
    model = Decoder(config, ep=ep, device=device, dtype=shape.dtype)
    if device != "meta":
        model.initialize(1)
    return model


def batches(shape: Shape, device: torch.device, rank: int | None = None) -> list[torch.Tensor]:
    """Return the micro-batches of a rank, by default this one."""
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    g = torch.Generator().manual_seed(rank)
    size = (shape.micro_batch, shape.sequence)
    return [
        torch.randint(0, shape.vocabulary, size, generator=g).to(device) for _ in range(shape.micro_batches)
    ]


def world_group() -> Any:
    """Return the default process group, or None. Kept meshes belong to it."""
    return dist.group.WORLD if dist.is_initialized() else None


def shared_mesh(
    factors: tuple[int, int, int], ranks_per_node: int, device: torch.device, ep: int = 1
) -> Mesh:
    """Return the mesh of (P, G, OS), in which ``ep`` ranks share experts. All
    contestants with these factors share it.

    Every communicator of gloo has a thread that wakes 100 times a second: with 68 of them on each of 4 ranks, steps
    on 2 cores took up to a third longer.
    """
    return _kept_mesh(world_group(), factors, ranks_per_node, device, ep)


@cache
def _kept_mesh(
    world: Any, factors: tuple[int, int, int], ranks_per_node: int, device: torch.device, ep: int
) -> Mesh:
    return create_mesh(shards=factors, ranks_per_node=ranks_per_node, device=device, ep=ep)


def ours(
    shards: str | tuple[int, int, int],
    shape: Shape,
    ranks_per_node: int,
    device: torch.device,
    policy: zero.Policy | None = None,
    joined: int = 1,
    ep: int = 1,
) -> tuple[Step, zero.Engine]:
    """Return a megazero step of a preset or of (P, G, OS), and its engine, which counts bytes. joined: layers of a
    unit. ep: ranks that share experts."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    factors = resolve_shards(shards, world, (min(world, ranks_per_node),)).factors
    mesh = shared_mesh(factors, ranks_per_node, device, ep)
    made = engine_step(shape, mesh, policy=policy, joined=joined)
    mesh.release()  # for the next contestant: they take turns, so theirs are never collectives of two engines at once
    return made


def engine_step(
    shape: Shape,
    mesh: Mesh,
    *,
    policy: zero.Policy | None = None,
    joined: int = 1,
    recompute: str = "none",
    compiled: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
    init: Callable[[Decoder], Callable[[str], torch.Tensor]] = lambda model: initializer(model, 1),
    **more: Any,
) -> tuple[Step, zero.Engine]:
    """Return a step of the engine on ``mesh``, and the engine.

    compiled: as with --compile. init: makes initial values by name. more: further arguments of ``zero.shard``.
    """
    model = Decoder(
        llama(shape), ep=ExpertParallel.of(mesh), recompute=recompute, device="meta", dtype=shape.dtype
    )
    if compiled:
        compile_decoder(model, compile_backend(mesh.device))
    units = units_of(model, joined, mesh)
    engine = zero.shard(
        model,
        mesh=mesh,
        policy=policy,
        units=units,
        optimizer=optimizer,
        clip_norm=CLIP,
        init=init(model),
        **more,
    )
    data = batches(shape, mesh.device)

    def step() -> Taken:
        engine.begin_step(len(data), divisor=shape.tokens * mesh.dp_size)
        total = torch.zeros((), device=mesh.device)
        for tokens in data:
            loss = model(tokens, tokens).sum()
            loss.backward()
            total += loss.detach()
        return Taken(total / shape.tokens, engine.step().grad_norm)

    return step, engine


def compile_backend(device: torch.device) -> str:
    """Return the backend to compile with: inductor's code for a CPU takes minutes to compile."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def policy_of(wire: Wire) -> zero.Policy:
    return zero.Policy(block=wire.block, exact_numel=wire.exact_numel, codecs=wire)


def policies() -> dict[str, tuple[str, zero.Policy]]:
    """Return what one rank alone can run: name -> (preset, policy)."""
    delta = ZeroConfig(zero_preset="zeropp")
    whole = replace(delta, zero_quantized_weights_delta=False)
    return {
        **{preset: (preset, zero.Policy()) for preset in ("zero1", "zero3", "hpz", "mics")},
        "zeropp": ("zeropp", policy_of(asked_for(delta))),
        "zeropp INT8": ("zeropp", policy_of(asked_for(whole))),
    }


def pipelined(
    config: RunConfig,
    mesh: Mesh,
    tokens: torch.Tensor,
    micro_batches: int,
    policy: zero.Policy | None = None,
) -> tuple[Step, zero.Engine]:
    """Return a step of this rank's stages on its tokens [all samples, sequence], which are the labels, too; and the
    engine. The step's loss is summed, or 0 on ranks without the last stage."""
    decoder = build_decoder(config, mesh)
    engine = shard_decoder(decoder, config, mesh, policy=policy)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    data = [MicroBatch(t, t, torch.ones(t.shape, device=t.device)) for t in tokens.chunk(micro_batches)]
    program, total = pipeline.program(micro_batches), tokens.numel() * mesh.dp_size

    def step() -> Taken:
        engine.begin_step(micro_batches, total, program)
        loss = pipeline.step(data)
        return Taken(loss, engine.step().grad_norm)

    return step, engine


def clip_together(held: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(held, CLIP)


class AdamW:
    """Clips, and makes torch's own update. master: of fp32 copies, for parameters that are, or will be, in 16
    bits. clip: clips the gradients of parameters to the norm CLIP, and returns the norm that they had."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        master: bool,
        clip: Callable[[list[torch.Tensor]], torch.Tensor] = clip_together,
    ) -> None:
        self.parameters, self.master, self.clip = list(parameters), master, clip
        copies = (p.detach().to(torch.float32, copy=True) for p in self.parameters)
        self.held = list(copies) if master else self.parameters
        groups = defaultdict[object, list[torch.Tensor]](
            list
        )  # DTensors of two meshes have no common operation
        for held in self.held:
            groups[getattr(held, "device_mesh", None)].append(held)
        self.optimizer = ADAMW([{"params": group} for group in groups.values()])

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Return the norm of the gradients."""
        if self.master:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            assert len(gradients) == len(self.parameters)
            for held, p in zip(self.held, self.parameters, strict=True):
                held.grad, p.grad = torch.empty_like(held), None
            torch._foreach_copy_([held.grad for held in self.held], gradients)
        norm = self.clip(self.held)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.master:
            torch._foreach_copy_(self.parameters, self.held)
        return norm


def torch_step(
    model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: AdamW,
    shape: Shape,
    device: torch.device,
    quiet: Callable[[bool], AbstractContextManager] = lambda last: nullcontext(),
) -> Step:
    """Return a step of plain torch. model: tokens and labels -> losses. quiet: surrounds a micro-batch, given whether
    it is the last."""
    data = batches(shape, device)

    def step() -> Taken:
        total = torch.zeros((), device=device)
        for i, tokens in enumerate(data):
            with quiet(i == len(data) - 1):
                loss = model(tokens, tokens).sum() / shape.tokens
                loss.backward()
            total += loss.detach()
        return Taken(total, optimizer.step())

    return step


def held_bytes(engine: zero.Engine) -> dict[str, int]:
    """Return how many bytes this rank holds now, by what they are for.

    'parameters' are the P copies and gathered buffers, 'optimizer' the master and the moments; the third key
    is 'gradients'. A master that is a part of the P copy counts as parameters only.
    """
    parameters, gradients, optimizer = set[int](), 0, 0
    total = 0
    for unit in engine.units:
        for tensor in (unit.weights.full, unit.weights.copy):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in parameters:
                parameters.add(storage.data_ptr())
                total += storage.nbytes()
        gradients += 0 if unit.gradients.grad is None else unit.gradients.grad.nbytes
        if unit.master.value.untyped_storage().data_ptr() not in parameters:
            optimizer += unit.master.value.nbytes
    for state in engine.optimizer.torch.state.values():
        optimizer += sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
    return {"parameters": total, "gradients": gradients, "optimizer": optimizer}
