"""One rank of pipeline_step_time.py: contestants take turns; time, bytes and loss. Started in every node of a lab."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megazero.config import RunConfig, World, make_config
from megazero.models import Decoder
from megazero.pp.partition import StageSpec
from megazero.tp import vocab_parallel_cross_entropy
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder
from tests.benchmarks.comparison_rank import measure
from tests.benchmarks.pipeline_bytes_rank import ZEROPP_AT_ONE

CPU, PP, LR = torch.device("cpu"), 2, 1e-4
ACROSS, INSIDE = "stages across nodes", "stages inside nodes"
QUANTISED = "zeropp's formats"
WHOLE = "zero3, whole gradients"
OURS = {name: {"zero_preset": name} for name in ("zero1", "zero2", "zero3")} | {QUANTISED: ZEROPP_AT_ONE}
OURS[WHOLE] = {"zero_preset": "zero3", "zero_gradients_lifetime": "step"}
KEPT = {"FSDP2 kept": True, "FSDP2": False}
NAMES = tuple(
    f"{who}, {order}"
    for order in (ACROSS, INSIDE)
    for who in (*OURS, *KEPT)
    if (who, order) != (QUANTISED, ACROSS)  # no state crosses nodes there
)
Step = Callable[[], Tensor]  # a summed loss over this rank's tokens, 0 without the last stage


@dataclass(frozen=True)
class Shape:
    micro_batches: int
    micro_batch: int
    sequence: int
    layers: int

    def values(self) -> dict[str, Any]:
        return {
            "num_layers": self.layers,
            "hidden_size": 256,
            "ffn_hidden_size": 688,
            "num_attention_heads": 4,
            "vocab_size": 4096,
            "untie_embeddings_and_output_weights": True,
            "model_family": "llama",
            "seq_length": self.sequence,
            "micro_batch_size": self.micro_batch,
            "global_batch_size": self.micro_batches * self.micro_batch * dist.get_world_size() // PP,
            "params_dtype": "fp32",
            "lr": LR,
            "weight_decay": 0.0,
            "clip_grad": 1.0,
            "train_iters": 1,
            "mock_data": True,
            "pipeline_model_parallel_size": PP,
        }

    def config(self, who: str, order: str, per_node: int) -> RunConfig:
        values = {"use_tp_pp_dp_mapping": order == INSIDE, "ranks_per_node": per_node, **OURS[who]}
        return make_config({**self.values(), **values}, World(dist.get_world_size(), per_node))

    def batches(self, dp_rank: int) -> Tensor:
        """Tokens, labels too, of a data-parallel rank: [micro-batches * micro-batch, s]."""
        generator = torch.Generator().manual_seed(dp_rank)
        return torch.randint(
            0, 4096, (self.micro_batches * self.micro_batch, self.sequence), generator=generator
        )


def ours(who: str, order: str, shape: Shape, per_node: int) -> Step:
    config = shape.config(who, order, per_node)
    mesh = make_mesh(config, World(dist.get_world_size(), per_node), CPU)
    decoder = build_decoder(config, mesh)
    engine = shard_decoder(decoder, config, mesh)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    tokens = shape.batches(mesh.dp_rank)
    data = [MicroBatch(t, t, torch.ones(t.shape)) for t in tokens.chunk(shape.micro_batches)]
    program, total = pipeline.program(len(data)), tokens.numel() * mesh.dp_size

    def step() -> Tensor:
        engine.begin_step(len(data), total, program)
        loss = pipeline.step(data)
        engine.step()
        return loss

    return step


class PeerStage(nn.Module):
    """A stage of the same decoder as torch's pipelining takes it; the last one returns logits [b, s, vocabulary]."""

    def __init__(self, decoder: Decoder, spec: StageSpec) -> None:
        super().__init__()
        self.decoder, self.spec = decoder, spec

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder.run_stage(self.spec, x)


