"""A step on hosts whose ranks share processors: work is conserved, and nothing is hidden for nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megazero.config import World, make_config
from megazero.config.options.cluster import (
    Cluster,
    Cores,
    Device,
    InterNode,
    IntraNode,
    MeasuredCodec,
    MeasuredCollective,
)
from megazero.mesh.grid import INTER, INTRA
from megazero.plan.base_layout import BaseLayout
from megazero.plan.gathers import gathers
from megazero.plan.layout import Chain, Layout, TimedHop
from megazero.plan.search import Search, least_seconds
from megazero.plan.seconds import Collectives
from megazero.plan.shared_processors import Machine, fair_level
from megazero.plan.simulate import BILL, ENGINE, _Lane, _run, simulate
from megazero.pp.schedules import make_schedule, sends
from tests.sizes import PLANNED

MODEL = {**PLANNED, "num_layers": 4, "num_attention_heads": 4, "global_batch_size": 16, "ranks_per_node": 2}
CODECS = tuple(MeasuredCodec(bits, 4.0, 2.0, 3.0) for bits in (32, 8, 4))


def lab(count: int | None, seconds: float = 1e-6, busy: float = 0.0) -> Cluster:
    """Two nodes of 2 on one host of ``count`` processors; None: with a device each. A MB takes ``seconds``."""
    rows = [
        MeasuredCollective(operation, 2, nodes, size, seconds * size / 1e6, busy * size / 1e6)
        for operation in ("gather", "exchange", "message", "sum")
        for nodes in (1, 2)
        for size in (1000, 10**7)
    ]
    device = Device("core", 16.0, 10.0, 1.0, fp32_tflops=0.05, reserved_gib=0.0, update_gbytes_per_s=1e6)
    link, across = IntraNode(10.0, 0.0), InterNode(10.0, None, 0.0)
    cores = None if count is None else Cores(count, 4)
    return Cluster("lab", 2, 2, device, link, across, tuple(rows), (), CODECS, cores)


def layout(on: Cluster, **values: object) -> Layout:
    world = World(4, 2)
    config = make_config({**MODEL, **values}, world)
    return Layout(BaseLayout(config, world, on, Collectives(on)), config.zero)


def test_a_transform_costs_once_for_what_is_sent_and_once_for_the_sum() -> None:
    """Not once for every message of the sum. Weights go through none unless asked for."""
    on = replace(lab(None), codecs=tuple(replace(row, transform_ns=5.0) for row in CODECS))

    def seconds(**values: object) -> tuple[float, float, float]:
        plan = layout(on, zero_preset="zeropp", zero_exact_numel=0, **values)
        unit = next(unit for unit in plan.units(0).shapes if unit.quantised)
        chains = plan.chains_of(unit)
        return unit.elements, *(sum(hop.seconds for hop in c) for c in (chains.refresh, chains.last))  # type: ignore

    n, refresh, last = seconds()
    _, same, mixed = seconds(zero_gradient_transform="hadamard")
    # Half of a node's half goes across nodes; the sum of as much comes back.
    assert same == refresh and mixed - last == pytest.approx((n / 4 + n / 4) * 5e-9)
    _, differences, _ = seconds(zero_weight_transform="hadamard")
    # An OS slice is encoded, a P slice decoded.
    assert differences - refresh == pytest.approx((n / 4 + n / 2) * 5e-9)


def test_all_get_an_equal_share_at_most() -> None:
    assert fair_level([(4, 1.0)], 2.0) == pytest.approx(0.5)
    assert fair_level([(4, 0.25), (4, 1.0)], 2.0) == pytest.approx(0.25)
    assert fair_level([(4, 0.1), (2, 1.0)], 2.0) == pytest.approx(0.8), "who wants little leaves the rest"
    assert fair_level([(2, 0.5)], 2.0) >= 0.5 and fair_level([], 2.0) == 1.0


def test_without_links_ranks_that_compute_at_once_take_what_was_measured() -> None:
    plan = layout(lab(2, 1e-12), zero_preset="zero3")
    timing = simulate(plan)
    spent = sum(timing.bill[name] for name in ("compute", "update"))
    compute = plan.base.micro_batches * sum(
        plan.base.stage_seconds[0][kind] for kind in plan.base.stage_seconds[0] if str(kind.value) in "FB"
    )
    assert timing.bill["compute"] > compute, "gradients are taken from autograd, too"
    assert timing.seconds == pytest.approx(spent + timing.bill["gather"] + timing.bill["reduce"], rel=1e-3)
    assert sum(timing.bill.values()) == pytest.approx(timing.seconds)


def test_a_bubble_is_cheaper_where_others_have_the_processors() -> None:
    values = {"pipeline_model_parallel_size": 4, "global_batch_size": 4, "zero_preset": "ddp"}
    alone, shared = (simulate(layout(lab(count), **values)) for count in (4, 2))
    assert shared.seconds < 0.8 * alone.seconds, "two of four at a time lose nothing"
    assert shared.seconds >= layout(lab(2), **values).base.least_seconds


@pytest.mark.parametrize("busy", [0.0, 0.02])
def test_what_sends_robs_what_computes(busy: float) -> None:
    """A MB over a link takes 40 ms. Behind compute that costs nothing, unless it keeps processors busy."""
    free, robbed = (
        simulate(layout(lab(2, 0.04, b), zero_preset="zero2", global_batch_size=32)) for b in (0.0, busy)
    )
    assert (robbed.seconds > 1.05 * free.seconds) == (busy > 0)


def test_one_rank_of_a_node_has_the_whole_link() -> None:
    """It was measured with all ranks of the node sending at once."""
    plan = layout(lab(2), pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True)
    machine = Machine(plan, 1, BILL)
    machine.send(0, TimedHop(INTER, 1.0, 0.01), "gather")
    assert machine._rates([False, False])[1] == [pytest.approx(2.0)]
    machine.send(1, TimedHop(INTER, 1.0, 0.01), "gather")
    assert machine._rates([False, False])[1] == [pytest.approx(1.0)] * 2
    # bound by the processors, of which ranks that wait leave it more
    machine.send(1, TimedHop(INTRA, 1.0, 0.5), "gather")
    assert machine._rates([False, False])[1][2] > 1.0 > machine._rates([True, True])[1][2]


def test_what_is_on_its_way_shares_nothing_but_a_communicators_threads() -> None:
    """Half a second of bytes and one of latency: two on a link have half its rate each, and then the same second."""

    def seconds(*lanes: str) -> list[float]:
        machine = Machine(layout(lab(2)), 1, BILL)
        sent = [machine.send(0, TimedHop(INTER, 1.5, 0.001, 1.0), lane) for lane in lanes]
        ends = [0.0] * len(sent)
        while machine.transfers:
            machine._advance([None], [0.0])
            ends = [end or machine.now * t.done for end, t in zip(ends, sent, strict=True)]
        return ends

    assert seconds("gather") == pytest.approx([1.5])
    assert seconds("gather", "reduce") == pytest.approx([2.0, 2.0])
    assert seconds("gather", "gather", "gather") == pytest.approx([2.0, 2.0, 3.5])


def test_messages_are_those_of_the_schedule() -> None:
    for schedule in ("1f1b", "zb-h1"):
        plan = layout(lab(2), pipeline_model_parallel_size=4, pipeline_schedule=schedule)
        machine = Machine(plan, 4, BILL)
        machine.run()
        wanted = sends(make_schedule(schedule, 4, 1, 4), 4)
        assert len(machine.messages) == sum(len(messages) for messages in wanted.values())


def test_bounds_hold_and_search_finds_the_best() -> None:
    values = {**MODEL, "global_batch_size": 8, "tensor_model_parallel_size": 1, "num_layers": 2}
    values |= {"recompute_granularity": "none", "micro_batch_size": 2}
    on = lab(2, 0.02, 0.005)
    search, everything = Search(values, on, "exact"), []
    for base in Search(values, on, "exact").bases():
        for choice, least in search.shard_choices(base):
            for plan, _ in search.layouts(choice):
                seconds = simulate(plan).seconds
                assert max(least, least_seconds(plan)) <= seconds * (1 + 1e-9)
                everything.append(seconds)
    found = [f.timing.seconds for f in search.best(3)]
    assert sorted(found) == pytest.approx(sorted(everything)[:3])


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("preset", ["hpz", "zero3", "zero1"])
def test_a_step_sends_each_message_as_often_as_the_engine(
    preset: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit is refreshed once, whatever its gathers, and summed across nodes with the last micro-batch alone."""
    plan = layout(lab(None), zero_preset=preset, global_batch_size=4 * micro_batches, zero_prefetch_bytes=0)
    sent = Counter[str]()

    def note(lane: _Lane, chain: Chain, start: float, links: dict[str, float]) -> float:
        for hop in chain:
            sent[hop.link] += hop.seconds
        return start

    monkeypatch.setattr(_Lane, "run", note)
    _run(plan, ENGINE, micro_batches)
    works = [plan.chains_of(unit) for unit in plan.units(0).shapes]
    often = gathers(plan.copies(0), plan.program(0, micro_batches), [work.ahead_bytes for work in works])
    expected = Counter[str]()
    for number, work in enumerate(works):
        for chain, times in (
            (work.refresh, 1), (work.gather, often[number]), (work.every, micro_batches - 1), (work.last, 1),
        ):  # fmt: skip
            for hop in chain:
                expected[hop.link] += times * hop.seconds
    assert sent == pytest.approx(expected) and sent[INTER] > 0
