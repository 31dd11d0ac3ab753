"""benchmarks/loss/study.py --ladder: ranks as threads, runs that go on, the study's order, statistics and page."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from benchmarks.harness import DOCS, Store, section
from benchmarks.loss import data, ladder, published, rounding_noise
from benchmarks.loss.data import corpus, prepare, train_samples
from benchmarks.loss.intervals import effects, t_quantile
from benchmarks.loss.ladder import FIRST, NO_RUNS, Rung, following, halve
from benchmarks.loss.ladder_report import HALF, LadderReport, known, noise_section, with_known
from benchmarks.loss.plan import Runs
from benchmarks.loss.published import HADAMARD, INT4
from benchmarks.loss.rounding_errors import GRADIENTS
from benchmarks.loss.run import RANKS, Run, Settings, train
from benchmarks.loss.snapshot import Snapshot
from benchmarks.loss.study import Trainer, ladder_report
from benchmarks.rank_threads import MeshOf, run_threads
from megazero.data.text import stdlib_sources
from tests import ROOT

TINY = Settings(
    layers=1, hidden=32, ffn=64, heads=2, vocabulary=384, sequence=16, micro_batch=2, steps=6, warmup=2, interval=2,
    curve=128, evaluation=128, exact=256,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 40 files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "sources", lambda name: stdlib_sources()[:40])
        return prepare(tmp_path_factory.mktemp("text"), "stdlib", TINY.vocabulary)


# -- ranks as threads ------------------------------------------------------------------------------------


def exchanged(mesh_of: MeshOf) -> tuple[list[float], list[float]]:
    mesh = mesh_of(shards=(2, 2, 4), ranks_per_node=2)
    row = torch.tensor([float(mesh.rank)])
    return mesh.gather_rows(row).view(-1).tolist(), mesh.gather_along(mesh.data_axes, row).view(-1).tolist()


def test_every_rank_sees_all_rows() -> None:
    assert run_threads(4, exchanged) == [([0.0, 1.0, 2.0, 3.0],) * 2] * 4


def fail_on_rank_2(mesh_of: MeshOf) -> None:
    mesh = mesh_of(shards=(1, 1, 4), ranks_per_node=1)
    if mesh.rank == 2:
        raise KeyError("rank 2")
    mesh.gather_rows(torch.zeros(1))


def test_a_rank_that_fails_ends_the_others() -> None:
    with pytest.raises(KeyError, match="rank 2"):
        run_threads(4, fail_on_rank_2)


@pytest.mark.parametrize(
    "variant",
    [
        *("zeropp-0.20", "outer-8-0.7-streamed"),
        *(pytest.param(variant, marks=pytest.mark.slow) for variant in ("zero3", "muon")),
    ],
)
def test_a_run_that_stops_goes_on_to_the_same_bits(variant: str, folder: Path, tmp_path: Path) -> None:
    """With differences, residuals, a step's measurements and a fragment under way, at every point of the curve."""
    settings, run = replace(TINY, node=1), Run(variant, 1, 1)
    whole = run_threads(RANKS, train, folder, settings, run)[0]
    pieces = 0
    while (
        record := run_threads(RANKS, train, folder, settings, run, None, Snapshot(tmp_path, 0.0))[0]
    ) is None:
        pieces += 1
    assert pieces == 2
    same = ("loss", "curve", "errors", "digest", "corpus")  # bytes not: the order of gathers is learned anew
    assert {key: record[key] for key in same} == {key: whole[key] for key in same}
    assert whole["loss"] < whole["curve"][0][1]


def test_bytes_of_a_run_do_not_depend_on_its_curve(folder: Path, tmp_path: Path) -> None:
    """Of which each point brings the weights up to date across nodes, as a run that goes on does."""
    run = Run("hpz", 1)
    settings = [replace(TINY, interval=interval) for interval in (1, 2, TINY.steps)]
    sent = [run_threads(RANKS, train, folder, each, run)[0]["sent"] for each in settings]
    while (record := run_threads(RANKS, train, folder, TINY, run, None, Snapshot(tmp_path, 0.0))[0]) is None:
        pass
    assert {*sent, record["sent"]} == {sent[0]}


def test_half_a_snapshot_is_none(folder: Path, tmp_path: Path) -> None:
    run = Run("zero3", 1)
    assert run_threads(RANKS, train, folder, TINY, run, None, Snapshot(tmp_path, 0.0))[0] is None
    (tmp_path / "rank-3.pt").unlink()
    snapshot = Snapshot(tmp_path, time.monotonic() + 1e6)
    assert run_threads(RANKS, train, folder, TINY, run, None, snapshot)[0]["curve"][0][0] == 0


def test_a_text_is_not_repeated(folder: Path) -> None:
    with pytest.raises(ValueError, match="the text has"):
        train_samples(folder, TINY.sequence, 1, 10**9)


