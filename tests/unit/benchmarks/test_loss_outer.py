"""benchmarks/loss/study.py --outer: the order of its runs, what they cost, its section of loss.md."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.harness import DOCS, section
from benchmarks.loss.ladder import PEAKS, RATES
from benchmarks.loss.outer import INTERVAL, SEEDS, TITLE, OuterStudy, Piece, enlarged
from benchmarks.loss.plan import Record, Results, Runs
from benchmarks.loss.run import Run, Settings
from benchmarks.loss.study import outer_study, parse
from benchmarks.loss.variants import AVERAGE, BASELINE, EVERY, INTERVALS, MUON, RULES, outer_name


class KeptRuns(Runs):
    """Runs in memory: a study looks at them thousands of times."""

    def __init__(self) -> None:
        super().__init__(Path("in memory"))
        self.kept = defaultdict[Settings, list[Record]](list)

    def add(self, settings: Settings, record: Record) -> None:
        self.kept[settings].append(record)

    def results(self, settings: Settings) -> Results:
        return Results(self.kept[settings])


def filled(study: OuterStudy, count: int = 10**9, peak: float = PEAKS[1]) -> list[Piece]:
    """Do ``count`` runs, as the program does: ``peak`` and an outer rate of 1 with momentum are the best."""
    done: list[Piece] = []
    while len(done) < count and (left := study.left()):
        settings, run = left[0]
        outer = EVERY[run.variant].outer
        loss = 3 + abs(settings.peak - peak) + 0.1 * run.seed + 0.2 * EVERY[run.variant].muon
        if outer:
            far = 1.5 if outer.outer_optimizer == AVERAGE else abs(outer.outer_lr - 1)
            loss += 0.01 * far + outer.outer_interval / 1e4
        found = {"loss": loss, "replicas": loss + 0.5, "sent": 1e6, "cpu_seconds": 300.0}
        study.store.add(settings, {**asdict(run), **found})
        done.append((settings, run))
    return done


def test_what_is_searched_comes_first_and_its_runs_count() -> None:
    study = OuterStudy(KeptRuns())
    done = filled(study)
    searched = [(study.first, BASELINE), (study.first, MUON), (enlarged(study.first), BASELINE)]
    rates = [(replace(s, peak=peak), Run(v, 1)) for s, v in searched for peak in RATES[1:]]
    assert done[:12] == rates
    best = replace(study.first, peak=PEAKS[1])
    rules = [(best, Run(outer_name(interval, rule), 1)) for interval in INTERVALS[1:] for rule in RULES]
    assert done[12:20] == rules
    assert len(done) == len(set(done)) == 48
    small, large = study.rows()[:-3], study.rows()[-3:]
    assert {settings for settings, _ in done[20:]} == {best, large[0].settings}
    assert [row.variant for row in large] == [BASELINE, *(outer_name(8, "1", form) for form in ("", "4bit"))]
    assert [run.seed for settings, run in done if settings == large[0].settings] == [1, 1, 1]
    names = [row.variant for row in small]
    assert names[2:5] == [outer_name(interval, "1") for interval in INTERVALS], (
        "the shortest has the next one's rule"
    )
    for name in names:
        runs = {run.seed for _, run in done if run.variant == name}
        assert runs == set(range(1, SEEDS + 1)), name


@pytest.mark.parametrize(
    ("peak", "tried", "said"),
    [(5e-4, RATES[:3], "0.0005, the lowest tried"), (1e-3, RATES[:3], "0.001"), (2e-3, RATES[1:4], "0.002")]
    + [(8e-3, RATES[1:], "0.008, the highest tried")],
)
def test_peaks_are_tried_until_the_best_has_both_neighbours(
    peak: float, tried: tuple[float, ...], said: str
) -> None:
    study = OuterStudy(KeptRuns())
    assert {settings.peak for settings, _ in filled(study, peak=peak)} == {*tried}
    assert f"| {said} |" in study.section()


def test_the_study_is_planned_within_four_hours() -> None:
    (hours,) = re.findall(r"of ([\d.]+) hours", outer_study(DOCS).plan())
    assert 1 < float(hours) <= 4
    study = OuterStudy(KeptRuns())
    filled(study, 9)
    assert study.plan().startswith("9 of 46 runs are done")
    filled(study)
    assert "0.0 of 4.0 hours" in study.plan()


@pytest.mark.parametrize("steps", [0, 100, 1500])
def test_steps_after_which_replicas_have_not_met_are_refused(steps: int, tmp_path: Path) -> None:
    nearest = {0: "128", 100: "128", 1500: "1408 or 1536"}[steps]
    with pytest.raises(ValueError, match=f"--outer {steps}: .* nearest: {nearest}$"):
        outer_study(tmp_path, steps)


def test_the_section_says_what_was_not_run() -> None:
    study = OuterStudy(KeptRuns())
    assert study.section().count("| not run |") == 13 and "0.7: not run" in study.section()
    filled(study, 20)
    text = study.section()
    assert "every 32 steps | average: 3.1182; 0.4: 3.1092; 0.7: 3.1062; 1: 3.1032 | 1 |" in text
    assert (
        "| peak learning rate of 1.3M, AdamW | 0.001: 3.1030; 0.002: 3.1020; 0.004: 3.1000; 0.008: 3.1040 | 0.004 |"
        in text
    )
    assert text.count("| not run |") == 8
    filled(study)
    base = 3 + 0.1 * 2
    (row,) = [line for line in study.section().splitlines() if f"every {INTERVAL} steps: nesterov" in line
              and "differences INT4, error feedback |" in line]  # fmt: skip
    assert f"| 3 | {base + 0.0032:.4f} | {100 * 0.0032 / base:+.2f} |" in row
    assert row.endswith(f"| {base + 0.0032 + 0.5:.4f} |")
    (row,) = [line for line in study.section().splitlines() if line.startswith("| Muon | every")]
    gap = 100 * 0.0032 / (base + 0.2)
    assert f"| {base + 0.2032:.4f} | {gap:+.2f} | {gap:+.2f} to {gap:+.2f} |" in row, "from Muon's own"


def test_the_section_of_loss_md_is_of_the_runs() -> None:
    assert section(DOCS / "loss.md", TITLE) == outer_study(DOCS).section().strip("\n")


def test_two_studies_at_once_are_refused() -> None:
    assert parse(["--outer"]).outer == 1536 and parse(["--outer", "128", "--plan"]).plan
    with pytest.raises(SystemExit):
        parse(["--outer", "--ladder"])


@pytest.mark.parametrize("study", ["--outer", "--ladder"])
def test_what_a_study_says_itself_is_refused(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if it is said as it would be."""
    assert parse([study, "--minutes", "1", "--work", "w", "--out", "o", "--report"]).report
    with pytest.raises(SystemExit):
        parse([study, "--lr", "2e-3", "--seeds", "1", "2", "--text=stdlib", "--variants", "hpz"])
    assert f"--lr, --seeds, --text, --variants: not with {study}" in capsys.readouterr().err
