"""The planner: its units and bytes are those of the engine, its bounds hold, its search finds the best."""

from __future__ import annotations

import ast
import json
import shlex
from dataclasses import replace
from math import comb
from pathlib import Path

import pytest

from megazero.config import ConfigError, World, make_config, parse
from megazero.config.layout.shards import AUTO
from megazero.config.model.spec import LAYER, model_spec
from megazero.config.options.cluster import (
    Cluster,
    Device,
    InterNode,
    IntraNode,
    MeasuredCollective,
    known_clusters,
    load_cluster,
    parse_cluster,
)
from megazero.config.options.sections import RECOMPUTE
from megazero.config.validate import judge
from megazero.mesh.levels import INTER
from megazero.plan.base_layout import BaseLayout
from megazero.plan.command import main
from megazero.plan.communication import ExpertRows
from megazero.plan.estimate import least_memory
from megazero.plan.layout import Layout, TimedHop
from megazero.plan.options import read_request
from megazero.plan.report import layout_flags, stage_lines
from megazero.plan.search import SIMULATED, Search
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import Execution, _Lane, simulate
from megazero.verify.expected_bytes import ExpectedBytes, LayerRows
from tests import ROOT
from tests.byte_formula import sent_in_step
from tests.messages import names, refused
from tests.sizes import CONFIG_JSON, PLANNED, words
from tests.unit.house.test_imports import imports

MODEL = {**PLANNED, "params_dtype": "bf16"}
TRAINED = ("micro_batch_size", "lr", "train_iters", "mock_data")  # what a plan does not take
EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 64, "moe_layer_freq": (2,)}
WORDS = [*words({name: value for name, value in PLANNED.items() if name not in TRAINED}), "--bf16"]


GATHERED = {"context_parallel_size": 8, "num_query_groups": 2, "cp_comm_type": ("all_gather",)}
TIED = {"untie_embeddings_and_output_weights": False}
ALONE = [
    "--tensor-model-parallel-size",
    "1",
    "--pipeline-model-parallel-size",
    "1",
    "--micro-batch-size",
    "1",
]


def cluster(nodes: int = 2, ranks: int = 4, gbits: float = 1.0, gib: float = 16.0) -> Cluster:
    device = Device("card", gib, 100.0, 0.5, bf16_tflops=1.0, reserved_gib=0.0)
    return Cluster("lab", nodes, ranks, device, IntraNode(10.0), InterNode(gbits))


def layout(values: dict[str, object], on: Cluster) -> Layout:
    world = World(on.world_size, on.ranks_per_node)
    config = make_config({**MODEL, **values, "ranks_per_node": on.ranks_per_node}, world)
    return Layout(BaseLayout(config, world, on, Collectives(on)), config.zero)


