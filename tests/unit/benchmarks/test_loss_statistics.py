"""benchmarks/loss/study.py: its statistics against known values, which run comes next, the report."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from statistics import NormalDist

import pytest

from benchmarks.loss.intervals import Difference, difference, estimate, t_quantile
from benchmarks.loss.plan import Plan, Record, Results, Runs
from benchmarks.loss.report import Report
from benchmarks.loss.run import Run, Settings, nudged
from megazero.models import initializer


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [  # printed tables of Student's t
        (0.95, 1, 6.313751515),
        (0.95, 2, 2.919985580),
        (0.95, 5, 2.015048373),
        (0.95, 10, 1.812461123),
        (0.95, 30, 1.697260887),
        (0.95, 120, 1.657650899),
        (0.975, 1, 12.70620474),
        (0.975, 7, 2.364624252),
        (0.975, 30, 2.042272456),
        (0.99, 4, 3.746947388),
        (0.75, 3, 0.764892328),
        (0.05, 10, -1.812461123),
    ],
)
def test_quantiles_of_t(probability: float, freedom: float, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-8)


def test_quantiles_between_whole_degrees_and_far_out() -> None:
    # One degree is the Cauchy distribution, two have a closed form, many are the normal distribution.
    assert t_quantile(0.9, 1) == pytest.approx(math.tan(math.pi * 0.4), rel=1e-12)
    assert t_quantile(0.9, 2) == pytest.approx(0.8 / math.sqrt(2 * 0.9 * 0.1), rel=1e-12)
    assert t_quantile(0.95, 8) < t_quantile(0.95, 7.5) < t_quantile(0.95, 7)
    normal = NormalDist().inv_cdf(0.95)
    assert t_quantile(0.95, 1e5) == pytest.approx(normal * (1 + (normal**2 + 1) / 4e5), rel=1e-9)


@pytest.mark.parametrize(("probability", "freedom"), [(0, 5), (1, 5), (0.95, 0), (0.95, math.nan)])
def test_quantiles_that_are_not(probability: float, freedom: float) -> None:
    with pytest.raises(ValueError, match="must lie between"):
        t_quantile(probability, freedom)


def test_one_seed_is_welch() -> None:
    # By hand: means 4 and 7, variances 10/4 and 4/3, squared errors of the means 1/2 and 1/3.
    found = difference({1: [2, 3, 4, 5, 6]}, {1: [6, 6, 8, 8]})
    base, other = estimate({1: [2, 3, 4, 5, 6]}), estimate({1: [6, 6, 8, 8]})
    assert (base.mean, base.deviation, base.error, base.freedom) == pytest.approx(
        (4, math.sqrt(2.5), math.sqrt(0.5), 4)
    )
    assert other.error == pytest.approx(math.sqrt(4 / 3 / 4))
    freedom = (5 / 6) ** 2 / (1 / 16 + 1 / 27)
    half = t_quantile(0.95, freedom) * math.sqrt(5 / 6) / 4 * 100
    assert found.percent == pytest.approx(75)
    assert (found.lower, found.upper) == pytest.approx((75 - half, 75 + half))


def test_differences_between_seeds_are_no_noise() -> None:
    near = difference({1: [3.00, 3.01, 3.02]}, {1: [3.01, 3.02, 3.03]})
    shifted = difference(
        {1: [3.00, 3.01, 3.02], 2: [4.00, 4.01, 4.02]}, {1: [3.01, 3.02, 3.03], 2: [4.01, 4.02, 4.03]}
    )
    assert shifted.percent == pytest.approx(100 * 0.01 / 3.51)
    assert shifted.upper - shifted.percent < near.upper - near.percent


def test_seeds_that_only_one_side_has_do_not_count() -> None:
    base = {1: [3.00, 3.01], 2: [9.0, 9.1]}
    assert difference(base, {1: [3.02, 3.03]}) == difference({1: base[1]}, {1: [3.02, 3.03]})
    with pytest.raises(ValueError, match="no runs"):
        difference(base, {3: [1.0]})


def test_one_run_decides_nothing() -> None:
    found = difference({1: [3.0, 3.1]}, {1: [3.0]})
    assert (found.lower, found.upper) == (-math.inf, math.inf)
    assert found.verdict(1e9) == "open"


def test_equal_runs_have_no_width() -> None:
    assert difference({1: [2.0, 2.0]}, {1: [2.01, 2.01]}).upper == pytest.approx(0.5)


def test_verdicts() -> None:
    assert Difference(0.1, -0.1, 0.3).verdict(0.3) == "met"
    assert Difference(0.1, -0.1, 0.3).verdict(0.29) == "open"
    assert Difference(0.9, 0.6, 1.2).verdict(0.5) == "missed"


@pytest.mark.parametrize(
    ("rounds", "within"),  # some 3 standard errors
    [(400, 0.03), pytest.param(2000, 0.02, marks=pytest.mark.slow)],
)
def test_the_upper_bound_holds_19_times_of_20(rounds: int, within: float) -> None:
    draw, held = random.Random(7), 0
    for _ in range(rounds):
        base = {s: [3 + s + draw.gauss(0, 0.01) for _ in range(4)] for s in (1, 2)}
        other = {s: [3.01 + s + draw.gauss(0, 0.02) for _ in range(3)] for s in (1, 2)}
        held += difference(base, other).upper >= 100 * 0.01 / 4.5
    assert abs(held / rounds - 0.95) < within


# -- which run is next ---------------------------------------------------------------------------------


def record(run: Run, loss: float, digest: str = "same") -> Record:
    """As a run leaves it."""
    rest = {"curve": [[0, 7.0], [10, loss + 0.1]], "errors": {}, "sent": 1e6, "skipped": 0}
    return {**asdict(run), "loss": loss, "digest": digest, **rest}


def drawn(plan: Plan, means: dict[str, float], deviation: float, seed: int = 5) -> Results:
    """What the plan's runs would leave, with normal losses around the means."""
    draw, done = random.Random(seed), Results([])
    while run := plan.next(done):
        assert run not in done.runs
        done.runs[run] = record(run, draw.gauss(means[run.variant] + run.seed, deviation))
    return done


