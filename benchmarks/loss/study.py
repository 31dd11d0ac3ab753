"""Does quantised communication cost loss? One Llama on the quickstart's text under zero3 and ZeRO++'s variants.

    python -m benchmarks.loss.study --work runs/loss --out docs/results --until-decided --codecs --wall-time 200mbit

Runs (variant, seed, nudge) take turns, one at a time, on 4 ranks as 2 nodes of 2. Ranks are threads of this process
and have the bits of gloo's (rank_threads.py). Each run is one line in WORK/runs.jsonl, so the same command continues
where it stopped. ``nudge`` moves one initial weight by 0.001: how far such runs of zero3 end apart is the noise that
differences are judged against. With --until-decided runs are added until the 95% bounds of each variant with a target
are on one side of it. Writes loss.md and loss.png.

    python -m benchmarks.loss.study --ladder --plan
    python -m benchmarks.loss.study --ladder --minutes 9

prints what the study over sizes (ladder.py) will run and cost, and does nine minutes of it. Its runs are lines of
loss_at_size.jsonl; a run that --minutes ends continues from WORK. Writes loss_at_size.md and loss_at_size.png.
Mixtures of experts are a rung by name: --ladder "2.4M of 8 experts x 0.125".

    python -m benchmarks.loss.study --outer --minutes 60

does an hour of the study of outer steps (outer.py), whose runs are lines of loss_outer.jsonl, and writes its section
of loss.md. --plan prints what it will run and cost. These files lie in benchmarks/results, or in another OUT.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
import shutil
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Store
from benchmarks.loss import ladder, outer
from benchmarks.loss.data import corpus, note
from benchmarks.loss.ladder import LADDER, RUNGS, Rung
from benchmarks.loss.ladder_report import LadderReport
from benchmarks.loss.outer import OuterStudy
from benchmarks.loss.plan import Plan, Results, Runs
from benchmarks.loss.report import Report
from benchmarks.loss.run import RANKS, Run, Settings, trace_file, traced, train
from benchmarks.loss.snapshot import Snapshot
from benchmarks.loss.summary import with_summary
from benchmarks.loss.variants import BASELINE, DEFAULT, VARIANTS, WEIGHT_CODECS
from benchmarks.loss.wall_time import measure
from benchmarks.loss.weight_codecs import compare_codecs
from benchmarks.rank_threads import run_threads
from benchmarks.results import data_of


def name_of(*what: Any) -> str:
    """Return a folder's name for the values of dataclasses."""
    return hashlib.sha256(json.dumps([asdict(each) for each in what]).encode()).hexdigest()[:8]


class Trainer:
    """Trains one run at a time, for ``minutes``. store: of finished runs. work: data, and unfinished runs."""

    def __init__(self, work: Path, store: Runs, minutes: float = math.inf) -> None:
        self.work, self.store, self.began = work, store, time.monotonic()
        self.until = self.began + 60 * minutes

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until

    def __call__(self, settings: Settings, run: Run, trace: Path | None = None) -> None:
        """Train the run unless the store has it, and print its loss."""
        if run in self.store.results(settings).runs:
            return
        data = self.store.data(self.work, settings)
        snapshot = Snapshot(self.work / f"snapshot-{name_of(settings, run)}-{corpus(data)}", self.until)
        record = run_threads(RANKS, train, data, settings, run, trace, snapshot)[0]
        if record is None:
            print(
                f"[{time.monotonic() - self.began:.0f} s] {run}: left, the same command goes on", flush=True
            )
            return
        self.store.add(settings, record)
        shutil.rmtree(snapshot.folder, ignore_errors=True)
        found = self.store.results(settings).difference(run.variant)
        more = (
            ""
            if run.variant == BASELINE
            else f", {found.percent:+.2f}% ({found.lower:+.2f} to {found.upper:+.2f})"
        )
        print(
            f"[{time.monotonic() - self.began:.0f} s] {run}, peak {settings.peak:g}: loss {record['loss']:.4f}, "
            f"{record['seconds']:.0f} s ({record['cpu_seconds']:.0f} s of CPU time){more}",
            flush=True,
        )