def test_the_model_may_be_that_of_a_folder(tmp_path: Path) -> None:
    """Its config.json has the vocabulary, too."""
    lab, batch = (
        write_cluster(tmp_path / "lab.yaml", 16),
        ["--global-batch-size", "16", "--seq-length", "128"],
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON))
    request = read_request(["--load", f"hf:{tmp_path}", *batch, "--cluster", lab])
    sizes = {"num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 500}
    assert request.values.items() >= sizes.items() and "load" not in request.values
    with refused("--num-layers", "4"):
        read_request(["--load", f"hf:{tmp_path}", *batch, "--cluster", lab, "--num-layers", "4"])


def test_tied_ends_send_gradients_as_they_are_coded() -> None:
    """The first and the last stage are on different nodes, whose links are slow."""
    on, update = cluster(4, 4, gbits=0.01), {}
    tied = {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": False}
    for coded in (False, True):
        plan = layout({**tied, "zero_preset": "zero1", "zero_quantized_gradients": coded}, on)
        (unit,) = (unit for unit in plan.units(0).shapes if unit.tied)
        update[coded] = simulate(plan).bill["update"]
    saved = (
        unit.elements / plan.shards.os * (4 - 0.5 - 2 / 64)
    )  # INT4 with a scale of two bytes in 64 elements
    rate = 0.01e9 / 8 * on.inter_node.efficiency / on.ranks_per_node
    assert update[False] - update[True] == pytest.approx(saved / rate, rel=0.01)


@pytest.mark.parametrize(
    ("values", "nodes"),
    [
        ({"zero_preset": "zeropp"}, 2),
        ({"zero_preset": "zeropp", "model_family": "gpt", "max_position_embeddings": 1024}, 2),
        ({"zero_preset": "zero3", "model_family": "gpt"}, 2),
        ({"zero_preset": "zero3", "zero_params_lifetime": "gathered"}, 2),
        ({"tensor_model_parallel_size": 2, "num_query_groups": 2, "zero_preset": "hpz"}, 2),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "model_family": "gpt"}, 4),
        ({"zero_preset": "zeropp", **EXPERTS}, 2),
        ({"zero_preset": "zeropp", "expert_model_parallel_size": 4, **EXPERTS}, 2),
        (
            {
                "zero_preset": "hpz",
                "expert_model_parallel_size": 2,
                "zero_quantized_gradients": True,
                **EXPERTS,
            },
            2,
        ),
        ({"zero_preset": "ddp", "zero_quantized_gradients": True, "zero_gradient_bits_intra_node": 8}, 2),
        ({"zero_preset": "zero3", "zero_prefetch_bytes": 0}, 2),
        ({"zero_preset": "zeropp", "zero_prefetch_bytes": 0, "global_batch_size": 32}, 2),
        ({"zero_preset": "hpz", "global_batch_size": 8, "zero_quantized_gradients": True}, 2),
        ({"zero_preset": "zero3", "zero_gradients_lifetime": "step"}, 2),
        ({"zero_preset": "zeropp", "zero_exact_numel": 300, "zero_quantized_weights_delta": False}, 2),
        ({"zero_shard": (2, 4, 8), "zero_quantized_weights": True}, 2),
        ({"zero_preset": "zeropp", "pipeline_model_parallel_size": 2, **TIED}, 4),
        ({"zero_preset": "zero2", "tensor_model_parallel_size": 2, "sequence_parallel": True, **EXPERTS}, 2),
        ({"pipeline_model_parallel_size": 2, "zero_preset": "hpz", "zero_chunk_numel": 10**5, **EXPERTS}, 2),
        ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}, 2),
        ({"zero_preset": "zero3", "zero_gradients_lifetime": "step", "zero_prefetch_bytes": 10**6}, 2),
        ({"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1", "zero_shard": (1, 4, 4)}, 2),
        ({"context_parallel_size": 2, "zero_preset": "zero3", "recompute_granularity": "selective"}, 2),
        ({"context_parallel_size": 8, "num_query_groups": 2, "recompute_granularity": "full"}, 2),
        ({"context_parallel_size": 8, "num_query_groups": 2, "cp_comm_type": ("a2a",)}, 2),
        ({**GATHERED, "cp_gather_bits": 8, "recompute_granularity": "full"}, 2),
        ({**GATHERED, "recompute_granularity": "selective"}, 2),
        ({"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}, 2),
    ],
)
def test_bytes_are_those_of_the_formula_and_those_that_verify_expects(
    values: dict[str, object], nodes: int
) -> None:
    plan = layout(values, cluster(nodes))
    config, world = plan.config, plan.base.world
    expected = ExpectedBytes(config, world, False, plan.wire.block)
    # Means: sums of what a rank holds, and rows of experts, of which verify has seen none.
    apart = ("tp", "ep") if {"sequence_parallel", "expert_model_parallel_size"} & values.keys() else ()
    for stage, total in enumerate(plan.bytes_by_stage):
        want = expected.bytes_of(plan.grid.rank_of(stage, 0, 0), 1, False)
        got = {key: sent for key, sent in total.items() if sent and key[0] not in apart}
        named = {f"{kind}_{link}_bytes": sent for (kind, link), sent in got.items()}
        assert named == {key: sent for key, sent in want.items() if not key.startswith(apart)}
        if "zero_chunk_numel" not in values and values.get("zero_prefetch_bytes", 0) == 0:
            by_formula = +sent_in_step(config, world, stage)
            assert by_formula == {
                k: sent for k, sent in got.items() if k[0] in ("refresh", "gather", "reduce")
            }


def test_the_formula_shares_no_code_with_what_it_judges() -> None:
    found = {name for name, _ in imports(ast.parse((ROOT / "tests/byte_formula.py").read_text()), "", False)}
    assert found and not [
        name for name in found if name.startswith(("megazero.zero", "megazero.plan", "tests"))
    ]


