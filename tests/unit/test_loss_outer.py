"""benchmarks/loss.py --outer: the order of its runs, what they cost, its section of loss.md."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.harness import DOCS, section
from benchmarks.loss import outer_study, parse
from benchmarks.loss_outer import INTERVAL, PEAKS, SEEDS, TITLE, OuterStudy, Piece
from benchmarks.loss_plan import Runs
from benchmarks.loss_run import Run
from benchmarks.loss_variants import BASELINE, EVERY, INTERVALS, MUON, RATES, outer_name


def filled(study: OuterStudy, count: int = 10**9) -> list[Piece]:
    """Do ``count`` runs, as the program does: the last peak and an outer rate of 1 are the best."""
    done: list[Piece] = []
    while len(done) < count and (left := study.left()):
        settings, run = left[0]
        outer = EVERY[run.variant].outer
        loss = 3 + abs(settings.peak - PEAKS[-1]) + 0.1 * run.seed
        loss += 0.01 * abs(outer.outer_lr - 1) + outer.outer_interval / 1e4 if outer else 0.0
        found = {"loss": loss, "replicas": loss + 0.5, "sent": 1e6, "cpu_seconds": 360.0}
        study.store.add(settings, {**asdict(run), **found})
        done.append((settings, run))
    return done


def test_what_is_searched_comes_first_and_its_runs_count(tmp_path: Path) -> None:
    study = OuterStudy(Runs(tmp_path / "runs"))
    done = filled(study)
    assert [(s.peak, run) for s, run in done[:4]] == [(p, Run(v, 1)) for v in (BASELINE, MUON) for p in PEAKS]
    best = replace(study.first, peak=PEAKS[-1])
    rates = [(best, Run(outer_name(interval, rate), 1)) for interval in INTERVALS[1:] for rate in RATES]
    assert done[4:10] == rates
    assert len(done) == len(set(done)) == 36 and {settings for settings, _ in done[10:]} == {best}
    names = [row.variant for row in study.rows()]
    assert names[2:5] == [outer_name(interval, 1) for interval in INTERVALS], (
        "the shortest has the next one's rate"
    )
    for name in names:
        runs = {run.seed for _, run in done if run.variant == name}
        assert runs == set(range(1, SEEDS + 1)), name


def test_the_study_is_planned_within_four_hours(tmp_path: Path) -> None:
    study = OuterStudy(Runs(tmp_path / "runs"))
    (hours,) = re.findall(r"of ([\d.]+) hours", study.plan())
    assert 1 < float(hours) <= 4
    filled(study, 9)
    assert study.plan().startswith("9 of 36 runs are done")
    filled(study)
    assert "0.0 of 3.6 hours" in study.plan()


@pytest.mark.parametrize("steps", [0, 100, 1500])
def test_steps_after_which_replicas_have_not_met_are_refused(steps: int, tmp_path: Path) -> None:
    nearest = {0: "128", 100: "128", 1500: "1408 or 1536"}[steps]
    with pytest.raises(ValueError, match=f"--outer {steps}: .* nearest: {nearest}$"):
        outer_study(tmp_path, steps)


def test_the_section_says_what_was_not_run(tmp_path: Path) -> None:
    study = OuterStudy(Runs(tmp_path / "runs"))
    assert study.section().count("| not run |") == 10 and "0.7: not run" in study.section()
    filled(study, 10)
    text = study.section()
    assert "| outer learning rate, every 32 steps | 0.4: 3.1092; 0.7: 3.1062; 1: 3.1032 | 1 |" in text
    assert text.count("| not run |") == 6
    filled(study)
    base = 3 + 0.1 * 2
    (row,) = [line for line in study.section().splitlines() if f"every {INTERVAL} steps: nesterov" in line
              and "differences INT4, error feedback |" in line]  # fmt: skip
    assert f"| 3 | {base + 0.0032:.4f} | {100 * 0.0032 / base:+.2f} |" in row
    assert row.endswith(f"| {base + 0.0032 + 0.5:.4f} |")


def test_the_section_of_loss_md_is_of_the_runs() -> None:
    assert section(DOCS / "loss.md", TITLE) == outer_study(DOCS).section().strip("\n")


def test_two_studies_at_once_are_refused() -> None:
    assert parse(["--outer"]).outer == 1536 and parse(["--outer", "128", "--plan"]).plan
    with pytest.raises(SystemExit):
        parse(["--outer", "--ladder"])