def peer(keep: bool, order: str, shape: Shape, per_node: int) -> Step:
    """Schedule1F1B over stages under fully_shard. torch's pipelining reduces once per step by itself.

    keep: gathered parameters stay for the step (reshard_after_forward=False), so they are gathered once, too.
    """
    names = ("pp", "dp") if order == ACROSS else ("dp", "pp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    pp, dp = mesh["pp"], mesh["dp"]
    config = shape.config("zero1", order, per_node)
    spec = config.stages()[pp.get_local_rank()]
    decoder = Decoder(config.model, stages=[spec])
    decoder.initialize(config.training.seed)
    module = PeerStage(decoder, spec)
    for part in (*decoder.layers.values(), module):
        fully_shard(part, mesh=dp, reshard_after_forward=False if keep else None)
    o = config.optimizer
    betas = o.adam_beta1, o.adam_beta2
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=LR, betas=betas, eps=o.adam_eps, weight_decay=0.0, fused=True
    )
    tokens = shape.batches(dp.get_local_rank())
    schedule = _schedule(module, spec, shape, pp.get_group(), tokens.numel())

    def step() -> Tensor:
        losses: list[Tensor] = []
        if spec.embedding:
            schedule.step(tokens, return_outputs=False)
        else:
            schedule.step(target=tokens, losses=losses, return_outputs=False)
        _clip(module, pp.get_group())
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses, torch.zeros(())).detach() * tokens.numel()

    return step


def _schedule(module: PeerStage, spec: StageSpec, shape: Shape, group: Any, tokens: int) -> Schedule1F1B:
    """With static shapes, so that none are exchanged."""
    ids = torch.zeros(shape.micro_batch, shape.sequence, dtype=torch.int64)
    x = torch.zeros(shape.sequence, shape.micro_batch, 256)
    logits = torch.zeros(shape.micro_batch, shape.sequence, 4096)
    inputs, outputs = (ids, x) if spec.embedding else (x.requires_grad_(), logits)
    stage = PipelineStage(module, spec.index, PP, CPU, inputs, outputs.requires_grad_(), group=group)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        head = module.decoder.head
        assert head is not None
        losses = vocab_parallel_cross_entropy(output.transpose(0, 1), target.t(), head.shard, head.tp)
        return losses.sum() / tokens

    return Schedule1F1B(stage, shape.micro_batches, loss_fn=loss, scale_grads=False)


def _clip(module: nn.Module, pp: Any) -> None:
    """By the norm over all stages."""
    parameters = list(module.parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    square = norm.full_tensor() ** 2  # type: ignore[attr-defined]
    dist.all_reduce(square, group=pp)
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())


def build(name: str, shape: Shape, per_node: int) -> Step:
    who, order = name.rsplit(", ", 1)
    make = partial(ours, who) if who in OURS else partial(peer, KEPT[who])
    return make(order, shape, per_node)


def compare(options: argparse.Namespace, per_node: int) -> dict[str, Any]:
    """By contestant: seconds and bytes of a step (of the node that sent most) of every turn, the losses per token."""
    shape = Shape(options.micro_batches, options.micro_batch, options.sequence, options.layers)
    steps = {name: build(name, shape, per_node) for name in options.contestants}
    out: dict[str, Any] = {name: {"seconds": [], "sent": [], "losses": []} for name in steps}
    tokens = shape.micro_batches * shape.micro_batch * shape.sequence * dist.get_world_size() // PP
    names = list(steps)
    for turn in range(options.rounds + 2):
        first = turn % len(names)  # nobody is always next after the same one
        for name in (*names[first:], *names[:first]):
            losses: list[Tensor] = []
            seconds, sent = measure(lambda n=name, into=losses: into.append(steps[n]()), 1)
            row = torch.tensor([sent, 0.0], dtype=torch.float64)
            dist.all_reduce(row, dist.ReduceOp.MAX)
            loss = losses[0].double()
            dist.all_reduce(loss)
            out[name]["losses"].append(loss.item() / tokens)
            if turn >= 2:  # the first builds connections and optimizer states, the second fills caches
                out[name]["seconds"].append(seconds)
                out[name]["sent"].append(int(row[0]))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, required=True)
    for option in ("rounds", "micro-batches", "micro-batch", "sequence", "layers"):
        parser.add_argument(f"--{option}", type=int, required=True)
    parser.add_argument("--contestants", nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = compare(options, int(os.environ["LOCAL_WORLD_SIZE"]))
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