def test_the_scalars_of_the_formula_are_those_that_are_counted() -> None:
    """Of two nodes, each rank sends its row once to the other."""
    (sent,) = layout({"zero_preset": "zeropp"}, cluster(2, 4)).bytes_by_stage
    page = (ROOT / "docs" / "guide" / "parallelism.md").read_text(encoding="utf-8")
    assert f"+ {sent['scalar', INTER]} (Y - 1) h    bytes" in page


TENSORS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CROSSING = {"moe_dispatch_across_nodes": "exact"}
SHARED = {"moe_shared_expert_intermediate_size": 96, "moe_shared_expert_gate": True}


SHARES: tuple[dict[str, object], ...] = (
    {"zero_preset": "zeropp", "expert_model_parallel_size": 4},
    {"zero_preset": "zero3", "expert_model_parallel_size": 2, "recompute_granularity": "full"},
    {"zero_preset": "hpz", "expert_model_parallel_size": 2, "zero_chunk_numel": 10**5, **SHARED},
    {"zero_preset": "zero2", "expert_model_parallel_size": 4, **TENSORS, "recompute_granularity": "full"},
    {
        "zero_preset": "zero1",
        "expert_model_parallel_size": 2,
        **TENSORS,
        **SHARED,
        "recompute_granularity": "mlp",
    },
    {"zero_preset": "zero3", "expert_model_parallel_size": 8, **CROSSING, "recompute_granularity": "full"},
    {"zero_preset": "zero2", "expert_model_parallel_size": 8, **CROSSING, **TENSORS, **SHARED},
    {"zero_preset": "zeropp", "expert_model_parallel_size": 8, "moe_dispatch_across_nodes": "int8"},
)


