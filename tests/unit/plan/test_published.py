"""The planner against published runs: errors of the runs that did not set rates, and the parts that it counts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

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
from benchmarks.planning.published_page import FAR, PAGE, runs_table
from megazero.config.options.cluster import DATA_SHEET, PUBLISHED, known_clusters, load_cluster
from megazero.plan.report import source_of_rates
from megazero.plan.simulate import simulate


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
    for source in ("torchtitan, December 2024", "SDP4Bit, table 2", "fms-fsdp, H100"):
        found = [predict(run) for run in runs() if run.source == source]
        assert runs_table(found) in page, "run python -m benchmarks.planning.published_page"


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
        {"product_us": 0.0},
        {"attention_efficiency": 1.0},
        {"attention_half_keys": 0.0},
        {"memory_efficiency": 1.0},
        {"contention": 0.0},
    ],
    ids=lambda each: next(iter(each)),
)
def test_each_part_takes_time(without: dict[str, float]) -> None:
    run = run_of("torchtitan, December")
    assert predict(replace(run, device=without)).predicted > 1.001 * predict(run).predicted


def test_compiled_layers_take_less() -> None:
    run = run_of("torchtitan, December")
    assert predict(replace(run, compile=True)).predicted > 1.02 * predict(run).predicted


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


def test_where_rates_come_from_is_said() -> None:
    unpublished = {"two-sparks"}
    for name in known_clusters():
        assert load_cluster(name).rates == (DATA_SHEET if name in unpublished else PUBLISHED), name
        said = "data sheets" if name in unpublished else "published runs reached"
        assert said in source_of_rates(load_cluster(name))
    assert "data sheets" in source_of_rates(replace(load_cluster("h100"), rates=DATA_SHEET))
    assert "calibrated" in source_of_rates(replace(load_cluster("h100"), rates="calibrated"))
