"""docs/results/comparison.md has the tables of comparison.json."""

from __future__ import annotations

import json

import pytest

from benchmarks.links.comparison_report import byte_lines, heat_table, tables
from benchmarks.links.contestants import CONTESTANTS, HEATS, PAGE_HEATS
from benchmarks.results import PAGES, RESULTS
from tests.messages import names

RESULTS_OF_PAGE = json.loads((RESULTS / "comparison.json").read_text())["results"]


@pytest.mark.parametrize("heat", PAGE_HEATS)
def test_the_page_has_the_table(heat: str) -> None:
    names((PAGES / "comparison.md").read_text("utf-8"), tables(RESULTS_OF_PAGE)[heat])


def test_every_heat_is_of_known_contestants() -> None:
    assert {name for heat in HEATS.values() for name in heat} == set(CONTESTANTS)
    measured = {name for result in RESULTS_OF_PAGE for name in result["seconds"]}
    assert measured == {name for heat in PAGE_HEATS for name in HEATS[heat]}


def test_a_row_has_bytes_seconds_and_how_many_times_as_fast() -> None:
    """The node that sent most counts; who took no part has an empty cell."""
    one = {
        "rate": "1gbit", "micro_batches": 1, "elements": 50, "formula": {"ours": 20.0, "FSDP2": 400.0},
        "seconds": {"FSDP2": [4.0, 6.0], "ours": [2.0, 2.0]}, "sent": {"FSDP2": [[400, 100]], "ours": [[20, 25]]},
        "counted": {"FSDP2": [[0, 0]], "ours": [[20, 20]]}, "most": {"ours": 30},
    }  # fmt: skip
    two = {**one, "micro_batches": 4, "seconds": {"FSDP2": [8.0]}}
    head, _, *rows = heat_table([one, two]).splitlines()
    assert head == "|  | bytes / 2N, 1 | bytes / 2N, 4 | 1gbit, 1 | 1gbit, 4 |"
    assert rows == [
        "| ours | 0.250, most 0.300 |  | 2.00 (2.00 to 2.00); 2.50 |  |",
        "| FSDP2 | 4.000 | 4.000 | 5.00 (4.00 to 6.00) | 8.00 (8.00 to 8.00) |",
    ]
    formula, counters = byte_lines([one])
    assert formula.endswith("1.000 to 1.250") and counters.endswith("1.125 to 1.125")