def test_runs_of_another_text_are_refused(folder: Path, tmp_path: Path) -> None:
    store, other = Runs(tmp_path / "runs"), Runs(tmp_path / "others")
    store.add(TINY, {"corpus": corpus(folder)})
    store.add(replace(TINY, vocabulary=1024), {"corpus": "another"})
    assert store.data(folder.parent, TINY) == folder
    other.add(TINY, {"corpus": "another"})
    with pytest.raises(
        ValueError, match=f"others has runs of another text: tokens another, {corpus(folder)} in"
    ):
        Trainer(folder.parent, other, 1)(replace(TINY, steps=8), FIRST)
    assert not list(folder.parent.glob("snapshot-*"))


def test_tokens_that_have_changed_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    assert prepare(tmp_path, TINY.text, TINY.vocabulary) == copy
    with open(next(copy.glob("*.bin")), "r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(ValueError, match="other tokens than were written there"):
        prepare(tmp_path, TINY.text, TINY.vocabulary)


# -- the order of runs -----------------------------------------------------------------------------------

RUNG = Rung("0.3M", 1, (1e-3, 2e-3, 4e-3), ("qgz", "int4-hadamard"), seeds=2, nudged=1, halved=1)
LOSSES = {"qgz": 0.02, "int4-hadamard": 0.01}


def filled(store: Runs, rungs: list[Rung], count: int = 10**9) -> list[tuple[Settings, Run]]:
    """Do ``count`` runs, as the program does: the middle peak is the best."""
    done = []
    while len(done) < count and (piece := following(rungs, store)):
        settings, run = piece
        loss = 4 + abs(settings.peak - 2e-3) + 0.1 * run.seed + 0.001 * run.nudge + LOSSES.get(run.variant, 0)
        rest = {"curve": [], "errors": {"gradients": 0.1}, "sent": 1.0, "skipped": 0, "cpu_seconds": 36.0}
        store.add(settings, {**asdict(run), "loss": loss, "digest": "", **rest})
        done.append(piece)
    return done


def test_the_peak_is_sought_first_and_its_run_counts(tmp_path: Path) -> None:
    done = filled(Runs(tmp_path / "runs"), [RUNG])
    assert [(s.peak, run) for s, run in done[:3]] == [(peak, FIRST) for peak in RUNG.peaks]
    assert {s.peak for s, _ in done[3:]} == {2e-3}
    best = replace(RUNG.settings(), peak=2e-3)
    assert [run for s, run in done if s == best][1:] == [
        Run("qgz", 1), Run("int4-hadamard", 1), Run("zero3", 2), Run("qgz", 2), Run("int4-hadamard", 2),
        Run("zero3", 1, 1),
    ]  # fmt: skip
    assert done[-1] == (halve(best), FIRST)


def test_a_rung_that_is_done_gives_way(tmp_path: Path) -> None:
    other = replace(RUNG, share=2)
    done = filled(Runs(tmp_path / "runs"), [RUNG, other])
    assert len(done) == len(set(done)) == 2 * len(RUNG.left(NO_RUNS))
    assert {s.steps for s, _ in done[: len(done) // 2]} == {RUNG.settings().steps}


def test_the_plan_counts_what_is_left(tmp_path: Path) -> None:
    store = Runs(tmp_path / "runs")
    assert "| 0.3M x 1 | 315,280 | 308 x 1,024 | 3 + 7 |" in ladder.plan([RUNG], store)
    filled(store, [RUNG], 4)
    row = next(line for line in ladder.plan([RUNG], store).splitlines() if line.startswith("| 0.3M"))
    assert row.split(" | ")[6] == "4"
    filled(store, [RUNG])
    assert "| 0.00 |" in ladder.plan([RUNG], store).splitlines()[-1]


def test_the_study_is_planned_within_eight_hours() -> None:
    hours = ladder.plan(ladder.LADDER, NO_RUNS).splitlines()[-1].split(" | ")[5]
    assert float(hours) <= 8


# -- statistics and page ---------------------------------------------------------------------------------


def test_two_variants_are_compared_in_pairs() -> None:
    base = {1: [3.00], 2: [3.20], 3: [3.05]}
    other = {1: [3.02], 2: [3.21], 3: [3.09]}
    found = effects({"exact": base, "other": other}, "exact")["other"]
    pairs = [other[seed][0] - base[seed][0] for seed in base]
    whole = fmean(runs[0] for runs in base.values())
    half = t_quantile(0.95, 2) * stdev(pairs) / math.sqrt(3)
    expected = [100 * x / whole for x in (fmean(pairs), fmean(pairs) - half, fmean(pairs) + half)]
    assert [found.percent, found.lower, found.upper] == pytest.approx(expected)


def test_runs_that_are_only_means_have_no_bounds() -> None:
    found = effects({"exact": {1: [3.0]}, "other": {1: [3.3]}, "alone": {2: [1.0]}}, "exact")
    assert list(found) == ["other"] and found["other"].percent == pytest.approx(10)
    assert not math.isfinite(found["other"].upper)


def test_page_of_runs(tmp_path: Path) -> None:
    store = Runs(tmp_path / "runs")
    filled(store, [RUNG])
    text = [{"name": "torch", "version": "2", "files": 3, "bytes": 4000, "digest": ""}]
    report = LadderReport([RUNG, replace(RUNG, share=2)], store, text, [])
    page = report.markdown("command")
    base = fmean(r["loss"] for r in report.results[RUNG].of("zero3"))
    assert f"| {100 * 0.02 / base:+.2f} |" in page and HALF in page and "| torch | 2 | 3 | 4,000 |" in page
    assert "any model of more than 1.3M" in page
    report.chart(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_paragraph_of_loss_md_is_of_the_runs() -> None:
    page = (DOCS / "loss.md").read_text()
    assert page == with_known(page, known(ladder_report(DOCS)))


def test_pages_quote_the_published_losses() -> None:
    """README.md and slow-links.md say by hand what loss.md computes; the figures are the papers'."""
    zeropp, sdp4bit = published.ZEROPP, published.SDP4BIT
    assert section(DOCS / "loss_at_size.md", "Published gaps").strip().endswith(published.table().strip())
    gaps = [f"{each.gap(name):+.2f}" for name in (INT4, HADAMARD) for each in sdp4bit]
    assert gaps == ["+0.47", "+0.40", "+1.19", "+0.06", "+0.09", "+0.19"]
    losses = [f"{loss:.4f}" for loss in (zeropp.exact, *zeropp.losses.values())]
    assert losses == ["2.1218", "2.1656", "2.1340", "2.1217"]
    slow, readme = (each.read_text() for each in (DOCS / "slow-links.md", ROOT / "README.md"))
    worst = [
        f"{max(e.least_speed(name) for e in (zeropp, *sdp4bit) if name in e.losses):.2f}"
        for name in (INT4, HADAMARD)
    ]
    assert all(figure in slow for figure in (*losses, *gaps, *worst, f"{zeropp.gap(INT4):+.2f}%"))
    assert all(
        figure in readme for figure in (gaps[1], gaps[3], gaps[5], *worst, f"{zeropp.gap(INT4):+.2f}%")
    )


def test_what_rounding_costs_in_tokens() -> None:
    """A run with as many tokens more as the exact one needs less has the exact one's loss."""
    found = published.Published("a paper", "1M", 1e6, 1e9, 2.0, {"rounded": 2.0 + 0.05})
    term = published.DATA_TERM * 1e9**-published.DATA_POWER
    fewer = 1e9 / found.least_speed("rounded")
    assert published.DATA_TERM * fewer**-published.DATA_POWER == pytest.approx(term + 0.05)


# -- rounding beside noise -------------------------------------------------------------------------------


def test_noise_of_known_draws() -> None:
    torch.manual_seed(0)
    mean = torch.randn(4096)
    squares, spread = rounding_noise.noise(mean + 3 * torch.randn(64, 4096))
    assert squares == pytest.approx(float(mean.square().sum()), rel=0.1)
    assert spread == pytest.approx(9 * 4096, rel=0.05)


def test_rounding_of_pure_noise_adds_its_square() -> None:
    """Where draws have no common part and rounding has no bias, noise grows by error^2."""
    torch.manual_seed(0)
    draws = torch.randn(32, 64 * 256)
    found = rounding_noise.compare([draws], GRADIENTS["INT4 + H"])
    assert found.error == pytest.approx(0.107, abs=0.005)
    assert found.added == pytest.approx(found.error**2, rel=0.2)


def test_rounding_of_one_gradient_is_bias() -> None:
    draws = torch.randn(64 * 64).expand(4, -1).contiguous()
    found = rounding_noise.compare([draws + 1e-6 * torch.randn(4, 64 * 64)], GRADIENTS["INT4"])
    assert found.bias == pytest.approx(found.error, rel=1e-3)


def test_grouped_gradients_are_means() -> None:
    draws = {"a": torch.arange(8.0).view(4, 2)}
    assert rounding_noise.grouped(draws, 2)["a"].tolist() == [[1.0, 2.0], [5.0, 6.0]]


def test_noise_at_another_peak_is_measured_again(tmp_path: Path) -> None:
    store, settings = Store(tmp_path / "noise"), RUNG.settings()
    found = {"error": 0.1, "added": 0.01, "bias": 0.0}
    step = {"rung": RUNG.name, "step": settings.steps, "steps": settings.steps, "peak": settings.peak}
    codecs = dict.fromkeys(rounding_noise.CODECS, found)
    store.append({**step, "tokens": 256, "kind": rounding_noise.ALL, "noise": 20.0, **codecs})
    assert rounding_noise.measured(store, RUNG.name, settings)
    assert not rounding_noise.measured(store, RUNG.name, replace(settings, peak=4e-3))
    assert f"| {RUNG.name} | 0.001 | 308 of 308 | 256 | 20.0 |" in noise_section(store.records())
