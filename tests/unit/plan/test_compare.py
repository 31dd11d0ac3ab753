"""Whether quantised messages pay: the table, its sentence, and what rounding costs in tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megazero.comm.wire import Codecs, Coding
from megazero.config.options.cluster import InterLevel
from megazero.mesh.levels import INTER, INTRA
from megazero.plan import compare
from megazero.plan.rounding import HADAMARD, INT4, SDP4BIT, ZEROPP, tokens_needed
from tests.messages import names
from tests.unit.plan.test_outer import question
from tests.unit.plan.test_plan import ALONE, cluster, plan

FAST, SLOW = 100.0, 0.05  # Gb/s: of a lab whose ranks compute for milliseconds
ALL = {*compare.KNOWN, compare.EXACT, compare.QUANTISED, compare.OUTER}


@cache
def answer(rate: float) -> compare.Schemes:
    on = cluster(2, 4).with_slow_link(rate, 0.0)
    return compare.compare(question(on), on)


def row(found: compare.Schemes, name: str) -> compare.Scheme:
    return next(row for row in found.rows if row.name == name)


@pytest.mark.parametrize("rate", [FAST, SLOW])
def test_every_scheme_has_a_row_with_its_own_bytes(rate: float) -> None:
    found = answer(rate)
    exact, quantised = row(found, compare.EXACT), row(found, compare.QUANTISED)
    assert {row.name for row in found.rows} == ALL
    assert quantised.layout.bytes_across_nodes < exact.layout.bytes_across_nodes
    assert not quantised.layout.wire.exact and exact.layout.wire.exact
    assert exact.seconds <= 1.001 * min(row.seconds for row in found.rows if row.name in compare.KNOWN)


def test_presets_that_are_not_legal_have_no_row() -> None:
    """HSDP shards inside a node, which has one rank here."""
    on = cluster(2, 1)
    assert {row.name for row in compare.compare(question(on), on).rows} == ALL - {"HSDP, once a step"}


def test_it_pays_on_a_slow_link_alone_and_where_the_loss_does_not_eat_it() -> None:
    names(compare.sentence(answer(FAST)), "do not pay", "--zero-preset")
    slow = answer(SLOW)
    names(compare.sentence(slow), "faster to the same loss")
    exact, quantised = row(slow, compare.EXACT), row(slow, compare.QUANTISED)
    assert slow.to_use is quantised

    def with_tokens(needed: float | None) -> compare.Schemes:
        rows = [replace(each, needed=needed) if each is quantised else each for each in slow.rows]
        return replace(slow, rows=rows)

    eaten = with_tokens(exact.seconds / quantised.seconds)
    assert row(eaten, compare.QUANTISED).worth(exact) == pytest.approx(1.0) and eaten.to_use.needed == 1.0
    names(compare.sentence(eaten), "do not pay")
    names(compare.sentence(with_tokens(None)), "nobody published")


def test_the_rate_at_which_messages_take_as_long_as_computing() -> None:
    fsdp = row(answer(SLOW), "FSDP2")
    even = fsdp.rate(fsdp.computing)
    seconds = fsdp.layout.bytes_across_nodes * 8e-9 / (even * fsdp.layout.base.cluster.inter_node.efficiency)
    assert seconds == pytest.approx(fsdp.computing)
    assert fsdp.link_share * SLOW == pytest.approx(fsdp.rate(fsdp.seconds))
    assert 0.9 < fsdp.link_share <= 1, "a slow link is busy all the time"


LARGE = SDP4BIT[-1]


@pytest.mark.parametrize(
    ("codecs", "parameters", "tokens"),
    [
        (Codecs(), 8e9, 1.0),
        (Codecs(weights=Coding(8)), 8e9, 1.0),
        (Codecs(gradients={INTER: Coding(4)}), 8e9, LARGE.least_speed(INT4)),
        (Codecs(gradients={INTER: Coding(4, hadamard=32)}), 8e9, LARGE.least_speed(HADAMARD)),
        (Codecs(gradients={INTER: Coding(4, hadamard=32)}), 2e8, SDP4BIT[0].least_speed(HADAMARD)),
        (Codecs(gradients={INTER: Coding(4), INTRA: Coding(4)}), 8e9, ZEROPP.least_speed(INT4)),
        (Codecs(gradients={INTER: Coding(2)}), 8e9, None),
        (Codecs(weights=Coding(4)), 8e9, None),
        (Codecs(gradients={INTER: Coding(8)}), 8e9, None),
    ],
    ids=str,
)
def test_tokens_are_those_of_published_losses(
    codecs: Codecs[Coding], parameters: float, tokens: float | None
) -> None:
    assert tokens_needed(codecs, parameters) == (tokens and pytest.approx(tokens))


def test_given_shards_and_outer_steps_are_of_the_schemes_that_they_concern() -> None:
    """Known presets have their own shards, and outer steps are no part of an exact row."""
    on = cluster(2, 4, SLOW)
    found = compare.compare(question(on, zero_shard=(1, 4, 4), outer_interval=20, outer_meet="local:2"), on)
    assert {row.name for row in found.rows} == ALL
    assert all((row.layout.states.outer is not None) == (row.name == compare.OUTER) for row in found.rows)
    assert row(found, compare.EXACT).layout.shards.factors == (1, 4, 4)
    assert row(found, compare.OUTER).layout.config.outer.outer_interval == 20


def test_a_rate_between_sites_is_a_site_s() -> None:
    assert (
        compare.Schemes(replace(cluster(2, 4), above={"inter_site": InterLevel(0.5, 2)}), (), {}).link
        == "0.5 Gb/s a site"
    )


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *ALONE,
        "--recompute-granularity",
        "none",
        "--pays",
        "--link-rates",
        "10,0.01",
        "--link-delays",
        "0,5",
    ]
    status, out = plan(tmp_path, 1, *words)
    assert status == 0
    names(
        capsys.readouterr().out, "10 Gb/s a node:", "0.01 Gb/s a node and 5 ms:", "flags of ", *compare.LEGEND
    )
    found = json.loads((out / "plan.json").read_text())["pays"]
    assert [(each["delay_ms"], each["gbits_per_s"]) for each in found] == [
        (0, 10),
        (0, 0.01),
        (5, 10),
        (5, 0.01),
    ]
    assert all("quantised hops save" in each["verdict"] for each in found)