@pytest.mark.parametrize("values", SHARES, ids=str)
def test_bytes_of_shared_experts(values: dict[str, object]) -> None:
    """Every rank's rows go to all experts alike: the formula that verify takes for rows that it has seen."""
    plan = layout({**EXPERTS, **values}, cluster())
    config, ep = plan.config, plan.grid.ep
    expected = ExpectedBytes(config, plan.base.world, False, plan.wire.block)
    tokens = config.batch.micro_batch_size * config.model.seq_length // plan.base.tp
    k, experts, near = config.model.moe_router_topk, config.model.num_experts, min(ep, 4)
    rows = tokens * k * (near - 1) // near
    there = (1 - comb(experts - experts // 2, k) / comb(experts, k)) * tokens * (ep > 4)  # to the other node
    each_layer = ExpertRows(rows, rows, there, there)
    layers = [i for i, kind in enumerate(model_spec(config.model).by_place) if kind.experts]
    moved = [LayerRows(layer, each_layer) for layer in layers for _ in range(plan.base.micro_batches)]
    (total,) = plan.bytes_by_stage
    ranks = [plan.grid.rank_of(0, dp, tp) for dp in range(plan.grid.dp) for tp in range(plan.grid.tp)]
    each = [expected.bytes_of(rank, 1, False, moved) for rank in ranks]
    assert total["ep", "intra_node"] > 0 and (total["ep", "inter_node"] > 0) == (ep > 4)
    near_enough = {"tp": 1e-3, "ep": 1e-4}
    for (kind, link), sent in total.items():
        mean = sum(want.get(f"{kind}_{link}_bytes", 0) for want in each) / len(each)
        assert sent == pytest.approx(mean, rel=near_enough.get(kind, 0)), (kind, link)


@pytest.mark.parametrize(
    ("shard", "ep", "bytes_per_element"),
    [
        ((1, 1, 1), 4, 18),
        ((1, 1, 8), 2, 2 + 4 + 12 / 4),
        ((4, 8, 8), 4, 2 + 4 / 2 + 12 / 2),
        ((4, 8, 8), 2, 2 / 2 + 4 / 4 + 12 / 4),
        ((8, 8, 8), 4, 18 / 2),
    ],
)
def test_states_of_experts_are_those_of_what_is_left_of_the_shards(
    shard: tuple[int, ...], ep: int, bytes_per_element: float
) -> None:
    values = {**EXPERTS, "zero_shard": shard, "moe_layer_freq": (1,), "expert_model_parallel_size": ep}
    plan = layout(values, cluster())
    held = plan.units(0)
    experts = sum(n * unit.elements for unit, n in held.counts if unit.apart == ep)
    count = sum(p.numel for p in model_spec(plan.config.model).parameters.values() if p.experts)
    assert experts == pytest.approx(count / ep, rel=0.01)
    p, g, os = shard
    others = (held.elements - experts) * (2 / p + 4 / g + 12 / os)
    assert plan.memory.model_states == pytest.approx(others + experts * bytes_per_element, rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "shard", "bytes_per_parameter"),
    [
        ("bf16", (1, 1, 1), 18),
        ("bf16", (1, 1, 8), 2 + 4 + 12 / 8),
        ("bf16", (4, 8, 8), 2 / 4 + 16 / 8),
        ("bf16", (8, 8, 8), 18 / 8),
        ("fp32", (1, 1, 1), 16),
        ("fp32", (1, 1, 8), 4 + 4 + 8 / 8),  # the master weights are a part of the resident parameters
        ("fp32", (4, 8, 8), 4 / 4 + 16 / 8),
        ("fp32", (8, 8, 8), 16 / 8),
    ],
)
def test_model_states_are_those_of_the_shards(
    dtype: str, shard: tuple[int, ...], bytes_per_parameter: float
) -> None:
    on = cluster()
    on = replace(on, device=replace(on.device, fp32_tflops=1.0))
    plan = layout({"zero_shard": shard, "params_dtype": dtype}, on)
    parameters = plan.units(0).elements
    assert plan.memory.model_states == pytest.approx(bytes_per_parameter * parameters, rel=1e-6)


def test_products_in_fp8_have_their_own_rate() -> None:
    """Twice that of bf16. Rowwise, gradients of weights have bf16's; and a cluster file must say the rate."""
    on = cluster()
    fast = {"memory_gbytes_per_s": 1e12, "fp8_tensorwise_tflops": 2.0, "fp8_rowwise_tflops": 2.0}
    on = replace(on, device=replace(on.device, **fast))

    def weights(**values: object) -> float:
        """Seconds of the gradients of a layer's weights, which are those of its products in a forward."""
        fp8 = {"fp8_format": "e4m3", "fp8_min_size": 1, **values} if values else {}
        return layout({"kv_channels": 16, **fp8}, on).base.compute.times[LAYER].weight

    (layer,) = model_spec(layout({"kv_channels": 16}, on).config.model).layers
    most = max(min(p.shape) for p in layer.linears)  # attention's are smaller
    whole, large = (layer.in_fp8(least).matrices for least in (1, most))
    assert 0 < large < whole == layer.matrices
    assert weights(fp8_recipe="tensorwise") == pytest.approx(weights() / 2)
    assert weights(fp8_recipe="rowwise") == pytest.approx(weights())
    part = weights(fp8_recipe="tensorwise", fp8_min_size=most)
    assert part == pytest.approx(weights() * (1 - large / whole / 2))
    with refused("--fp8-recipe blockwise", "device.fp8_blockwise_tflops", "--bf16"):
        weights(fp8_recipe="blockwise")


def test_matrices_have_one_moment_and_cross_nodes_twice() -> None:
    plan, adamw = (
        layout({"zero_shard": (1, 1, 8), "optimizer": name}, cluster()) for name in ("muon", "adamw")
    )
    matrices = plan.units(0).matrices_apart.total()
    assert adamw.memory.optimizer - plan.memory.optimizer == pytest.approx(4 * matrices / 8, rel=1e-6)
    (total,), (plain,) = plan.bytes_by_stage, adamw.bytes_by_stage
    more = {key: sent - plain[key] for key, sent in total.items() if sent != plain[key]}
    held = matrices / 8 * 2  # bytes of bf16
    assert more == {
        ("update", "intra_node"): pytest.approx(2 * held * 3 / 4, rel=1e-3),
        ("update", "inter_node"): pytest.approx(2 * held / 2, rel=1e-3),
    }
    assert simulate(plan).bill["update"] > simulate(adamw).bill["update"]


SHARED = {**EXPERTS, "expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    "values",
    [
        {"zero_shard": (1, 1, 8)},
        {"zero_shard": (1, 1, 8), **SHARED},
        {"zero_shard": (4, 4, 4), **SHARED},
        {
            **{"zero_shard": (1, 1, 4), **SHARED, "tensor_model_parallel_size": 2},
            **{"sequence_parallel": True, "expert_model_parallel_size": 4},
        },
    ],
    ids=["dense", "shared experts", "inside nodes", "tensor parallel"],
)
def test_a_plans_bytes_of_updates_are_near_those_that_verify_expects(values: dict[str, object]) -> None:
    """The plan has means, of owners that hold no more of a matrix than others; verify has each rank's own."""
    plan = layout({**values, "optimizer": "muon"}, cluster())
    expected = ExpectedBytes(plan.config, plan.base.world, False, plan.wire.block)
    each = [expected.bytes_of(rank, 1, False) for rank in range(8)]
    for link in ("intra_node", "inter_node"):
        mean = sum(want.get(f"update_{link}_bytes", 0) for want in each) / 8
        planned = plan.bytes_by_stage[0]["update", link]
        assert 0.2 * planned <= mean <= 1.05 * planned
    assert plan.bytes_by_stage[0]["update", "intra_node"]


@pytest.mark.parametrize(("os", "of_experts"), [(1, 1), (8, 4)])
def test_experts_that_ranks_share_have_the_moments_of_their_own_shards(os: int, of_experts: int) -> None:
    """What is left of OS for experts is never below one rank."""
    muon, adamw = (
        layout({"zero_shard": (1, 1, os), "optimizer": name, **SHARED}, cluster())
        for name in ("muon", "adamw")
    )
    dense, experts = (muon.units(0).matrices_apart[apart] for apart in (1, 2))
    saved = 4 * (dense / os + experts / of_experts)
    assert adamw.memory.optimizer - muon.memory.optimizer == pytest.approx(saved, rel=1e-6)


def test_the_planner_chooses_chunks_of_the_loss_by_what_they_save() -> None:
    long = {"seq_length": 16384, "max_position_embeddings": 16384, "zero_preset": "zero3"}
    large, auto = {**long, "vocab_size": 200_000}, {"loss_chunk_tokens": AUTO}
    chosen, whole, least = (
        layout({**large, **more}, cluster()) for more in (auto, {}, {"loss_chunk_tokens": 1024})
    )
    assert chosen.loss_chunk in (1024, 2048, 4096, 8192) and whole.loss_chunk is None
    assert 0.95 * chosen.memory.total <= least.memory.total < 0.95 * whole.memory.total
    assert chosen.config.training.loss_chunk_tokens == chosen.loss_chunk
    assert f"--loss-chunk-tokens {chosen.loss_chunk}" in " ".join(layout_flags(chosen.config))
    double = layout({**large, "loss_chunk_tokens": 2 * chosen.loss_chunk}, cluster())
    assert 0.95 * double.memory.total > least.memory.total, "it is the largest that will do"
    assert layout({**long, **auto, "vocab_size": 64}, cluster()).loss_chunk is None


def test_a_loss_in_chunks_gathers_the_heads_input_once_less() -> None:
    sent = []
    for size in (None, 5):
        sequence = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "loss_chunk_tokens": size}
        plan = layout(sequence, cluster())
        expected = ExpectedBytes(plan.config, plan.base.world, False, plan.wire.block).bytes_of(0, 1, False)
        sent.append((plan.bytes_by_stage[0]["tp", "intra_node"], expected["tp_intra_node_bytes"]))
    model = plan.config.model
    once = model.seq_length // 2 * model.hidden_size * 2 * plan.base.micro_batches
    assert [a - b for a, b in zip(*sent, strict=True)] == [once, once]


