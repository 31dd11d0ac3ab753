"""The planner with replicas: what a meeting takes, what is proposed for a link, and which scheme wins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megazero.config.options.cluster import Cluster, InterLevel
from megazero.mesh.grid import AxisSpec
from megazero.mesh.levels import INTER
from megazero.plan import compare
from megazero.plan.options import with_stand_ins
from megazero.plan.report import layout_flags
from megazero.plan.search import Search
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import meeting_seconds, simulate
from tests.messages import names, refused
from tests.sizes import PLANNED
from tests.unit.plan.test_plan import ALONE, cluster, layout, plan

MEET = {"outer_meet": "local:2", "train_iters": None, "train_samples": 1000}
STEPS = {"outer_interval": 10, "zero_preset": "zero3", **MEET}
CHOSEN = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "micro_batch_size": 1,
    "recompute_granularity": "none",
}

INTER_SITE = "inter_site"


def question(on: Cluster, **values: object) -> dict[str, object]:
    given = {name: value for name, value in PLANNED.items() if name not in ("lr", "train_iters", "mock_data")}
    asked = {**given, **CHOSEN, "params_dtype": "bf16", "ranks_per_node": on.ranks_per_node, **values}
    return with_stand_ins(asked)


def test_a_meeting_takes_the_messages_of_the_others_and_its_ranks_own_work() -> None:
    """Each of two replicas on a cluster of its own: a rank's share of every unit, by the link between them."""
    on = cluster(4, 4, gbits=0.01).part(2)
    assert on.nodes == 2 and on.between == on.inter_node
    apart = layout(STEPS, on)
    units = apart.units(0).shapes
    sent = sum(unit.elements // 8 * 4 for unit in units)
    assert apart.bytes_of_meetings == (sent / 10, sent)
    seconds = meeting_seconds(apart)
    by_hand = sent * on.ranks_per_node / (0.01e9 / 8 * on.inter_node.efficiency)
    assert seconds == pytest.approx(by_hand, rel=0.01)
    three = layout({**STEPS, "outer_meet": "local:3"}, on)
    assert meeting_seconds(three) == pytest.approx(2 * seconds, rel=0.01)
    later = layout(STEPS, replace(on, between=replace(on.inter_node, latency_us=20_000.0)))
    assert meeting_seconds(later) - seconds == pytest.approx(2 * 0.02, rel=0.01)
    timing, rare = simulate(apart), simulate(layout({**STEPS, "outer_interval": 100}, on))
    assert timing.bill["outer"] == pytest.approx(seconds / 10)
    assert timing.seconds - rare.seconds == pytest.approx(seconds * (1 / 10 - 1 / 100))
    assert simulate(layout({"zero_preset": "zero3"}, on)).bill["outer"] == 0
    four = layout({**STEPS, "outer_bits": 4}, on)
    assert meeting_seconds(four) < seconds / 6
    assert apart.bytes_across_nodes > rare.bill["outer"], "a meeting's bytes count on average"


def test_sites_share_the_link_of_a_site_and_nodes_have_one_each() -> None:
    between = InterLevel(0.1, 2, latency_us=20_000.0)
    sites = replace(cluster(4, 2), above={INTER_SITE: between}).part(2)
    assert (sites.nodes, sites.above, sites.between) == (2, {}, between)
    assert sites.met_seconds(1e6) == pytest.approx(0.04 + 4 * 1e6 * 8e-9 / (0.1 * between.efficiency))
    racks = replace(cluster(8, 2), above={"inter_rack": InterLevel(1.0, 4), INTER_SITE: between}).part(2)
    assert racks.above["inter_rack"].parts == 2 and racks.between == between


def test_of_stages_the_one_that_sends_the_most_counts_and_rounding_keeps_what_it_lost_twice() -> None:
    on, two = cluster(2, 4, gbits=0.01), {**STEPS, "pipeline_model_parallel_size": 2}
    now, rounded = (layout({**two, "outer_bits": bits}, on) for bits in (32, 8))
    outer = now.states.outer
    assert outer is not None
    sent = [sum(outer.message(now.states.plan(unit)) for unit in now.units(rank).shapes) for rank in range(2)]
    assert sent[0] != sent[1] and now.bytes_of_meetings == (max(sent) / 10, max(sent))
    for rank in range(2):
        kept = rounded.memory_of(rank, None).residuals - now.memory_of(rank, None).residuals
        assert kept == 2 * now.units(rank).elements / now.base.d * 4


def test_a_site_is_left_once_by_a_ring_and_by_every_row_of_an_exchange() -> None:
    on = replace(cluster(4, 2), above={INTER_SITE: InterLevel(0.1, 2, latency_us=20_000.0)})
    collectives = Collectives(on)
    near, far = AxisSpec("os_inter", "os", 2, 2, INTER), AxisSpec("os_inter", "os", 4, 2, INTER)
    assert collectives.link_of(near) == INTER and collectives.link_of(far) == INTER_SITE
    rate, sent = 0.1e9 / 8 * 0.8, 3e6
    ring, rows = (collectives.of_axis(operation, far, sent) for operation in ("gather", "exchange"))
    # 4 ranks of a site in 2 groups: each ring leaves once; of an exchange 2 of 3 rows of every rank leave.
    assert ring.seconds - ring.latency == pytest.approx(2 * sent / rate)
    assert rows.seconds - rows.latency == pytest.approx(4 * 2 / 3 * sent / rate)
    assert ring.latency == pytest.approx(0.02, rel=0.01)
    assert collectives.of_axis("gather", near, sent) == Collectives(cluster(4, 2)).of_axis(
        "gather", near, sent
    )
    with refused("3 nodes", "2 sites", "2 or 4"):
        on.with_nodes(3)
    stages = layout({"pipeline_model_parallel_size": 2, "zero_preset": "zero1"}, on)
    assert stages.base.link(0, 1) == INTER_SITE
    assert stages.base.message_seconds[INTER_SITE] > stages.base.message_seconds[INTER] + 0.02


def test_what_some_groups_send_between_sites_counts_as_between_sites() -> None:
    """Sites of 3 nodes: of the pairs of neighbours one has a node on each site, of the triples none."""
    on = replace(cluster(6, 4), above={INTER_SITE: InterLevel(0.1, 2, latency_us=20_000.0)})
    collectives = Collectives(on)
    pairs, triples, fours = (AxisSpec("g_inter", "g", size, 4, INTER) for size in (2, 3, 4))
    assert collectives.link_of(pairs) == INTER_SITE and collectives.link_of(triples) == INTER
    rate, sent = 0.1e9 / 8 * 0.8, 3e6
    for operation in ("gather", "exchange"):  # 4 groups, of which a site has one rank each
        cost = collectives.of_axis(operation, pairs, sent)
        assert cost.seconds == pytest.approx(0.02 + 4 * sent / rate, rel=1e-3)
    on = replace(cluster(12, 4), above={INTER_SITE: InterLevel(0.1, 4, latency_us=20_000.0)})
    assert Collectives(on).of_axis("gather", fours, sent).latency == pytest.approx(0.02, rel=0.01)
    stages = {
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 4,
        "use_tp_pp_dp_mapping": True,
    }
    base = layout({**stages, "global_batch_size": 24}, on).base
    assert base.link(0, 1) == INTER_SITE, "of nodes 2 and 3"


def test_a_rack_below_a_site_is_a_level_of_its_own() -> None:
    """4 racks of 2 nodes on 2 sites: each message takes the delays of what it crosses, at the rate of the slowest."""
    above = {
        "inter_rack": InterLevel(1.0, 4, latency_us=100.0),
        INTER_SITE: InterLevel(0.1, 2, latency_us=20_000.0),
    }
    on = replace(cluster(8, 2), above=above)
    assert [level.name for level in on.levels] == ["node", "rack", "site", "cluster"]
    assert on.level_sizes == (2, 4) and on.slow_part == "site"
    cut = layout({"zero_shard": (2, 4, 16), "level_sizes": (2, 4)}, on)
    links = {axis.name: cut.base.collectives.link_of(axis) for axis in cut.grid.data_axes}
    assert links == {
        "p_intra": "intra_node",
        "g_inter": INTER,
        "os_inter_rack": "inter_rack",
        "os_inter_site": INTER_SITE,
    }
    whole, sent = layout({"zero_shard": (2, 2, 16)}, on).grid.data_axes[-1], 1e6
    cost = cut.base.collectives.of_axis("gather", whole, sent)
    assert cost.latency == pytest.approx(0.02 + 1e-4, rel=0.01)  # to the other site, and to its other rack
    assert cost.seconds - cost.latency == pytest.approx(2 * sent / (0.1e9 / 8 * 0.8))
    assert on.with_slow_link(0.2, 0.0).above == {
        **above,
        INTER_SITE: replace(above[INTER_SITE], gbits_per_s=0.2),
    }
    with refused("4 racks", "3 sites"):
        replace(on, above={**above, INTER_SITE: InterLevel(0.1, 3)})


def test_layouts_that_are_cut_at_the_rack_are_proposed() -> None:
    on = replace(cluster(4, 2), above={"inter_rack": InterLevel(0.1, 2)})
    (best,) = Search(question(on), on, "zeropp").best(1)
    names(" ".join(layout_flags(best.layout.config)), "--level-sizes 2")
    (plain,) = Search(question(on, level_sizes=()), on, "zeropp").best(1)
    assert best.timing.seconds < plain.timing.seconds and plain.layout.grid.levels[-1].link == INTER


def test_a_delay_hides_what_is_short_and_shows_the_rest_of_what_is_long() -> None:
    for gbits, hidden in ((100.0, True), (0.01, False)):
        at_once, late = (
            layout({**STEPS, "outer_delay": delay}, cluster(2, 4, gbits).part(2)) for delay in (0, 1)
        )
        seconds, alone = meeting_seconds(at_once), simulate(at_once)
        step = alone.seconds - alone.bill["outer"]
        assert (seconds < step) == hidden and alone.bill["outer"] == pytest.approx(seconds / 10)
        assert simulate(late).bill["outer"] == pytest.approx(max(seconds - step, 0.0) / 10)


def test_the_slower_the_link_the_rarer_the_meetings_and_the_more_they_gain() -> None:
    on = cluster(2, 4, gbits=1.0)
    rungs, gains = [], []
    for rate in (400.0, 1.0, 0.01):
        found = compare.compare(question(on), on.with_slow_link(rate, 0.0))
        row = found.row(compare.OUTER)
        assert row is not None and row.layout.base.cluster.nodes == 1
        outer = row.layout.config.outer
        rungs.append(compare.LADDER.index((outer.outer_bits, outer.outer_interval)))
        gains.append(found.exact.seconds / row.seconds)
        assert row.seconds == pytest.approx(simulate(row.layout).seconds, rel=1e-9)
        later = compare.compare(question(on), on.with_slow_link(rate, 50.0), 50.0)
        assert later.exact.seconds > found.exact.seconds and later.link == f"{found.link} and 50 ms"
    assert rungs == sorted(rungs) and rungs[0] == 0 and rungs[2] > 0
    assert gains == sorted(gains) and gains[2] > 2
    flags = layout_flags(row.layout.config)
    names(" ".join(flags), "--outer-interval", "--outer-meet local:2")


def test_given_outer_steps_stay_and_replicas_are_sites_or_nodes_or_as_given() -> None:
    slow, on = cluster(2, 4, gbits=0.01), cluster(4, 2)
    given = question(slow, outer_interval=7, outer_bits=8, outer_delay=2)
    outer = compare.outer_layouts(given, slow, 1)[0].layout.config.outer
    assert (outer.outer_interval, outer.outer_bits, outer.outer_delay) == (7, 8, 2)
    batch = {"global_batch_size": 32}
    assert compare.replica_counts(batch, on) == [4, 2]
    assert compare.replica_counts({"global_batch_size": 6}, on) == [2]
    assert compare.replica_counts(batch, replace(on, above={INTER_SITE: InterLevel(1.0, 2)})) == [2]
    assert compare.replica_counts({**batch, "outer_meet": "local:2"}, on) == [2]
    with refused("--loss-policy outer", "1 and 32"):
        compare.replica_counts(batch, cluster(1, 2))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = [*ALONE, "--recompute-granularity", "none"]
    assert plan(tmp_path, 1, *alone, "--loss-policy", "outer", "--outer-interval", "30")[0] == 0
    names(capsys.readouterr().out, "each of 2 replicas", "4 bits every 30 steps", "--outer-meet local:2")
