"""The training loops that are compared: megazero's engine, and the same decoder in a loop of plain torch.

Both have bf16 parameters, an fp32 master, fused AdamW and clipping. The plain loop is written for speed: its copies
between the two precisions are torch's foreach operations, which take all parameters at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import steps
from benchmarks.harness import Taken
from benchmarks.steps import CLIP, AdamW, llama, options_of
from megazero import zero
from megazero.config import World, make_config
from megazero.config.layout.wire import asked_for
from megazero.config.options.sections import ZeroConfig
from megazero.mesh.mesh import Mesh, create_mesh
from megazero.models import Decoder, ModelConfig
from megazero.models.compilation import compile_layers
from megazero.zero.elementwise import best_adamw

Step = Callable[[], Taken]  # its loss is of all tokens
# What a run's --optimizer-impl auto takes: on CUDA the update in one pass, which prepares refreshes, too.
AS_A_RUN = partial(best_adamw, lr=1e-4, weight_decay=0.1)


@dataclass(frozen=True)
class Size:
    """A Llama-like decoder and the tokens of one step: ``batch`` sequences, one micro-batch. A token goes to ``topk``
    of ``experts``, each as wide as ``ffn``."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    vocabulary: int = 32000
    sequence: int = 4096
    batch: int = 1
    experts: int = 0
    topk: int = 2

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    @property
    def config(self) -> ModelConfig:
        return llama(self)


HALF = Size("0.5B", layers=12, hidden=1536, ffn=4096, heads=12, sequence=2048)
SEED = 1  # of initial values: all draw them in one order, so their losses and norms are the same
TINY = Size("tiny", layers=2, hidden=64, ffn=128, heads=4, vocabulary=256, sequence=16)


def batch(size: Size, device: torch.device) -> torch.Tensor:
    """Return tokens [batch, sequence], the same for all."""
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(0, size.vocabulary, (size.batch, size.sequence), generator=drawn).to(device)


def value(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an fp32 initial value, drawn on the device: on a host, values that do not depend on the layout
    (megazero.models) take too long for billions of parameters."""
    if parameter.ndim == 1:
        return torch.ones(parameter.shape, device=device)
    return torch.empty(parameter.shape, device=device).normal_(std=0.02)


def ours(
    size: Size,
    device: torch.device,
    recompute: str = "none",
    dtype: torch.dtype = torch.bfloat16,
    mesh: Mesh | None = None,
    policy: zero.Policy | None = None,
    compiled: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = AS_A_RUN,
    **more: Any,
) -> tuple[Step, zero.Engine]:
    """Return a step of megazero on one rank, or on ``mesh``, and its engine.

    compiled: as with --compile. optimizer: a run's own, or ADAMW, torch's, which the plain loop has. more: further
    arguments of ``zero.shard``.
    """
    model = Decoder(size.config, recompute=recompute, device="meta", dtype=dtype)
    if compiled:
        compile_layers(model, compile_backend(device))
    shapes = dict(model.named_parameters())
    torch.manual_seed(SEED)
    mesh = mesh or create_mesh(device=device)
    engine = zero.shard(
        model,
        mesh=mesh,
        policy=policy,
        units=model.units(),
        optimizer=optimizer,
        clip_norm=CLIP,
        init=lambda name: value(shapes[name], device),
        **more,
    )
    tokens = batch(size, device)

    def step() -> Taken:
        engine.begin_step(1, divisor=size.tokens * mesh.dp_size)
        loss = model(tokens, tokens).sum()
        loss.backward()
        return Taken(loss.detach(), engine.step().grad_norm)

    return step, engine


def compile_backend(device: torch.device) -> str:
    """Return the backend to compile with: inductor's code for a CPU takes minutes to compile."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def pipelined(size: Size, device: torch.device, mesh: Mesh, policy: zero.Policy) -> tuple[Step, zero.Engine]:
    """Return a step of this rank's stage of the same decoder, by 1F1B with two micro-batches, and its engine."""
    values = {**options_of(size), "micro_batch_size": size.batch, "lr": 1e-4}
    values |= {"pipeline_model_parallel_size": mesh.pp.size}
    values |= {"train_iters": 10, "mock_data": True, "params_dtype": "bf16"}
    config = make_config(values, World(mesh.world_size, mesh.grid.ranks_per_node))
    return steps.pipelined(config, mesh, batch(size, device).repeat(2, 1), 2, policy)


def decoder(
    size: Size, device: torch.device, recompute: str = "none", dtype: torch.dtype = torch.bfloat16
) -> Decoder:
    model = Decoder(size.config, recompute=recompute, device=device, dtype=dtype)
    torch.manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(value(parameter, device))
    return model


def plain(size: Size, device: torch.device, model: nn.Module, loss: Callable[[torch.Tensor], Any]) -> Step:
    """Return a step of plain torch. loss: tokens -> their summed loss."""
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, master=parameters[0].dtype != torch.float32)
    tokens = batch(size, device)

    def step() -> Taken:
        whole = loss(tokens)
        (whole / size.tokens).backward()
        return Taken(whole.detach(), optimizer.step())

    return step


def policies() -> dict[str, tuple[str, zero.Policy]]:
    """Return the presets to measure: name -> (preset, policy)."""
    from benchmarks.links.contestants import policy_of

    delta = ZeroConfig(zero_preset="zeropp")
    exact = {preset: (preset, zero.Policy()) for preset in ("zero1", "zero3", "hpz", "mics")}
    return {
        **exact,
        "zeropp": ("zeropp", policy_of(asked_for(delta))),
        "zeropp INT8": ("zeropp", policy_of(asked_for(replace(delta, zero_quantized_weights_delta=False)))),
    }
