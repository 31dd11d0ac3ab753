"""Does quantised communication cost loss? One Llama on the quickstart's text under zero3 and ZeRO++'s variants.

    python benchmarks/loss.py --work runs/loss --out docs --until-decided --codecs --wall-time 200mbit

Runs (variant, seed, nudge) take turns, one at a time, on 4 gloo ranks as 2 nodes of 2; each is one line in
WORK/runs.jsonl, so the same command goes on where it stopped. ``nudge`` moves one initial weight by 0.001: how far
such runs of zero3 end apart is the noise that differences are judged against. With --until-decided runs are
added until the 95% bounds of each variant with a target are on one side of it. Writes loss.md and loss.png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.loss_codecs import compare_codecs
from benchmarks.loss_data import prepare
from benchmarks.loss_plan import Plan, Results, Runs
from benchmarks.loss_report import Report
from benchmarks.loss_run import RANKS, Run, Settings, trace_file, traced, train
from benchmarks.loss_variants import BASELINE, DEFAULT, VARIANTS, WEIGHT_CODECS
from benchmarks.loss_walltime import measure
from tests.dist.pool import run_ranks

TIMEOUT = 1800.0  # seconds, of a run


class Comparison:
    """What a command line asks for. work holds the data, the runs, and per settings what else was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self.settings = Settings(**{f.name: getattr(options, f.name) for f in fields(Settings)})
        self.plan = Plan(
            tuple(options.variants), tuple(options.seeds), options.runs, options.baseline_runs,
            options.until_decided, options.most_runs,
        )  # fmt: skip
        self.store = Runs(options.work / "runs.jsonl")
        self.data = options.work / f"data-{self.settings.vocabulary}"
        key = hashlib.sha256(json.dumps(asdict(self.settings)).encode()).hexdigest()[:8]
        self.folder = options.work / f"settings-{key}"

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        prepare(self.data, self.settings.vocabulary)
        for peak in self.options.tune:
            self._train(replace(self.settings, peak=peak), self._first)
        while not self._late and (run := self.plan.next(self.results)):
            self._train(self.settings, run)
        if self.options.codecs and not self._late:
            self._compare_codecs()
        if self.options.wall_time:
            names = [BASELINE, *(name for name in self.plan.variants if name != BASELINE)]
            wall = measure(self.data, self.settings, names, self.options.wall_time)
            (self.folder / "wall-time.json").write_text(json.dumps(wall))

    @property
    def results(self) -> Results:
        return self.store.results(self.settings)

    @property
    def _late(self) -> bool:
        return time.monotonic() - self.began > 60 * self.options.minutes

    def _train(self, settings: Settings, run: Run) -> None:
        """Do it unless it is done, and say how it went."""
        if run in self.store.results(settings).runs:
            return
        record = run_ranks(
            RANKS, train, self.data, settings, run, self._trace_of(settings, run), timeout=TIMEOUT
        )[0]
        self.store.add(settings, record)
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

    def _trace_of(self, settings: Settings, run: Run) -> Path | None:
        """The codecs are compared on the baseline's first run."""
        return self._trace if (settings, run) == (self.settings, self._first) else None

    @property
    def _first(self) -> Run:
        return Run(BASELINE, self.plan.seeds[0])

    @property
    def _trace(self) -> Path:
        return self.folder / f"master-of-seed-{self.plan.seeds[0]}"

    def _compare_codecs(self) -> None:
        file = self.folder / "codecs.json"
        known = json.loads(file.read_text()) if file.exists() else []
        if {row["codec"] for row in known} == set(WEIGHT_CODECS):
            return
        if not all(trace_file(self._trace, step).exists() for step in traced(self.settings.steps)):
            # That run was made as one of --tune, or with other seeds first.
            run_ranks(RANKS, train, self.data, self.settings, self._first, self._trace, timeout=TIMEOUT)
        rows = run_ranks(RANKS, compare_codecs, self.data, self.settings, self._trace, timeout=TIMEOUT)[0]
        file.write_text(json.dumps(rows))

    def report(self, out: Path, command: str) -> None:
        """Write loss.md and loss.png of what there is by now."""
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
        text = report.markdown(command)
        (out / "loss.md").write_text(text)
        report.chart(out / "loss.png")
        print(text)

    def _kept(self, name: str, default: Any) -> Any:
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text()) if file.exists() else default


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--work", type=Path, default=Path("runs/loss"), help="data and finished runs (default: %(default)s)")
    add(
        "--out", type=Path, default=Path("docs"), help="folder of loss.md and loss.png (default: %(default)s)"
    )
    add("--variants", nargs="+", choices=VARIANTS, default=list(DEFAULT), metavar="NAME",
        help=f"zero3 always takes part; known: {', '.join(VARIANTS)} (default: {', '.join(DEFAULT)})")  # fmt: skip
    add("--seeds", type=int, nargs="+", default=[1, 2], help="of data order and initial weights")
    add("--runs", type=int, default=4, help="of each variant, over all seeds (default: %(default)s)")
    add("--baseline-runs", type=int, default=10, help="of zero3, over all seeds (default: %(default)s)")
    add("--until-decided", action="store_true", help="add runs until each target is met or missed")
    add("--most-runs", type=int, default=16, help="of a variant with --until-decided (default: %(default)s)")
    add("--minutes", type=float, default=float("inf"), help="begin no run after this time")
    add(
        "--tune",
        type=float,
        nargs="+",
        default=[],
        metavar="PEAK",
        help="first one zero3 run at each of these rates",
    )
    add("--codecs", action="store_true", help="the loss of one master under each weight codec, too")
    add(
        "--wall-time",
        metavar="RATE",
        help="seconds per step at a link's rate, such as 200mbit (see tests/netlab)",
    )
    add("--report", action="store_true", help="run nothing, write loss.md and loss.png of what is there")
    group = parser.add_argument_group("settings that all runs share")
    for each in fields(Settings):
        name = "--lr" if each.name == "peak" else f"--{each.name.replace('_', '-')}"
        group.add_argument(name, dest=each.name, type=type(each.default), default=each.default, metavar="N",
                           help="default: %(default)s")  # fmt: skip
    options = parser.parse_args(arguments)
    if min(options.runs, options.baseline_runs, options.most_runs) < 1:
        parser.error("--runs, --baseline-runs and --most-runs are at least 1")
    if len(set(options.seeds)) < len(options.seeds):
        parser.error(f"--seeds {options.seeds} has one twice: more runs of a seed differ by a nudge")
    return options


def main() -> int:
    options = parse()
    command = f"python benchmarks/loss.py {shlex.join(sys.argv[1:])}".rstrip()
    try:
        comparison = Comparison(options)
        if not options.report:
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
    sys.exit(main())
