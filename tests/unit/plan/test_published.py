"""The planner against published runs: errors of the runs that did not set rates, and the parts that it counts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.planning.page import FAR, PAGE, errors_table, rates_table
from benchmarks.planning.published import (
    SYSTEMS,
    Errors,
    Outcome,
    Ring,
    Run,
    by_source,
    layout_of,
    predict,
    runs,
)
from megazero.config import World, make_config
from megazero.config.options.cluster import (
    DATA_SHEET,
    PUBLISHED,
    Cluster,
    known_clusters,
    load_cluster,
    parse_cluster,
)
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.memory import GIB
from megazero.plan.options import with_stand_ins
from megazero.plan.report import source_of_rates
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import simulate
from tests import ROOT


@cache
def held_out() -> tuple[Outcome, ...]:
    return tuple(predict(run) for run in runs() if run.held_out)


def run_of(source: str, number: int = 0) -> Run:
    return [run for run in runs() if run.source.startswith(source)][number]


def test_held_out_runs_are_predicted() -> None:
    errors = Errors.of(held_out())
    assert errors.number > 70
    assert errors.median < 0.10
    assert abs(errors.bias) < 0.05
    far = [outcome.run for outcome in held_out() if abs(outcome.ratio - 1) > FAR]
    assert [run.system for run in far] == ["deepspeed zero-3"]


def test_no_source_is_off_on_one_side() -> None:
    for source, outcomes in by_source(held_out()).items():
        assert abs(Errors.of(outcomes).bias) < 0.22, source


def test_the_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = [predict(run) for run in runs()]
    for table in (errors_table(found), rates_table()):
        assert table in page, "run python -m benchmarks.planning.page"


def test_the_cluster_file_of_the_guide_is_legal() -> None:
    text = (ROOT / "docs" / "guide" / "planning.md").read_text(encoding="utf-8")
    cluster = parse_cluster(text.split("```yaml\n")[1].split("```")[0], "docs/guide/planning.md")
    assert cluster.collectives and cluster.layers


def test_data_sheets_are_too_fast() -> None:
    run = run_of("torchtitan, December")
    assert predict(replace(run, sheet=True)).ratio > 1.4
    assert 0.9 < predict(run).ratio < 1.1


def test_a_ratio_above_one_is_too_fast_in_every_unit() -> None:
    for source in ("torchtitan", "NeMo", "nanotron", "Megatron", "ZeRO++"):
        run = run_of(source)
        twice = replace(run, measured=run.measured * (0.5 if run.unit != "seconds" else 2))
        assert predict(twice).ratio == pytest.approx(2 * predict(run).ratio), run.unit


@pytest.mark.parametrize(
    "without",
    [
        {"device": {"product_us": 0.0}},
        {"device": {"attention_efficiency": 1.0}},
        {"device": {"attention_half_keys": 0.0}},
        {"device": {"memory_efficiency": 1.0}},
        {"device": {"contention": 0.0}},
        {"compile": True},
    ],
    ids=str,
)
def test_each_part_takes_time(without: dict[str, Any]) -> None:
    run = run_of("torchtitan, December")
    assert predict(replace(run, **without)).predicted > 1.001 * predict(run).predicted


def test_all_to_alls_take_their_share_of_the_link() -> None:
    run, slow = run_of("SDP4Bit", 1), {"exchange_share": 0.5}
    bills = [predict(replace(run, inter={**run.inter, **inter})).timing.bill for inter in ({}, slow)]
    assert bills[1]["reduce"] > 1.5 * bills[0]["reduce"]


def test_messages_that_computing_hides_still_cost_it() -> None:
    run = run_of("llm-foundry, H100", 30)
    timing = predict(run).timing
    free = predict(replace(run, device={**run.device, "contention": 0.0})).timing
    assert timing.bill["contention"] > free.bill["contention"] >= 0
    more = timing.bill["contention"] - free.bill["contention"]
    assert timing.seconds - free.seconds == pytest.approx(more)


def test_a_ring_waits_for_all_of_its_ranks() -> None:
    run = run_of("AMSP", 3)
    layout = layout_of(run, SYSTEMS[run.system])
    assert isinstance(layout, Ring) and layout.tensors == 7
    unit = layout.units(0).shapes[1]
    latency = load_cluster("a800-amsp").inter_node.latency_us / 1e6
    assert layout.chains_of(unit).gather[0].latency == pytest.approx(7 * 1023 * latency)
    by_hops = layout_of(run, replace(SYSTEMS[run.system], rings=""))
    assert simulate(layout).seconds > simulate(by_hops).seconds


# ZeRO++ (arXiv 2306.10209), table 4, on 4 nodes of 16 V100 of 32 GB: MiCS of 18B alone runs out of memory. Assumed:
# the paper says that layers and hidden sizes were adjusted to the sizes of models.
GPTS = {
    "18B": {"num_layers": 40, "hidden_size": 6144, "num_attention_heads": 48},
    "7.5B": {"num_layers": 37, "hidden_size": 4096, "num_attention_heads": 32},
}
SYSTEMS_OF_TABLE_4 = {"ZeRO-3": (64, 64, 64), "hpZ": (16, 64, 64), "MiCS": (16, 16, 16)}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


@pytest.mark.parametrize("model", GPTS)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("system", SYSTEMS_OF_TABLE_4)
def test_who_runs_out_of_memory(system: str, samples: int, model: str) -> None:
    values = {**GPTS[model], "model_family": "gpt", **NO_DROPOUT, "vocab_size": 50257, "seq_length": 1024}
    values |= {"params_dtype": "fp16", "micro_batch_size": samples, "global_batch_size": 64 * samples}
    on = load_cluster("dgx2-v100-8ib").with_nodes(4)
    plan = layout_on(
        on, {**values, "zero_shard": SYSTEMS_OF_TABLE_4[system], "recompute_granularity": "none"}
    )
    assert (plan.memory.total <= 30.5 * GIB) == ((model, system) != ("18B", "MiCS"))


def test_the_layout_of_bloom_fits() -> None:
    """176 billion parameters on 48 nodes of 8 A100. Its own positions, ALiBi, had no parameters."""
    model = {"model_family": "gpt", "num_layers": 70, "hidden_size": 14336, "num_attention_heads": 112}
    data = {"vocab_size": 250880, "seq_length": 2048, "params_dtype": "bf16", "global_batch_size": 2048}
    sizes = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 12, "micro_batch_size": 2}
    how = {"pipeline_partition": "type:transformer|embedding", "recompute_granularity": "full"}
    assert layout_on(load_cluster("a100"), {**model, **data, **sizes, **how, "zero_preset": "zero1"}).fits


def layout_on(on: Cluster, values: dict[str, Any]) -> Layout:
    """Return the layout that the options, by name, mean on a cluster."""
    world = World(on.world_size, on.ranks_per_node)
    config = make_config(with_stand_ins({**values, "ranks_per_node": on.ranks_per_node}), world)
    return Layout(BaseLayout(config, world, on, Collectives(on)), config.zero)


def test_where_rates_come_from_is_said() -> None:
    unpublished = {"two-sparks"}
    for name in known_clusters():
        assert load_cluster(name).rates == (DATA_SHEET if name in unpublished else PUBLISHED), name
        said = "data sheets" if name in unpublished else "published runs reached"
        assert said in source_of_rates(load_cluster(name))
    assert "data sheets" in source_of_rates(replace(load_cluster("h100"), rates=DATA_SHEET))
    assert "calibrated" in source_of_rates(replace(load_cluster("h100"), rates="calibrated"))
