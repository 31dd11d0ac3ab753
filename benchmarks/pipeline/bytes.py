"""Bytes between nodes of a pipelined step, for both orders of the mesh.

    python -m benchmarks.pipeline.bytes [--rate none] [--micro-batches 2 4 8]

2 nodes (tests/netlab) of 2 or 4 ranks. Counted by megazero, counted by the kernel at a node's interface, and from
formulas. Prints the table of docs/results/pipeline.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.steps import Shape, options_of
from megazero.comm.codec import Identity
from megazero.config import RunConfig, World, make_config
from megazero.mesh.levels import INTER
from megazero.mesh.mesh import Mesh
from megazero.models import Decoder
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder
from megazero.zero import Engine
from megazero.zero.unit import Unit
from tests.netlab.lab import bytes_sent_again

HEADER = [
    *("pipelines", "ranks of a node", "TP x PP x DP", "model state", "micro-batches"),
    *("refresh + reduce", "over 2N", "activations", "scalars", "of formula", "interface / counters"),
]
NODES, SEQUENCE, HIDDEN, VOCABULARY = 2, 64, Shape.hidden, Shape.vocabulary
# zeropp's behaviour where one data-parallel rank is on each node: its factors are then those of zero1. Step times
# were measured before gradients were transformed by default.
ZEROPP_AT_ONE = {
    "zero_preset": "zero1",
    "zero_quantized_weights_delta": True,
    "zero_quantized_gradients": True,
    "zero_gradient_transform": "none",
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
            **options_of(Shape(layers=4, sequence=SEQUENCE)),
            "untie_embeddings_and_output_weights": True,
            "params_dtype": "bf16",
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
    """Return the bytes of one of ``ranks`` slices in the codec, exact without one."""
    codec = codec or Identity(exact)
    return codec.message_numel(*(n // ranks for _, n in unit.layout.regions)) * codec.wire_dtype.itemsize


def formula(case: Case, mesh: Mesh, engine: Engine, micro_batches: int) -> dict[str, int]:
    """Return the bytes that this rank sends to other nodes in a step, by kind, without scalars.

    inside: of OS = d slices, each once per step, a difference of weights and a sum of gradients to every other node.
    across: of every micro-batch an activation or a gradient of one, bf16, cut over the tensor-parallel ranks; and the
    slice of the tied embedding's gradient, fp32, once.
    """
    assert engine.units[0].axes.os == len(mesh.data_axes), "the formula is for OS = d"
    if not case.inside:
        whole = SEQUENCE * HIDDEN * torch.bfloat16.itemsize
        ends = VOCABULARY * HIDDEN * torch.float32.itemsize // (mesh.tp.size * mesh.dp_size)
        return {"pp": micro_batches * whole // mesh.tp.size, "reduce": ends if mesh.ends else 0}
    others = NODES - 1
    kinds: Counter[str] = Counter()
    for unit in engine.units:
        codecs = unit.codecs
        weights = message_bytes(unit, codecs.weights, unit.dtype, mesh.dp_size)
        gradients = message_bytes(unit, codecs.gradients.get(INTER), unit.sum_dtype, mesh.dp_size)
        kinds.update(refresh=others * weights, reduce=others * gradients)
    return dict(kinds)


def compare(names: list[str], counts: list[int]) -> dict[str, Any]:
    """Return what ``run`` returns, by case."""
    return {name: run(name, counts) for name in names}


def run(name: str, counts: list[int]) -> list[dict[str, Any]]:
    """Return for each number of micro-batches, by node: counted and formula, by kind; sent, at the interface; again,
    how much of that at most was sent again."""
    case, per_node = CASES[name], harness.ranks_per_node()
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
    _, sent = harness.measure(lambda: step(count))
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


def measure(names: list[str], micro_batches: list[int], rate: str = "none") -> dict[str, Any]:
    """Return what ``run`` returns, by case. The cases of one number of ranks share their processes. Raises
    LabUnavailable."""
    found: dict[str, Any] = {}
    for ranks in sorted({CASES[name].ranks_per_node for name in names}):
        own = [name for name in names if CASES[name].ranks_per_node == ranks]
        for lab in harness.labs_at([rate], NODES):
            found |= harness.run(compare, own, micro_batches, ranks=ranks, lab=lab, timeout=600)
    return {name: found[name] for name in names}


def elements() -> int:
    """Return the number of the whole model's parameters."""
    decoder = Decoder(CASES["across"].config(1).model, device="meta")
    return sum(p.numel() for p in decoder.parameters())


def rows(name: str, results: list[dict[str, Any]]) -> list[list[str]]:
    case, out = CASES[name], []
    dp = NODES * case.ranks_per_node // (2 * case.tp)
    layout = [
        "inside" if case.inside else "across",
        str(case.ranks_per_node),
        f"{case.tp} x 2 x {dp}",
        case.words,
    ]
    for result in results:
        totals = [sum(kinds.values()) for kinds in result["counted"]]
        most = totals.index(max(totals))
        counted, formula = result["counted"][most], result["formula"][most]
        state, scalars = counted.get("refresh", 0) + counted.get("reduce", 0), counted.get("scalar", 0)
        figures = [f"{state / 1e3:.2f}", f"{state / (2 * elements()):.3f}"]
        figures += [f"{n / 1e3:.2f}" for n in (counted.get("pp", 0), scalars)]
        share = (totals[most] - scalars) / sum(formula.values())
        framing = f"{result['sent'][most] / totals[most]:.4f}"
        out.append([*layout, str(result["micro_batches"]), *figures, f"{share:.6f}", framing])
    return out


def main() -> None:
    parser = harness.parser(
        __doc__, rate=("none", "of the links; bytes do not depend on it"), micro_batches=[2, 4, 8]
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    found = measure(options.cases, options.micro_batches, options.rate)
    every = [row for name, results in found.items() for row in rows(name, results)]
    print(f"{harness.setting()}\n\n{harness.table(HEADER, every)}")


if __name__ == "__main__":
    harness.start(main)
