"""What a pipelined step sends between nodes: megazero's counters, the interfaces and the formulas agree, in both
orders of the mesh. Bytes only, never times."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.pipeline.bytes import CASES, HIDDEN, SEQUENCE, measure

COUNTS = [2, 4, 8]
STATE = {"refresh", "reduce"}


@cache
def measured():
    """Of all cases, which share processes."""
    return measure([*CASES], COUNTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bytes_between_nodes(netlab, name):
    netlab(2)  # skips where no lab can be made
    case, results = CASES[name], measured()[name]
    assert [result["micro_batches"] for result in results] == COUNTS
    for result in results:
        figures = (result[k] for k in ("counted", "formula", "sent", "again"))
        for counted, formula, sent, again in zip(*figures, strict=True):
            assert {kind: n for kind, n in counted.items() if kind != "scalar"} == formula
            if case.inside:  # model state, once per step: whatever the number of micro-batches
                assert set(formula) == STATE and formula == results[0]["formula"][0]
            else:
                dp = case.ranks_per_node // case.tp
                assert formula["pp"] == result["micro_batches"] * dp * SEQUENCE * HIDDEN * 2
                assert set(formula) - {"pp"} == ({"reduce"} if "tied" in name else set())
            total = sum(counted.values())
            # Headers; and two barriers and what is acknowledged late, 4 kB per rank measured.
            assert total <= sent <= 1.02 * total + 8_000 * 2 * case.ranks_per_node + again
