"""benchmarks/planning/slow_links.py: the planner's schemes beside measured ones, of results that are made up."""

from __future__ import annotations

import pytest

from benchmarks.links.contestants import HEATS
from benchmarks.planning.slow_links import CONTESTANT, bytes_table, choice_table, choices, seconds_table
from megazero.config.options.cluster import Cluster, Device, InterNode, IntraNode
from megazero.plan.search import OUTER
from megazero.plan.slow_links import EXACT, QUANTISED, winner

LAB = Cluster(
    "lab",
    2,
    2,
    Device("cpu", 16.0, 10.0, 1.0, bf16_tflops=0.1),
    IntraNode(2.0),
    InterNode(10.0, efficiency=1.0),
)
EXACT_BYTES = 25.2e6  # that a node sends in a step: 1.5 x 2N


def result(rate: str, seconds: dict[str, float]) -> dict:
    named = {CONTESTANT[scheme]: [time, 1.1 * time, 1.2 * time] for scheme, time in seconds.items()}
    sent = {name: [[990, 1010]] * 3 for name in named}
    more = {"most": {CONTESTANT[OUTER]: 900}, "most_formula": {CONTESTANT[OUTER]: 1000.0}}
    formula = dict.fromkeys(named, 1000.0)
    return {"rate": rate, "micro_batches": 1, "seconds": named, "sent": sent, "formula": formula, **more}


def test_what_is_predicted_depends_on_rate_and_delay() -> None:
    slow = {EXACT: 4.0, QUANTISED: 1.0, OUTER: 0.3}
    fast = {EXACT: 0.32, QUANTISED: 0.31, OUTER: 0.3}
    results = [result(rate, slow) for rate in ("50mbit", "50mbit+20ms")] + [result("100gbit", fast)]
    found = choices([*results, result("none", fast)], LAB)
    assert [one.result for one in found] == results
    near, far, quick = (one.predicted for one in found)
    assert near[EXACT] > near[QUANTISED] > near[OUTER] and all(far[name] > near[name] for name in CONTESTANT)
    assert near[EXACT] - quick[EXACT] == pytest.approx(EXACT_BYTES * 8 / 50e6, rel=0.2)
    assert [winner(one.measured) for one in found] == [OUTER, OUTER, EXACT]
    rows = choice_table(found).splitlines()[2:]
    assert rows[0].startswith("| 50mbit | 1 | ") and rows[0].endswith(f"| 4.400 | 1.100 | 0.330 | {OUTER} |")
    assert rows[2].endswith(f"| {EXACT} |")


def test_everyone_has_a_line() -> None:
    results = [result("50mbit", {EXACT: 4.0, QUANTISED: 1.0, OUTER: 0.3})]
    for made in (seconds_table, bytes_table):
        assert [line.split(" | ")[0][2:] for line in made(results).splitlines()[2:]] == list(HEATS["outer"])
    assert f"| {CONTESTANT[OUTER]} | 1.010 (1.010 to 1.010) | 0.900 (0.900 to 0.900) |" in bytes_table(
        results
    )