def test_a_recompute_takes_the_seconds_of_what_it_repeats() -> None:
    """With a memory that takes none, of a Llama layer: of its four h x h and three h x ffn, gate and up."""
    on = cluster()
    on = replace(on, device=replace(on.device, memory_gbytes_per_s=1e9))
    times = {
        each: layout({"model_family": "llama", "recompute_granularity": each}, on).base.compute.times[LAYER]
        for each in RECOMPUTE
    }
    again = {each: found.backward.recompute for each, found in times.items()}
    h, ffn = (
        getattr(layout({"model_family": "llama"}, on).config.model, n)
        for n in ("hidden_size", "ffn_hidden_size")
    )
    assert again["none"] == 0 < again["selective"] and again["full"] == times["none"].forward.compute
    share = again["mlp"] / (again["full"] - again["selective"])
    assert share == pytest.approx(2 * ffn / (4 * h + 3 * ffn), rel=1e-3)


def test_gradients_in_the_forward_shift_the_heads_time() -> None:
    whole, chunks = (
        layout({"loss_chunk_tokens": size}, cluster()).base.compute.times["head"] for size in (None, 16)
    )
    every = whole.forward.compute + whole.backward.compute + whole.weight
    assert chunks.forward.compute == pytest.approx(every)
    assert chunks.weight == sum(chunks.backward) == 0 < whole.weight


