"""Whether quantised messages pay: the table, its sentence, and what rounding costs in tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megazero.comm.wire import Codecs, Coding
from megazero.config.options.cluster import InterSite
from megazero.plan import pays
from megazero.plan.command import main
from megazero.plan.rounding import HADAMARD, INT4, SDP4BIT, ZEROPP, tokens_needed
from tests.unit.plan.test_outer import question
from tests.unit.plan.test_plan import ALONE, WORDS, cluster, write_cluster

FAST, SLOW = 100.0, 0.05  # Gb/s: of a lab whose ranks compute for milliseconds


@cache
def answers() -> tuple[pays.Schemes, ...]:
    on = cluster(2, 4)
    return tuple(pays.compare(question(on), [on.with_slow_link(rate, 0.0) for rate in (FAST, SLOW)]))


def changed(found: pays.Schemes, name: str, **changes: object) -> pays.Schemes:
    rows = [replace(row, **changes) if row.name == name else row for row in found.rows]  # type: ignore[arg-type]
    return replace(found, rows=rows)


def test_every_scheme_has_a_row_with_its_own_bytes() -> None:
    for found in answers():
        names = {row.name for row in found.rows}
        assert names == {*pays.KNOWN, pays.EXACT, pays.QUANTISED, pays.OUTER}
        exact, quantised = found.row(pays.EXACT), found.row(pays.QUANTISED)
        assert exact and quantised
        assert quantised.layout.bytes_across_nodes < exact.layout.bytes_across_nodes
        assert not quantised.layout.wire.exact and exact.layout.wire.exact
        fastest = min(row.seconds for row in found.rows if row.name in pays.KNOWN)
        assert exact.seconds <= fastest * 1.001


def test_it_pays_on_a_slow_link_alone() -> None:
    fast, slow = (pays.sentence(found) for found in answers())
    assert "they do not pay; use --zero-preset" in fast
    assert "faster to the same loss; use " in slow and "do not pay" not in slow


def test_speed_that_the_loss_eats_does_not_pay() -> None:
    slow = answers()[1]
    exact, quantised = slow.row(pays.EXACT), slow.row(pays.QUANTISED)
    assert exact and quantised and pays.to_use(slow) is quantised
    needed = exact.seconds / quantised.seconds
    eaten = changed(slow, pays.QUANTISED, needed=needed)
    assert eaten.row(pays.QUANTISED).worth(exact) == pytest.approx(1.0)  # type: ignore[union-attr]
    assert f"cost {needed - 1:.0%} of tokens: they do not pay" in pays.sentence(eaten)
    assert pays.to_use(eaten).needed == 1.0
    assert "nobody published" in pays.sentence(changed(slow, pays.QUANTISED, needed=None))


def test_the_rate_at_which_messages_take_as_long_as_computing() -> None:
    row = answers()[1].row("FSDP2")
    assert row
    even = row.rate(row.computing)
    seconds = row.layout.bytes_across_nodes * 8e-9 / (even * row.layout.base.cluster.inter_node.efficiency)
    assert seconds == pytest.approx(row.computing)
    assert row.link_share * SLOW == pytest.approx(row.rate(row.seconds))
    assert 0.9 < row.link_share <= 1, "a slow link is busy all the time"


def test_presets_that_take_as_long_share_a_row() -> None:
    found = answers()[0]
    one = found.row("DDP")
    assert one
    light = next(row for row in found.rows if row.name == "ZeRO-1")
    (row,) = pays.joined([one, replace(light, found=replace(light.found, timing=one.timing))])
    assert row.name == "DDP = ZeRO-1" and row.layout is light.layout
    assert len(pays.joined(answers()[1].rows)) > 4


def test_tokens_are_those_of_published_losses() -> None:
    large = SDP4BIT[-1]
    assert tokens_needed(Codecs(), 8e9) == 1.0
    assert tokens_needed(Codecs(weights=Coding(8)), 8e9) == 1.0
    assert tokens_needed(Codecs(gradients_inter=Coding(4)), 8e9) == pytest.approx(large.least_speed(INT4))
    mixed = Codecs(gradients_inter=Coding(4, hadamard=32))
    assert tokens_needed(mixed, 8e9) == pytest.approx(large.least_speed(HADAMARD))
    assert tokens_needed(mixed, 2e8) == pytest.approx(SDP4BIT[0].least_speed(HADAMARD))
    both = Codecs(gradients_inter=Coding(4), gradients_intra=Coding(4))
    assert tokens_needed(both, 8e9) == pytest.approx(ZEROPP.least_speed(INT4))
    for unknown in (
        Codecs(gradients_inter=Coding(2)),
        Codecs(weights=Coding(4)),
        Codecs(gradients_inter=Coding(8)),
    ):
        assert tokens_needed(unknown, 8e9) is None


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *WORDS,
        *ALONE,
        "--recompute-granularity",
        "none",
        "--cluster",
        write_cluster(tmp_path / "lab.yaml", 1),
    ]
    words += ["--plan-output", str(tmp_path / "out")]
    assert main([*words, "--pays", "--price", "2", "--link-rates", "10,0.01"]) == 0
    said = capsys.readouterr().out
    assert "10 Gb/s a node:" in said and "0.01 Gb/s a node:" in said and "$ a day" in said
    assert said.count("flags of ") == 2 and all(f"{word}: " in said for word in ("link", "even at", "worth"))
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())["pays"]
    assert [each["gbits_per_s"] for each in plan] == [10, 0.01]
    assert all("quantised hops save" in each["verdict"] for each in plan)
    assert main([*words, "--price", "2"]) == 2
    assert "--price has no effect without --pays" in capsys.readouterr().err
    assert main([*words, "--pays", "--loss-policy", "zeropp", "--explain", "--zero-stage", "3"]) == 2
    faults = capsys.readouterr().err
    assert "leave out --loss-policy" in faults and "leave out --explain" in faults
    rates = ["--link-rates", "10,0", "--link-delays", "-5"]
    assert main([*words, "--pays", *rates, "--zero-preset", "zeropp", "--zero-quantized-weights"]) == 2
    faults = capsys.readouterr().err
    assert (
        "--link-rates 0 must be at least 1e-06" in faults and "--link-delays -5 must be at least 0" in faults
    )
    assert "compares exact messages with quantised ones: leave out --zero-" in faults
    assert main([*words, "--loss-policy", "outer", "--zero-preset", "zeropp"]) == 2
    assert "leave out --zero-preset" in capsys.readouterr().err


def test_given_shards_and_outer_steps_are_of_the_schemes_that_they_concern() -> None:
    """Known presets have their own shards, and outer steps are no part of an exact row."""
    on = cluster(2, 4, SLOW)
    (found,) = pays.compare(question(on, zero_shard=(1, 4, 4), outer_interval=20, outer_replicas=2), [on])
    assert {row.name for row in found.rows} == {*pays.KNOWN, pays.EXACT, pays.QUANTISED, pays.OUTER}
    for row in found.rows:
        assert row.layout.grid.outer == 1 + (row.name == pays.OUTER)
    exact, outer = found.row(pays.EXACT), found.row(pays.OUTER)
    assert exact and exact.layout.shards.factors == (1, 4, 4)
    assert outer and outer.layout.config.outer.outer_interval == 20


def test_a_rate_between_sites_is_a_site_s() -> None:
    on = replace(cluster(2, 4), inter_site=InterSite(0.5, 2))
    assert pays.Schemes(on, (), {}).link == "0.5 Gb/s a site"
