"""One rank of pipeline_bytes.py: bytes between nodes of a step, by megazero's counters, at the interfaces and from
formulas. Started in every node of a lab."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megazero.comm.codec import Identity
from megazero.config import RunConfig, World, make_config
from megazero.mesh.grid import INTER
from megazero.mesh.mesh import Mesh
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder
from megazero.zero import Engine
from megazero.zero.unit import Unit
from tests.benchmarks.comparison_rank import measure
from tests.netlab.lab import bytes_sent_again

NODES, SEQUENCE, HIDDEN, VOCABULARY = 2, 64, 256, 4096
# zeropp's behaviour where one data-parallel rank is on each node: its factors are then those of zero1.
ZEROPP_AT_ONE = {
    "zero_preset": "zero1",
    "zero_quantized_weights_delta": True,
    "zero_quantized_gradients": True,
}


@dataclass(frozen=True)
class Case:
    """inside: pipelines lie inside nodes and data parallelism across (--use-tp-pp-dp-mapping); else the default."""

    ranks_per_node: int
    tp: int
    inside: bool
    words: str
    values: dict[str, Any] = field(default_factory=dict)

    def config(self, micro_batches: int) -> RunConfig:
        ranks = NODES * self.ranks_per_node
        dp = ranks // (2 * self.tp)
        values = {
            "num_layers": 4,
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 688,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "model_family": "llama",
            "untie_embeddings_and_output_weights": True,
            "params_dtype": "bf16",
            "seq_length": SEQUENCE,
            "micro_batch_size": 1,
            "global_batch_size": micro_batches * dp,
            "lr": 1e-4,
            "train_iters": 1,
            "mock_data": True,
            "ranks_per_node": self.ranks_per_node,
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": 2,
            "use_tp_pp_dp_mapping": self.inside,
        }
        return make_config({**values, **self.values}, World(ranks, self.ranks_per_node))


CASES = {
    "inside": Case(2, 1, True, "zero1 with zeropp's formats", ZEROPP_AT_ONE),
    "inside, TP 2": Case(4, 2, True, "zero1 with zeropp's formats", ZEROPP_AT_ONE),
    "inside, zeropp": Case(4, 1, True, "zeropp", {"zero_preset": "zeropp"}),
    "across": Case(2, 1, False, "zero1", {"zero_preset": "zero1"}),
    "across, tied": Case(
        *(2, 1, False, "zero1, tied embeddings"),
        {"zero_preset": "zero1", "untie_embeddings_and_output_weights": False},
    ),
    "across, TP 2": Case(4, 2, False, "zero1", {"zero_preset": "zero1"}),
    "across, TP 2, SP": Case(
        *(4, 2, False, "zero1, sequence parallel"), {"zero_preset": "zero1", "sequence_parallel": True}
    ),
}


def message_bytes(unit: Unit, codec: Any, exact: torch.dtype, ranks: int) -> int:
    """Of one slice of ``ranks`` in the codec, or exactly."""
    codec = codec or Identity(exact)
    return codec.message_numel(*(n // ranks for _, n in unit.layout.regions)) * codec.wire_dtype.itemsize


def formula(case: Case, mesh: Mesh, engine: Engine, micro_batches: int) -> dict[str, int]:
    """Bytes that this rank sends to other nodes in a step, by kind; scalars are not in it.

    inside: of OS = d slices, each once per step, a difference of weights and a sum of gradients to every other node.
    across: of every micro-batch an activation or a gradient of one, bf16, cut over the tensor-parallel ranks; and the
    slice of the tied embedding's gradient, fp32, once.
    """
    assert engine.units[0].levels.os == len(mesh.data_axes), "the formula is for OS = d"
    if not case.inside:
        whole = SEQUENCE * HIDDEN * torch.bfloat16.itemsize
        ends = VOCABULARY * HIDDEN * torch.float32.itemsize // (mesh.tp.size * mesh.dp_size)
        return {"pp": micro_batches * whole // mesh.tp.size, "reduce": ends if mesh.ends else 0}
    others = NODES - 1
    kinds: Counter[str] = Counter()
    for unit in engine.units:
        codecs = unit.codecs
        weights = message_bytes(unit, codecs.weights, unit.dtype, mesh.dp_size)
        gradients = message_bytes(unit, codecs.gradients(INTER), unit.sum_dtype, mesh.dp_size)
        kinds.update(refresh=others * weights, reduce=others * gradients)
    return dict(kinds)


def run(name: str, counts: list[int]) -> list[dict[str, Any]]:
    """For every number of micro-batches, by node: counted and formula by kind, sent (at the interface), and of that
    again (at most)."""
    case, per_node = CASES[name], int(os.environ["LOCAL_WORLD_SIZE"])
    config = case.config(max(counts))
    mesh = make_mesh(config, World(dist.get_world_size(), per_node), torch.device("cpu"))
    decoder = build_decoder(config, mesh)
    engine = shard_decoder(decoder, config, mesh)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    tokens = torch.randint(
        0, VOCABULARY, (1, SEQUENCE), generator=torch.Generator().manual_seed(mesh.dp_rank)
    )
    batch = MicroBatch(tokens, tokens, torch.ones(tokens.shape))

    def step(count: int) -> None:
        engine.begin_step(count, count * SEQUENCE * mesh.dp_size, pipeline.program(count))
        pipeline.step([batch] * count)
        engine.step()

    for _ in range(2):  # connections; and the first refresh of differences has nothing to send
        step(counts[0])
    return [_measured(case, mesh, engine, count, step) for count in counts]


def _measured(case: Case, mesh: Mesh, engine: Engine, count: int, step: Any) -> dict[str, Any]:
    engine.traffic.take()
    again = bytes_sent_again()
    _, sent = measure(lambda: step(count), 1)
    again = bytes_sent_again() - again
    counted = {kind: n for (kind, link), n in engine.traffic.bytes.items() if link == INTER and n}
    own = {"counted": counted, "formula": formula(case, mesh, engine, count), "sent": sent, "again": again}
    every: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(every, own)
    nodes = [every[i : i + case.ranks_per_node] for i in range(0, mesh.world_size, case.ranks_per_node)]

    def by_node(what: str) -> list[dict[str, int]]:
        return [dict(sum((Counter(rank[what]) for rank in node), Counter())) for node in nodes]

    out = {"micro_batches": count, "counted": by_node("counted"), "formula": by_node("formula")}
    return {**out, **{what: [node[0][what] for node in nodes] for what in ("sent", "again")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--cases", choices=CASES, nargs="+", required=True, help="of one number of ranks")
    parser.add_argument("--micro-batches", type=int, nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {name: run(name, options.micro_batches) for name in options.cases}
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