def test_each_stage_has_the_seconds_of_its_own_samples() -> None:
    on, stages = cluster(), ('{"until": 64, "seq-length": 32}', "{}")
    short, full = stage_lines(layout({**PLANNED, "data_stages": stages, "train_iters": 5}, on))
    alone = {length: simulate(layout({**PLANNED, "seq_length": length}, on)).seconds for length in (32, 64)}
    names(short, "from sample 0 on: 2 steps of 32 x 32 tokens", f"{alone[32]:.3g} s each")
    names(full, "from sample 64 on: 3 steps of 32 x 64 tokens", f"{alone[64]:.3g} s each")
    assert alone[32] < alone[64] and stage_lines(layout(PLANNED, on)) == []


def test_without_links_a_step_is_its_compute() -> None:
    fast = replace(cluster(), intra_node=IntraNode(1e9, 0.0), inter_node=InterNode(1e10, None, 0.0))
    fast = replace(fast, device=replace(fast.device, codec_gbytes_per_s=1e9))
    plan = layout({"zero_preset": "zero3"}, fast)
    timing, base = simulate(plan), plan.base
    compute = base.micro_batches * sum(sum(own) for own in base.own_seconds.values())
    assert timing.seconds - timing.bill["update"] == pytest.approx(compute, rel=1e-3)
    assert timing.bill["compute"] == pytest.approx(compute, rel=1e-6)


@pytest.mark.parametrize(
    "values", [{"zero_preset": "zero3"}, {"pipeline_model_parallel_size": 2, "zero_preset": "zero1"}]
)
def test_the_bill_is_the_step_and_hiding_helps(values: dict[str, object]) -> None:
    plan = layout(values, cluster())
    timing = simulate(plan)
    assert sum(timing.bill.values()) == pytest.approx(timing.seconds)
    for worse in (Execution(ahead=False), Execution(behind=False), Execution(early_refresh=True)):
        assert simulate(plan, worse).seconds >= timing.seconds - 1e-12
    assert simulate(plan, Execution(False, False, True)).seconds > timing.seconds


