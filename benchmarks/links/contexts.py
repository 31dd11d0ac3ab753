"""Ranks that share samples over two nodes: what swaps of heads, gathers of keys and both send, and a step's time.

    python -m benchmarks.links.contexts [--rates 200mbit 1gbit none] [--seq-length 4096]

A step is one micro-batch's forward and backward of a small Llama in fp32 with a quarter as many key/value heads,
without an update: what crosses nodes is context parallelism's alone. Bytes are what the kernel counted at a node's
interface; the formula is the planner's and ``verify``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from megazero.config import RunConfig, World, make_config
from megazero.config.model.mixers import mixers_of
from megazero.cp import ContextParallel
from megazero.mesh.grid import Grid
from megazero.mesh.levels import INTER
from megazero.models import Decoder
from megazero.plan.base_layout import grid_of
from megazero.plan.communication import Activation, layer_exchanges
from megazero.train.data.feeding import own_tokens
from megazero.train.distributed import make_mesh

LAYERS, VOCABULARY = 2, 512
WAYS: dict[str, dict[str, Any]] = {
    "u4: swaps across": {"cp_comm_type": ("a2a",)},
    "g4: gathers": {"cp_comm_type": ("all_gather",)},
    "u2 x g2: swaps inside, gathers across": {},
}


def config_of(way: str, length: int, world: World) -> RunConfig:
    """Return the configuration of one of WAYS over all ranks."""
    sizes = {"num_layers": LAYERS, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 2}
    values = {"model_family": "llama", "vocab_size": VOCABULARY, "seq_length": length, "params_dtype": "fp32"}
    values |= {"micro_batch_size": 1, "train_iters": 1, "lr": 1e-3, "mock_data": True}
    return make_config({**sizes, **values, "context_parallel_size": world.world_size, **WAYS[way]}, world)


def sent_by_a_node(config: RunConfig, grid: Grid) -> int:
    """Return the formula's bytes that leave a node in a step."""
    forward, backward = layer_exchanges(config, mixers_of(config.model)[0], grid, Activation.of(config, 4))
    rows = sum(each.row * each.others.get(INTER, 0) for each in (*forward, *backward))
    return LAYERS * grid.ranks_per_node * rows


def step_of(config: RunConfig, world: World) -> Callable[[], list[torch.Tensor]]:
    """Return the forward and backward of this rank's part of one sample; they return its gradients."""
    mesh = make_mesh(config, world, torch.device("cpu"))
    decoder = Decoder(config.model, cp=ContextParallel.of(mesh), dtype=torch.float32)
    decoder.initialize(1)
    ids = torch.randint(
        VOCABULARY, (1, config.model.seq_length + 1), generator=torch.Generator().manual_seed(1)
    )
    own = own_tokens({"tokens": ids[:, :-1], "labels": ids[:, 1:]}, mesh)

    def step() -> list[torch.Tensor]:
        decoder.zero_grad()
        decoder(own["tokens"], own["labels"]).sum().backward()
        return [p.grad for p in decoder.parameters()]

    return step


def norm_of_sum(gradients: list[torch.Tensor]) -> float:
    """Return the norm of the sum over ranks."""
    for gradient in gradients:
        dist.all_reduce(gradient)
    return float(torch.nn.utils.get_total_norm(gradients))


def compare(length: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Return for each way the formula's bytes of a node, and its turns: seconds, and bytes of the node that sent
    most."""
    world = World(dist.get_world_size(), harness.ranks_per_node())
    configs = {way: config_of(way, length, world) for way in WAYS}
    steps = {way: step_of(config, world) for way, config in configs.items()}
    harness.require_gradients({way: norm_of_sum(step()) for way, step in steps.items()})
    turns = {way: lambda step=step: harness.measure_most(step, repeats) for way, step in steps.items()}
    taken = harness.take_turns(turns, rounds)
    bytes_of = {
        way: sent_by_a_node(config, grid_of(config, world, (1, 1, 1))) for way, config in configs.items()
    }
    return {way: {"formula": bytes_of[way], "turns": taken[way]} for way in WAYS}


def main() -> None:
    options = harness.parser(
        __doc__,
        rates=["200mbit", "1gbit", "none"],
        seq_length=(4096, "tokens of a sample, over all ranks"),
        nodes=2,
        ranks_per_node=2,
        rounds=(5, "turns of each way that count"),
        repeats=(3, "steps of a turn"),
    ).parse_args()
    rows = []
    for lab in harness.labs_at(options.rates, options.nodes):
        asked = options.seq_length, options.rounds, options.repeats
        found = harness.run(compare, *asked, ranks=options.ranks_per_node, lab=lab)
        for way, each in found.items():
            seconds, sent = zip(*each["turns"], strict=True)
            share = [n / each["formula"] for n in sent]
            ms = harness.spread([1e3 * s for s in seconds])
            rows.append([str(lab.rate), way, ms, f"{each['formula'] / 1e6:.2f}", harness.spread(share, 4)])
    header = [
        "rate",
        "way",
        "ms of a step (range)",
        "MB from a node by the formula",
        "counted / formula (range)",
    ]
    print(harness.table(header, rows))


if __name__ == "__main__":
    harness.start(main)
