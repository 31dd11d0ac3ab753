"""Contestants of the heat ``pipelines``: two stages under data parallelism of 2, by megazero and by torch's
pipelining with FSDP2. All train the same decoder, cut at the same layer, on the same micro-batches with 1F1B, in
fp32, with fused AdamW and clipping by the global norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.harness import Taken
from benchmarks.pipeline.bytes import ZEROPP_AT_ONE
from benchmarks.steps import CLIP, Shape, Step, options_of, pipelined
from megazero.comm.hops import Traffic
from megazero.config import RunConfig, World, make_config
from megazero.models import Decoder
from megazero.pp.partition import StageSpec
from megazero.tp import vocab_parallel_cross_entropy
from megazero.train.distributed import make_mesh

CPU, PP, LR = torch.device("cpu"), 2, 1e-4
SHAPE = Shape(micro_batch=2)
Build = Callable[[Shape, int], tuple[Step, Traffic | None]]  # from the ranks of a node, too
QUANTISED = "zeropp's formats"
OURS: dict[str, dict[str, Any]] = {
    **{name: {"zero_preset": name} for name in ("zero1", "zero2", "zero3")},
    "zero3, whole gradients": {"zero_preset": "zero3", "zero_gradients_lifetime": "step"},
    QUANTISED: ZEROPP_AT_ONE,
}
KEPT = {
    "FSDP2 kept": True,
    "FSDP2": False,
}  # torch's default form keeps gradients whole, and gathers at every use


def contestants() -> dict[str, Build]:
    """Return what builds each, by name: with stages on different nodes, and with pipelines inside nodes."""
    found: dict[str, Build] = {}
    for inside, order in ((False, "stages across nodes"), (True, "stages inside nodes")):
        for who, values in OURS.items():
            if inside or who != QUANTISED:  # no state crosses nodes there
                found[f"{who}, {order}"] = ours(values, inside)
        found |= {f"{who}, {order}": torchs(keep, inside) for who, keep in KEPT.items()}
    return found


def config_of(shape: Shape, preset: dict[str, Any], inside: bool, per_node: int) -> RunConfig:
    values = {
        **options_of(shape),
        "untie_embeddings_and_output_weights": True,
        "micro_batch_size": shape.micro_batch,
        "global_batch_size": shape.micro_batches * shape.micro_batch * dist.get_world_size() // PP,
        "params_dtype": "fp32",
        "lr": LR,
        "weight_decay": 0.0,
        "clip_grad": CLIP,
        "train_iters": 1,
        "mock_data": True,
        "pipeline_model_parallel_size": PP,
        "use_tp_pp_dp_mapping": inside,
        "ranks_per_node": per_node,
    }
    return make_config({**values, **preset}, World(dist.get_world_size(), per_node))


def tokens_of(shape: Shape, dp_rank: int) -> Tensor:
    """Return a data-parallel rank's tokens, which are its labels, too: [micro-batches * micro-batch, s]."""
    size = (shape.micro_batches * shape.micro_batch, shape.sequence)
    return torch.randint(0, shape.vocabulary, size, generator=torch.Generator().manual_seed(dp_rank))


def ours(preset: dict[str, Any], inside: bool) -> Build:
    def build(shape: Shape, per_node: int) -> tuple[Step, Traffic | None]:
        config = config_of(shape, preset, inside, per_node)
        mesh = make_mesh(config, World(dist.get_world_size(), per_node), CPU)
        step, engine = pipelined(config, mesh, tokens_of(shape, mesh.dp_rank), shape.micro_batches)
        mesh.release()
        return step, engine.traffic

    return build


class TorchStage(nn.Module):
    """A stage of the same decoder as torch's pipelining takes it; the last one returns logits [b, s, vocabulary]."""

    def __init__(self, decoder: Decoder, spec: StageSpec) -> None:
        super().__init__()
        self.decoder, self.spec = decoder, spec

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder.run_stage(self.spec, x)


def torchs(keep: bool, inside: bool) -> Build:
    """Schedule1F1B over stages under fully_shard. torch's pipelining reduces once per step by itself.

    keep: gathered parameters stay for the step (reshard_after_forward=False), so they are gathered once, too.
    """

    def build(shape: Shape, per_node: int) -> tuple[Step, None]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp") if inside else ("pp", "dp"))
        pp, dp = mesh["pp"], mesh["dp"]
        config = config_of(shape, OURS["zero1"], inside, per_node)
        spec = config.stages()[pp.get_local_rank()]
        decoder = Decoder(config.model, stages=[spec])
        decoder.initialize(config.training.seed)
        module, o = TorchStage(decoder, spec), config.optimizer
        for part in (*decoder.layers.values(), module):
            fully_shard(part, mesh=dp, reshard_after_forward=False if keep else None)
        optimizer = torch.optim.AdamW(
            module.parameters(), LR, (o.adam_beta1, o.adam_beta2), o.adam_eps, weight_decay=0.0, fused=True
        )
        tokens = tokens_of(shape, dp.get_local_rank())
        schedule = _schedule(module, spec, shape, pp.get_group(), tokens.numel())

        def step() -> Taken:
            losses: list[Tensor] = []
            given: dict[str, Any] = {} if spec.embedding else {"target": tokens, "losses": losses}
            schedule.step(*([tokens] if spec.embedding else []), **given, return_outputs=False)
            norm = _clip(module, pp.get_group())
            optimizer.step()
            optimizer.zero_grad()
            return Taken(sum(losses, torch.zeros(())).detach() * tokens.numel(), norm)

        return step, None

    return build


def _schedule(module: TorchStage, spec: StageSpec, shape: Shape, group: Any, tokens: int) -> Schedule1F1B:
    """Return the schedule, with static shapes, so that none are exchanged."""
    ids = torch.zeros(shape.micro_batch, shape.sequence, dtype=torch.int64)
    x = torch.zeros(shape.sequence, shape.micro_batch, shape.hidden)
    logits = torch.zeros(shape.micro_batch, shape.sequence, shape.vocabulary)
    inputs, outputs = (ids, x) if spec.embedding else (x.requires_grad_(), logits)
    stage = PipelineStage(module, spec.index, PP, CPU, inputs, outputs.requires_grad_(), group=group)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        head = module.decoder.head
        assert head is not None
        losses = vocab_parallel_cross_entropy(output.transpose(0, 1), target.t(), head.shard, head.tp)
        return losses.sum() / tokens

    return Schedule1F1B(stage, shape.micro_batches, loss_fn=loss, scale_grads=False)


def _clip(module: nn.Module, pp: Any) -> Tensor:
    """Clip by the norm over all stages, and return it."""
    parameters = list(module.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    square = norm.full_tensor() ** 2  # type: ignore[attr-defined]
    dist.all_reduce(square, group=pp)
    torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, square.sqrt())
    return square.sqrt()