@pytest.mark.parametrize(
    "values",
    [
        {"zero_preset": "zero3", "global_batch_size": 512},
        {"pipeline_model_parallel_size": 4, "zero_preset": "zero1", "global_batch_size": 200},
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 3,
            "global_batch_size": 400,
        },
    ],
)
def test_long_steps_follow_from_their_period(
    values: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = layout(values, cluster())
    assert len(plan.base.sampled) == 2
    short = simulate(plan).seconds
    monkeypatch.setattr("megazero.plan.base_layout.SAMPLED", 10**6)
    assert simulate(layout(values, cluster())).seconds == pytest.approx(short, rel=0.01)


ONE = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
EVERYTHING: tuple[tuple[str, Cluster, dict[str, object]], ...] = (
    ("zeropp", cluster(2, 2, 0.2), {"num_layers": 4, "global_batch_size": 8, "zero_prefetch_bytes": 0}),
    ("zeropp", cluster(2, 2, 0.2), {"num_layers": 4, "global_batch_size": 8}),
    ("aggressive", cluster(2, 2, 0.2), {"num_layers": 4, "global_batch_size": 8}),
    ("zeropp", cluster(4, 1, 0.05), {"num_layers": 4, "global_batch_size": 8}),
    ("zeropp", cluster(2, 2, 5.0), {"num_layers": 4, "global_batch_size": 4, **EXPERTS}),
    (
        "exact",
        cluster(2, 2, 0.1),
        {
            **{"num_layers": 4, "global_batch_size": 8, "train_iters": None, "train_samples": 800},
            **{"outer_interval": 8, "outer_meet": "local:2"},
        },
    ),
)


LOST = 0.01  # of the step time: what the best found may take longer than the best of all


@pytest.mark.parametrize(
    ("policy", "on", "more"), EVERYTHING, ids=lambda value: getattr(value, "name", str(value))
)
def test_search_finds_what_simulating_everything_finds(
    policy: str, on: Cluster, more: dict[str, object]
) -> None:
    """The estimates that choose what is simulated lose at most LOST. Those of memory are lower bounds."""
    on = replace(on, device=replace(on.device, contention=0.5))
    values = {"zero_prefetch_bytes": 256 << 20, **MODEL, **more, "ranks_per_node": on.ranks_per_node}
    del values["micro_batch_size"]
    search, everything = Search(values, on, policy), []
    for base in search.bases():
        for choice in search.choices(base):
            for plan in search.layouts(base, choice):
                memory = least_memory(base, choice.shard)
                assert least_memory(base) <= memory <= plan.memory.total
                everything += [simulate(plan).seconds] * plan.fits
    best = [found.timing.seconds for found in Search(values, on, policy).best(5)]
    assert len(everything) > 2 * SIMULATED
    assert min(everything) <= best[0] <= (1 + LOST) * min(everything)
    assert best[4] <= (1 + 2 * LOST) * sorted(everything)[4]


def test_a_draft_is_what_the_command_line_completes() -> None:
    """A draft changes a few options of one configuration; the rules are asked where it matters."""
    on = cluster(2, 2)
    values = {**MODEL, "num_layers": 4, "global_batch_size": 8, "ranks_per_node": 2, **EXPERTS}
    del values["micro_batch_size"]
    search, legal, refused = Search(values, on, "exact"), 0, 0
    for choice in search.options():
        draft = search._template.changed(choice)
        try:
            assert make_config({**values, **choice}, search.world) == draft
            legal += 1
            assert not judge(draft, search.world).errors
        except ConfigError:
            refused += 1
            assert judge(draft, search.world).errors
    assert legal == len(list(search.bases())) and refused


@pytest.mark.parametrize(
    ("given", "shards"),
    [
        ({"pipeline_model_parallel_size": 2}, None),
        ({**ONE, "zero_stage": 3}, (8, 8, 8)),
        ({**ONE, "zero_preset": "zeropp"}, (4, 4, 8)),
    ],
)
def test_what_is_given_stays_and_flags_are_legal(
    given: dict[str, object], shards: tuple[int, int, int] | None
) -> None:
    run = ["--ranks-per-node", "4", "--lr", "1e-3", "--train-iters", "5", "--mock-data"]
    for found in Search({**MODEL, **given, "ranks_per_node": 4}, cluster(), "aggressive").best():
        config, layout = parse([*WORDS, *layout_flags(found.layout.config), *run], World(8, 4)), found.layout
        assert config.parallel.pipeline_model_parallel_size == given["pipeline_model_parallel_size"]
        assert config.shards(World(8, 4)) == layout.shards and config.wire(World(8, 4)) == layout.wire
        assert config.pipeline_schedule == layout.base.schedule_name
        assert shards in (None, layout.shards.factors)


def test_measured_collectives_stand_above_links() -> None:
    rows = [MeasuredCollective("gather", 2, 2, size, time) for size, time in ((1000, 1.0), (3000, 2.0))]
    known = Collectives(replace(cluster(), collectives=tuple(rows)))
    assert known.cost("gather", 2, 2, 2000).seconds == pytest.approx(1.5)
    assert known.cost("gather", 2, 2, 10).seconds == 1.0
    assert known.cost("gather", 2, 2, 6000).seconds == pytest.approx(4.0)
    wider = known.cost("gather", 4, 4, 3000).seconds / known.cost("gather", 2, 2, 3000).seconds
    assert wider == pytest.approx(known.by_links("gather", 4, 4, 3000) / known.by_links("gather", 2, 2, 3000))
    assert known.cost("sum", 2, 2, 2000).seconds == known.by_links("sum", 2, 2, 2000)


def test_latency_leaves_the_link_to_the_other_lane() -> None:
    """Of a lane, hops follow each other; the lanes share the rate alone."""
    gathers, reductions, links = _Lane(), _Lane(), dict[str, float]()
    hop = TimedHop("inter_node", 1.5, latency=1.0)
    assert [gathers.run((hop,), 0.0, links) for _ in range(2)] == [1.5, 3.0]
    assert reductions.run((hop,), 0.0, links) == 3.5, "its bytes come after the other's second message"


def test_latency_is_what_no_bytes_would_take() -> None:
    """Measured on a link of 20 ms and 1 GB/s, with a millisecond of processors."""
    rows = [
        MeasuredCollective("gather", 2, 2, size, 0.041 + size / 1e9, 0.001) for size in (4096, 10**6, 10**7)
    ]
    known = Collectives(replace(cluster(), collectives=tuple(rows)))
    for sent in (1000, 10**6, 10**8):
        assert known.cost("gather", 2, 2, sent).latency == pytest.approx(0.040)
    at_once = Collectives(replace(cluster(), inter_node=InterNode(10.0, None, 500.0)))
    assert at_once.cost("gather", 3, 3, 10**6).latency == pytest.approx(2 * 500e-6)


def test_clusters_of_the_package_are_legal() -> None:
    assert len(known_clusters()) >= 7
    for name in known_clusters():
        assert load_cluster(name).world_size > 0


def test_every_fault_of_a_cluster_file_is_reported_at_once() -> None:
    text = """
name: lab
nodes: 0
ranks_per_node: 4
colour: red
device: {name: card, memory_gib: -3, memory_gbytes_per_s: 1e-320, matmul_efficiency: 1.5, memroy: 2}
intra_node: {latency_us: x}
collectives: [{operation: gathr, ranks: 2, nodes: 1, bytes: 1%s}]
""" % ("0" * 400)
    faults = {
        *(
            "nodes 0",
            "colour",
            "memory_gib -3",
            "memory_gbytes_per_s 1e-320",
            "matmul_efficiency 1.5",
            "memroy",
        ),
        *("latency_us", "gbytes_per_s", "gbits_per_s", "gathr", "bytes", "seconds"),
    }
    with refused(*faults):
        parse_cluster(text, "lab.yaml")
    with refused(f"nodes {10**20}", "131072"):
        parse_cluster(text.replace("nodes: 0", f"nodes: {10**20}"), "lab.yaml")


def write_cluster(path: Path, gib: float) -> str:
    text = f"""
name: lab
nodes: 2
ranks_per_node: 4
device:
  {{name: card, memory_gib: {gib}, reserved_gib: 0, memory_gbytes_per_s: 100, matmul_efficiency: 0.5, bf16_tflops: 1}}
intra_node: {{gbytes_per_s: 10}}
inter_node: {{gbits_per_s: 1}}
"""
    path.write_text(text)
    return str(path)


def plan(tmp_path: Path, gib: float, *more: str) -> tuple[int, Path]:
    """Plan for a cluster whose devices have so much memory. Return the status and the folder."""
    out = tmp_path / "out"
    words = [*WORDS, "--cluster", write_cluster(tmp_path / "lab.yaml", gib), "--plan-output", str(out)]
    return main([*words, *more]), out


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ("--tensor-model-parallel-size", "1")
    status, out = plan(tmp_path, 1, *one, "--zero-preset", "zero3")
    assert status == 0
    said = capsys.readouterr().out
    assert shlex.join(json.loads((out / "plan.json").read_text())["layouts"][0]["flags"]) in said


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(tmp_path, 0.06, *ALONE, "--zero-preset", "ddp")[0] == 1
    names(
        capsys.readouterr().err,
        "without --zero-preset ddp",
        "TP 1, PP 1, DP 8, CP 4 x 2 of these, P,G,OS 8,8,8",
    )
    assert plan(tmp_path, 0.06, *ALONE)[0] == 0, "what was advised fits"
    assert plan(tmp_path, 0.031, *ALONE, "--recompute-granularity", "full")[0] == 1
    names(capsys.readouterr().err, "2 more nodes")


def test_faults_of_a_command_line_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--num-layerz", "3", "--cluster", "dgx2", "--loss-policy", "some"]) == 2
    wrong = ("num-layers", "--cluster dgx2", "--loss-policy some", "--global-batch-size", "--vocab-size")
    names(capsys.readouterr().err, *wrong)
    v100 = [*WORDS, "--cluster", "dgx2-v100-1ib"]
    assert main(v100) == 2
    names(capsys.readouterr().err, "--fp16")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--link-rates 10 --link-delays 1",
            ["--link-rates has no effect", "--link-delays has no effect", "--pays"],
        ),
        ("--pays --loss-policy zeropp", ["leave out --loss-policy"]),
        ("--pays --page a.html", ["leave out one of them"]),
        ("--page a.html --loss-policy int8", ["--page tries every scheme"]),
        ("--pays --link-rates 10,0 --link-delays -5", ["--link-rates 0", "--link-delays -5"]),
        ("--pays --zero-preset zeropp --zero-quantized-weights", ["leave out --zero-"]),
        ("--topology leaves --price 2", ["--topology", "SLURM", "--price", "worth"]),
    ],
)
def test_flags_that_do_not_go_together(
    words: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, 1, *words.split())[0] == 2
    names(capsys.readouterr().err, *said)
