"""loss.md begins in a sceptic's order, and its first sections are those of the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.loss import summary
from benchmarks.loss.ladder_report import LadderReport
from benchmarks.loss.report import STUDY
from benchmarks.loss.study import ladder_report
from benchmarks.results import PAGES, RESULTS

PUBLIC, REAL, OURS, UNKNOWN = (
    "What is published", "What real gradients show", "What our runs show, and cannot show", "What is not known",
)  # fmt: skip


@pytest.fixture(scope="module")
def ladder() -> LadderReport:
    return ladder_report(PAGES)


def sections(page: str) -> list[str]:
    return [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]


def test_the_page_has_the_data(ladder: LadderReport) -> None:
    """If not: python -m benchmarks.loss.study --ladder --report --work runs/loss --out docs/results"""
    page = (PAGES / "loss.md").read_text()
    assert summary.with_summary(page, ladder, RESULTS) == page
    assert [name for name in sections(page) if name != REAL][:4] == [PUBLIC, OURS, UNKNOWN, STUDY]


def test_a_trained_models_gradients_come_second_once_they_are_measured(
    ladder: LadderReport, tmp_path: Path
) -> None:
    """Of all matrices, the messages measured first, on a card if there was one, the newest row of a format."""
    page = f"# stale\n\n## {REAL}\n\nstale\n\n## {STUDY}\n\nkept\n"
    assert REAL not in summary.with_summary(page, ladder, tmp_path)
    row = {"what": "gradients", "kind": "all matrices", "on": "card", "tokens": 1024, "format": "INT4 64",
           "bytes": 0.531, "error": 0.5, "zero": 0.4, "dead": 0.1, "gain": None}  # fmt: skip
    others = (
        {"on": "CPU", "error": 0.1},
        {"kind": "norms"},
        {"what": "step"},
        {"tokens": 2048},
        {"error": 0.188},
    )
    rows = [row, *(row | other for other in others)]
    (tmp_path / summary.TRAINED).write_text("".join(json.dumps(each) + "\n" for each in rows))
    written = summary.with_summary(page, ladder, tmp_path)
    assert sections(written) == [PUBLIC, REAL, OURS, UNKNOWN, STUDY] and written.endswith("\n\nkept\n")
    assert "| INT4 64 | 0.531 | 0.188 | 0.400 | 0.100 |  |" in written and written.count("| INT4 64 |") == 1
    assert "stale" not in written
