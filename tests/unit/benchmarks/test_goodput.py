"""Simulated goodput against what is known in closed form."""

from __future__ import annotations

import math
from random import Random

import pytest

from benchmarks.planning.goodput import FORMS, Times, elastic, fixed, one_job, table
from benchmarks.results import DOCS

TIMES = Times(down=300.0, round=600.0, save=600.0, lost=0.0)


def test_known_answers() -> None:
    """A piece of T seconds takes (e^(T / M) - 1)(M + down) where all fail together every M seconds."""
    mtbf = 3600.0
    together = mtbf / 4
    expected = TIMES.round / ((math.exp(TIMES.round / together) - 1) * (together + TIMES.down))
    assert one_job(4, mtbf, TIMES, Random(1)) == pytest.approx(expected, rel=0.05)
    assert fixed(1, together, TIMES, Random(1)) == pytest.approx(expected, rel=0.05)
    for form in FORMS.values():
        assert form(4, 1e30, TIMES, Random(1)) == 1.0


def test_who_waits_loses_more_with_every_replica() -> None:
    of = {form: [run(r, 3600.0, TIMES, Random(1)) for r in (2, 16)] for form, run in FORMS.items()}
    assert of["elastic"][0] == pytest.approx(of["elastic"][1], abs=0.02)
    assert of["fixed"][1] < of["fixed"][0] - 0.2 and of["one job"][1] < of["fixed"][1]
    assert elastic(4, 3600.0, TIMES, Random(1)) > elastic(
        4, 3600.0, Times(600.0, 600.0, 600.0, 60.0), Random(1)
    )


def test_the_page_has_the_table() -> None:
    assert table(Times()) in (DOCS / "guide" / "slow-links.md").read_text()