class Ladder:
    """The study over sizes, of some rungs. Its runs are data of ``out``, as is a list of the text's sources."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rungs: list[Rung] = [RUNGS[name] for name in options.ladder] or list(LADDER)
        self.store = Runs(data_of(options.out) / "loss_at_size.jsonl")
        self.trainer = Trainer(options.work, self.store, options.minutes)

    def run(self) -> None:
        self._note_text()
        while not self.trainer.late and (piece := ladder.following(self.rungs, self.store)):
            self.trainer(*piece)

    def _note_text(self) -> None:
        """List the sources of the first run's text."""
        if not self.store.records():
            rows = note(self.store.data(self.options.work, ladder.BASE))["contents"]
            (data_of(self.options.out) / "loss_at_size_text.json").write_text(
                json.dumps(rows, indent=1) + "\n"
            )

    def plan(self) -> str:
        return ladder.plan(self.rungs, self.store)

    def report(self, out: Path, command: str) -> None:
        """Write loss_at_size.md and loss_at_size.png, and the first sections of loss.md."""
        report = ladder_report(out)
        (out / "loss_at_size.md").write_text(report.markdown(command))
        report.chart(out / "loss_at_size.png")
        if (page := out / "loss.md").exists():
            page.write_text(with_summary(page.read_text(), report, data_of(out)))
        print(self.plan())


def ladder_report(out: Path) -> LadderReport:
    """Return the report of the data of ``out``."""
    data = data_of(out)
    text = data / "loss_at_size_text.json"
    return LadderReport(
        [*LADDER, *ladder.MORE, *ladder.EXPERTS],
        Runs(data / "loss_at_size.jsonl"),
        json.loads(text.read_text()) if text.exists() else [],
        Store(data / "loss_at_size_noise.jsonl").records(),
    )


class OuterRuns:
    """The study of outer steps. Its runs lie in ``out``."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.study = outer_study(options.out, options.outer)
        self.trainer = Trainer(options.work, self.study.store, options.minutes)

    def run(self) -> None:
        while not self.trainer.late and (left := self.study.left()):
            self.trainer(*left[0])

    def plan(self) -> str:
        return self.study.plan()

    def report(self, out: Path, command: str) -> None:
        """Write the section of loss.md."""
        harness.write_section(out / "loss.md", outer.TITLE, self.study.section())
        print(self.study.section())


def outer_study(out: Path, steps: int = outer.STEPS) -> OuterStudy:
    return OuterStudy(Runs(data_of(out) / "loss_outer.jsonl"), steps)


class Comparison:
    """The comparison of variants that a command line asks for. Its work folder has the data, the runs, and what else
    was measured for these settings."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.settings = Settings(**{f.name: getattr(options, f.name) for f in fields(Settings)})
        self.plan = Plan(
            tuple(options.variants), tuple(options.seeds), options.runs, options.baseline_runs,
            options.until_decided, options.most_runs,
        )  # fmt: skip
        self.store = Runs(options.work / "runs.jsonl")
        self.trainer = Trainer(options.work, self.store, options.minutes)
        self.folder = options.work / f"settings-{name_of(self.settings)}"

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        data = self.store.data(self.options.work, self.settings)
        for peak in self.options.tune:
            self._train(replace(self.settings, peak=peak), self._first)
        while not self.trainer.late and (run := self.plan.next(self.results)):
            self._train(self.settings, run)
        if self.options.codecs and not self.trainer.late:
            self._compare_codecs(data)
        if self.options.wall_time:
            names = [BASELINE, *(name for name in self.plan.variants if name != BASELINE)]
            wall = measure(data, self.settings, names, self.options.wall_time)
            (self.folder / "wall-time.json").write_text(json.dumps(wall))

    @property
    def results(self) -> Results:
        return self.store.results(self.settings)

    def _train(self, settings: Settings, run: Run) -> None:
        self.trainer(settings, run, self._trace_of(settings, run))

    def _trace_of(self, settings: Settings, run: Run) -> Path | None:
        """Return where the run's masters go: the codecs are compared on the baseline's first run."""
        return self._trace if (settings, run) == (self.settings, self._first) else None

    @property
    def _first(self) -> Run:
        return Run(BASELINE, self.plan.seeds[0])

    @property
    def _trace(self) -> Path:
        return self.folder / f"master-of-seed-{self.plan.seeds[0]}"

    def _compare_codecs(self, data: Path) -> None:
        if {row["codec"] for row in self._kept("codecs", [])} == set(WEIGHT_CODECS):
            return
        if not all(trace_file(self._trace, step).exists() for step in traced(self.settings.steps)):
            # That run was made as one of --tune, or with other seeds first.
            run_threads(RANKS, train, data, self.settings, self._first, self._trace)
        rows = run_threads(RANKS, compare_codecs, data, self.settings, self._trace)[0]
        (self.folder / "codecs.json").write_text(json.dumps(rows))

    def report(self, out: Path, command: str) -> None:
        """Write loss.md and loss.png of the runs so far."""
        results = self.results
        if not results.of(BASELINE):
            raise ValueError("no run of zero3 yet: nothing to compare with")
        others = [
            r
            for r in self.store.records()
            if Run(r["variant"], r["seed"], r["nudge"]) == self._first
            and replace(Settings(**r["settings"]), peak=self.settings.peak) == self.settings
        ]
        report = Report(
            self.settings,
            results,
            others,
            self._kept("codecs", []),
            self._kept("wall-time", None),
            until_decided=self.plan.until_decided,
        )
        out.mkdir(parents=True, exist_ok=True)
        text = with_summary(report.markdown(command), ladder_report(out), data_of(out))
        text += f"\n## {outer.TITLE}\n\n{outer_study(out).section()}"
        (out / "loss.md").write_text(text)
        report.chart(out / "loss.png")
        print(text)

    def _kept(self, name: str, default: Any) -> Any:
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else default