def test_runs_take_turns_and_nudges_follow_seeds() -> None:
    plan, done = Plan(("zero3", "hpz", "qgz"), (1, 2), runs=2, baseline=3), Results([])
    order = []
    while run := plan.next(done):
        order.append(run)
        done.runs[run] = record(run, 3.0)
    first = [Run("zero3", 1), Run("hpz", 1), Run("qgz", 1), Run("zero3", 2), Run("hpz", 2), Run("qgz", 2)]
    assert order == [*first, Run("zero3", 1, 1)]


def test_the_baseline_takes_part_unasked() -> None:
    assert Plan(("qgz",), (1,), runs=1, baseline=1).next(Results([])) == Run("zero3", 1)


def test_runs_are_added_until_the_interval_decides() -> None:
    means = {"zero3": 3.0, "qwz": 3.0, "zeropp": 3.3}
    names = tuple(means)
    few = drawn(Plan(names, (1,), runs=2, baseline=2), means, 0.02)
    assert few.verdict("qwz") == "open" and len(few.runs) == 6
    done = drawn(Plan(names, (1,), runs=2, baseline=2, until_decided=True, most=200), means, 0.02)
    assert (done.verdict("qwz"), done.verdict("zeropp")) == ("met", "missed")
    assert len(done.of("zero3")) >= len(done.of("qwz")) > len(done.of("zeropp")) >= 2


def test_a_variant_at_its_target_ends_at_the_most_runs() -> None:
    means = {"zero3": 3.0, "zeropp": 3.0 + 0.005 * 4}  # 0.5% of the loss of seed 1
    plan = Plan(tuple(means), (1,), runs=2, baseline=2, until_decided=True, most=7)
    done = drawn(plan, means, 0.05, seed=6)
    assert done.verdict("zeropp") == "open" and len(done.of("zeropp")) == 7


def test_same_bits_are_asked_of_the_same_seed_and_nudge() -> None:
    base = [record(Run("zero3", 1), 3.0, "a"), record(Run("zero3", 2), 3.0, "b")]
    assert Results(base).verdict("hpz") == "open"
    assert Results([*base, record(Run("hpz", 1), 3.0, "a")]).verdict("hpz") == "met"
    assert Results([*base, record(Run("hpz", 2), 3.0, "a")]).verdict("hpz") == "missed"
    assert Results([*base, record(Run("hpz", 2, 1), 3.0, "b")]).verdict("hpz") == "open"


def test_runs_of_other_settings_are_kept_apart(tmp_path: Path) -> None:
    store, settings = Runs(tmp_path / "runs.jsonl"), Settings()
    assert not store.records()
    store.add(settings, record(Run("zero3", 1), 3.0))
    store.add(replace(settings, peak=1.0), record(Run("zero3", 2), 3.1))
    store.add(settings, record(Run("hpz", 1), 3.2))
    again = Runs(store.file)
    assert list(again.results(settings).runs) == [Run("zero3", 1), Run("hpz", 1)]
    assert again.results(settings).losses("hpz") == {1: [3.2]}
    assert again.results(settings).losses("hpz", step=0) == {1: [7.0]}
    assert len(again.records()) == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"curve": 100}, "nearest: 128"),
        ({"evaluation": 0}, "nearest: 128"),
        ({"warmup": 400}, "warmup = 400"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**values)


# -- one run, its report -----------------------------------------------------------------------------------


def test_a_nudge_moves_one_weight() -> None:
    model = Settings(hidden=24, ffn=32, vocabulary=128).decoder()
    init, sizes = initializer(model, 3), {name: p.numel() for name, p in model.named_parameters()}
    moved = []
    for nudge in range(1, 9):
        changed = nudged(init, model, nudge)
        for _ in range(2):  # however often it is asked
            pairs = [(name, changed(name) - init(name)) for name in sizes]
        (found,) = [(name, d) for name, d in pairs if d.any()]
        assert found[1].count_nonzero() == 1 and found[1].max().item() == pytest.approx(0.001, rel=1e-3)
        moved.append((found[0], int(found[1].argmax())))
    assert len(set(moved)) == 8 and len({name for name, _ in moved}) > 2
    assert nudged(init, model, 0) is init


def test_the_report_says_what_was_decided(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = Plan(("hpz", "qwz", "zeropp"), (1, 2), runs=4, baseline=4)
    results = drawn(plan, {"zero3": 3.0, "hpz": 3.0, "qwz": 3.0, "zeropp": 3.5}, 0.001)
    wall = {"rate": "200mbit", "seconds": {"zero3": [0.4, 0.5, 0.6], "zeropp": [0.1, 0.1, 0.2]}}
    codecs = [
        {"step": 400, "codec": c, "loss": 2.0 + e, "error": e} for c, e in (("bf16", 0), ("INT4", 0.01))
    ]
    report = Report(Settings(), results, codecs=codecs, wall=wall)
    text = report.markdown("command")
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert rows["| qwz"].endswith("| 0.3 | met |") and rows["| hpz"].endswith("| same bits | 2 of 2 runs |")
    assert "missed" in text and "| 0.100 (0.100 to 0.200) | 5.00 | 40 |" in text
    assert "| INT4 | 2.0100 | +0.500 | 1.00e-02 |" in text
    report.chart(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
