"""benchmarks/planning/shared_processors.py: work is conserved, and nothing is hidden for nothing."""

from __future__ import annotations

import pytest

from benchmarks.planning.shared_processors import Machine, fair_level, predict
from megazero.config.options.cluster import (
    Cluster,
    Cores,
)
from megazero.mesh.grid import INTER, INTRA
from megazero.plan.layout import TimedHop
from megazero.pp.schedules import make_schedule, sends
from tests.unit.plan.test_chains import lab as devices
from tests.unit.plan.test_chains import layout


def lab(count: int | None, seconds: float = 1e-6, busy: float = 0.0) -> Cluster:
    """The chains' cluster on one host of ``count`` processors; None: with a device each."""
    return devices(None if count is None else Cores(count, 4), seconds, busy)


def test_all_get_an_equal_share_at_most() -> None:
    assert fair_level([(4, 1.0)], 2.0) == pytest.approx(0.5)
    assert fair_level([(4, 0.25), (4, 1.0)], 2.0) == pytest.approx(0.25)
    assert fair_level([(4, 0.1), (2, 1.0)], 2.0) == pytest.approx(0.8), "who wants little leaves the rest"
    assert fair_level([(2, 0.5)], 2.0) >= 0.5 and fair_level([], 2.0) == 1.0


def test_without_links_ranks_that_compute_at_once_take_what_was_measured() -> None:
    plan = layout(lab(2, 1e-12), zero_preset="zero3")
    timing = predict(plan)
    spent = sum(timing.bill[name] for name in ("compute", "update"))
    compute = plan.base.micro_batches * sum(
        plan.base.stage_seconds[0][kind] for kind in plan.base.stage_seconds[0] if str(kind.value) in "FB"
    )
    assert timing.bill["compute"] > compute, "gradients are taken from autograd, too"
    assert timing.seconds == pytest.approx(spent + timing.bill["gather"] + timing.bill["reduce"], rel=1e-3)
    assert sum(timing.bill.values()) == pytest.approx(timing.seconds)


def test_a_bubble_is_cheaper_where_others_have_the_processors() -> None:
    values = {"pipeline_model_parallel_size": 4, "global_batch_size": 4, "zero_preset": "ddp"}
    alone, shared = (predict(layout(lab(count), **values)) for count in (4, 2))
    assert shared.seconds < 0.8 * alone.seconds, "two of four at a time lose nothing"


@pytest.mark.parametrize("busy", [0.0, 0.02])
def test_what_sends_robs_what_computes(busy: float) -> None:
    """A MB over a link takes 40 ms. Behind compute that costs nothing, unless it keeps processors busy."""
    free, robbed = (
        predict(layout(lab(2, 0.04, b), zero_preset="zero2", global_batch_size=32)) for b in (0.0, busy)
    )
    assert (robbed.seconds > 1.05 * free.seconds) == (busy > 0)


def test_one_rank_of_a_node_has_the_whole_link() -> None:
    """It was measured with all ranks of the node sending at once."""
    plan = layout(lab(2), pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True)
    machine = Machine(plan, 1)
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
        machine = Machine(layout(lab(2)), 1)
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
        machine = Machine(plan, 4)
        machine.run()
        wanted = sends(make_schedule(schedule, 4, 1, 4), 4)
        assert len(machine.messages) == sum(len(messages) for messages in wanted.values())