# What a study leaves to the command line.
OF_STUDIES = ("--ladder", "--outer", "--work", "--out", "--minutes", "--plan", "--report")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = harness.parser(
        __doc__,
        work=(Path("runs/loss"), "data and finished runs"),
        out=(Path("docs/results"), "folder of loss.md and loss.png"),
        seeds=([1, 2], "of data order and initial weights"),
        runs=(4, "of each variant, over all seeds"),
        baseline_runs=(10, "of zero3, over all seeds"),
        until_decided=(False, "add runs until each target is met or missed"),
        most_runs=(16, "of a variant with --until-decided"),
        minutes=(
            math.inf,
            "begin no run after this time, and leave one under way at the next point of its curve",
        ),
        plan=(False, "of --ladder and --outer: print what is to run and its hours, and end"),
        codecs=(False, "the loss of one master under each weight codec, too"),
        report=(False, "run nothing, write loss.md and loss.png of what is there"),
    )
    add = parser.add_argument
    add("--variants", nargs="+", choices=VARIANTS, default=list(DEFAULT), metavar="NAME",
        help=f"zero3 always takes part; known: {', '.join(VARIANTS)} (default: {', '.join(DEFAULT)})")  # fmt: skip
    add("--ladder", nargs="*", choices=RUNGS, metavar="RUNG",
        help=f"the study over sizes, some rungs of it (default: {', '.join(r.name for r in LADDER)}; "
             f"more: {', '.join(repr(name) for name in RUNGS if RUNGS[name] not in LADDER)})")  # fmt: skip
    add("--outer", type=int, nargs="?", const=outer.STEPS, metavar="STEPS",
        help="the study of outer steps, its runs of so many steps (default: %(const)s)")  # fmt: skip
    add("--tune", type=float, nargs="+", default=[], metavar="PEAK",
        help="first one zero3 run at each of these rates")  # fmt: skip
    add("--wall-time", metavar="RATE", help="seconds per step at a link's rate, such as 200mbit")
    group = parser.add_argument_group("settings that all runs share")
    for each in fields(Settings):
        name = "--lr" if each.name == "peak" else f"--{each.name.replace('_', '-')}"
        group.add_argument(name, dest=each.name, type=type(each.default), default=each.default, metavar="N",
                           help="default: %(default)s")  # fmt: skip
    options = parser.parse_args(arguments)
    if min(options.runs, options.baseline_runs, options.most_runs) < 1:
        parser.error("--runs, --baseline-runs and --most-runs are at least 1")
    if options.plan and options.ladder is None and options.outer is None:
        parser.error("--plan is of --ladder and of --outer")
    if options.ladder is not None and options.outer is not None:
        parser.error("--ladder and --outer are two studies: give one")
    study = "--ladder" if options.ladder is not None else "--outer" if options.outer is not None else None
    given = [word.partition("=")[0] for word in (sys.argv[1:] if arguments is None else arguments)]
    own = [word for word in given if word.startswith("--") and word not in OF_STUDIES]
    if study and own:
        parser.error(f"{', '.join(own)}: not with {study}, which says its own")
    if len(set(options.seeds)) < len(options.seeds):
        parser.error(f"--seeds {options.seeds} has one twice: more runs of a seed differ by a nudge")
    return options


def main() -> int:
    options = parse()
    command = f"python -m benchmarks.loss.study {shlex.join(sys.argv[1:])}".rstrip()
    torch.set_num_threads(1)
    try:
        if options.outer is not None:
            comparison: Comparison | Ladder | OuterRuns = OuterRuns(options)
        else:
            comparison = Comparison(options) if options.ladder is None else Ladder(options)
        if options.plan and not isinstance(comparison, Comparison):
            print(comparison.plan())
            return 0
        if not options.report:
            comparison.trainer.store.claim()
            comparison.run()
        comparison.report(options.out, command)
    except (ValueError, RuntimeError) as error:
        print(f"loss: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nloss: interrupted; the same command goes on, --report writes what there is", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    harness.start(main)
