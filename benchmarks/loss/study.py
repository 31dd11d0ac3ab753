"""Do quantised messages, or outer steps, cost loss? Llamas on Python sources, each run beside exact messages.

    python -m benchmarks.loss.study formats --variants qgz zeropp --runs 4 --baseline-runs 7
    python -m benchmarks.loss.study sizes      # over sizes of the model, and of a mixture of experts
    python -m benchmarks.loss.study outer      # outer steps: intervals, bits, rules, Muon inside
    python -m benchmarks.loss.study formats --peak 1e-3 2e-3 4e-3 --runs 1 --baseline-runs 1   # which peak is best

A run is a variant of variants.py, a seed and a nudge, which moves one initial weight by 0.001: how far such runs end
apart is the noise floor. Its 4 ranks are threads of this process and have the bits of gloo's (rank_threads.py). Each
run is a line of a file, so the same command goes on where it stopped: of WORK/runs.jsonl (formats), of
loss_at_size.jsonl or loss_outer.jsonl in --results. Each study prints its table; ``benchmarks.loss.page`` writes the
last two into docs/results/loss.md.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import harness
from benchmarks.loss.data import corpus, prepare
from benchmarks.loss.intervals import Difference, effects, estimate
from benchmarks.loss.run import Run, Settings, ranks_of, train
from benchmarks.loss.variants import BASELINE, MUON, VARIANTS
from benchmarks.rank_threads import run_threads
from benchmarks.results import RESULTS

Record = dict[str, Any]
FORMATS = ("hpz", "qwz", "qgz", "zeropp-int8", "zeropp")
HEAD = [
    "", "what crosses nodes", "bytes a step / 2N", "runs", "loss", "noise floor %", "gap %", "95% bounds %",
    "gradients' error",
]  # fmt: skip


# -- what runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Runs of one variant, a line of a table. label: by default the variant's. beside: the line that the gap is from.
    No runs: the variant is gone; its old runs count in the deviation and are not shown."""

    variant: str
    settings: Settings
    runs: tuple[Run, ...]
    label: str = ""
    beside: str = BASELINE

    @property
    def name(self) -> str:
        return self.label or self.variant


@dataclass(frozen=True)
class Group:
    """Lines that are compared: of one model, text and schedule."""

    name: str
    lines: tuple[Line, ...]


def runs_of(variant: str, count: int, seeds: int | Sequence[int]) -> tuple[Run, ...]:
    """Run number k has seed k mod seeds and nudge k // seeds. seeds: those from 1, or which."""
    chosen = range(1, seeds + 1) if isinstance(seeds, int) else seeds
    return tuple(Run(variant, chosen[k % len(chosen)], k // len(chosen)) for k in range(count))


# Four nodes of one rank: three of four messages of a sum are rounded. Of two nodes it would be one of two.
BASE = Settings(text="packages", node=1, exact=1024)
SIZES = {
    "0.3M": replace(BASE, layers=2, hidden=80, ffn=208, heads=2, micro_batch=2),
    "1.3M": replace(BASE, layers=2, hidden=192, ffn=512, heads=3, micro_batch=4),
    "5M": replace(BASE, layers=4, hidden=320, ffn=720, heads=5, micro_batch=8),
    # In fp32, which is the faster one of CPUs without instructions for bf16.
    "2.4M of 8 experts": replace(
        BASE, layers=2, hidden=64, ffn=96, heads=2, vocabulary=16384, micro_batch=2, experts=8, dtype="fp32",
        text="stdlib", evaluation=512,
    ),
}  # fmt: skip
TWO_BITS = ("int2-hadamard-clip", "int2-hadamard-clip-feedback")  # gone
HALF = "exact, half the batch"


def size(
    name: str,
    share: float,
    peak: float,
    variants: Sequence[str],
    seeds: int = 3,
    nudged: int = 3,
    halved: int = 0,
) -> Group:
    """Return the runs of one size for ``share`` tokens a parameter. peak: the best one of exact runs of seed 1.
    nudged: more exact runs, over all seeds. halved: exact runs with half the batch for as many steps: a measure of
    what noise costs."""
    shape = SIZES[name]
    steps = round(share * parameters(shape) / shape.tokens)
    settings = replace(shape, steps=steps, warmup=max(1, steps // 10), peak=peak)
    lines = [Line(BASELINE, settings, runs_of(BASELINE, seeds + nudged, seeds))]
    lines += [Line(v, settings, () if v in TWO_BITS else runs_of(v, seeds, seeds)) for v in variants]
    if halved:
        half = replace(settings, micro_batch=settings.micro_batch // 2)
        lines.append(Line(BASELINE, half, runs_of(BASELINE, halved, halved), HALF))
    return Group(f"{name} x {share:g}", tuple(lines))


def sizes() -> list[Group]:
    """ "1.3M x 4" are 4 training tokens a parameter."""
    plain, mixed, both = "qgz", "int4-hadamard", "zeropp-hadamard"
    every = (plain, mixed, both, *TWO_BITS)
    return [
        size("0.3M", 1, 4e-3, every, seeds=6, nudged=6, halved=3),
        size("0.3M", 4, 4e-3, every, halved=3),
        size("1.3M", 1, 2e-3, every, halved=2),
        size("5M", 0.5, 1e-3, (plain, mixed), seeds=2, nudged=1),
        # Differences of weights and sums of gradients of experts, too, in INT4.
        size("2.4M of 8 experts", 0.125, 4e-3, (both, "dispatch-int8")),
    ]


OUTER_STEPS = 1536  # the longest interval divides it: at the end all replicas have met
STREAMED = "outer-32-average-streamed"  # gone


def outer() -> list[Group]:
    """Runs that meet in every step beside runs with outer steps, all equally long. The peaks are the best of runs
    that meet in every step, the rule of the outer optimizer the best of seed 1."""
    base = Settings(steps=OUTER_STEPS, warmup=OUTER_STEPS // 10)
    five = SIZES["5M"]
    large = replace(base, layers=five.layers, hidden=five.hidden, ffn=five.ffn, heads=five.heads, peak=1e-3)

    def of(settings: Settings, seeds: int, beside: str, *variants: str) -> Iterator[Line]:
        for name in variants:
            runs = () if name == STREAMED else runs_of(name, seeds, seeds)
            yield Line(name, settings, runs, beside=beside)

    averages = ("outer-8-average", "outer-32-average", "outer-128-average")
    forms = ("outer-32-average-4bit", "outer-32-average-2bit", STREAMED)
    lines = [
        *of(base, 3, BASELINE, BASELINE, "zeropp", *averages, *forms),
        *of(base, 3, BASELINE, MUON),
        *of(base, 3, MUON, "outer-32-average-muon"),
    ]
    return [
        Group("1.3M", tuple(lines)),
        Group("5M", tuple(of(large, 1, BASELINE, BASELINE, "outer-8-average", "outer-8-average-4bit"))),
    ]


def formats(options: argparse.Namespace) -> list[Group]:
    """Return a group for each of --peak."""
    values = {f.name: getattr(options, f.name) for f in fields(Settings)}
    counts = {BASELINE: options.baseline_runs, **dict.fromkeys(options.variants, options.runs)}
    found = []
    for peak in options.peak:
        settings = Settings(**values | {"peak": peak})
        lines = (Line(v, settings, runs_of(v, count, options.seeds)) for v, count in counts.items())
        found.append(Group(f"peak {peak:g}", tuple(lines)))
    return found


@cache
def parameters(settings: Settings) -> int:
    return sum(p.numel() for p in settings.decoder().parameters())


# -- what was found ----------------------------------------------------------------------------------------


class Store(harness.Store):
    """Records of runs, of several Settings."""

    def of(self, line: Line) -> list[Record]:
        """Return the runs of a line, the newest of each seed and nudge."""
        rows = [row for row in self.records() if row["variant"] == line.variant]
        rows = [row for row in rows if Settings(**row["settings"]) == line.settings]
        return list({(row["seed"], row["nudge"]): row for row in rows}.values())

    def data(self, work: Path, settings: Settings) -> Path:
        """Prepare the text of these settings in ``work``; return its folder. Raises ValueError if runs that are there
        were of other tokens."""
        folder, text = prepare(work, settings.text, settings.vocabulary), (settings.text, settings.vocabulary)
        alike = [r for r in self.records() if (r["settings"]["text"], r["settings"]["vocabulary"]) == text]
        if others := {str(r["corpus"]) for r in alike} - {corpus(folder)}:
            raise ValueError(
                f"{self.file} has runs of other tokens ({', '.join(sorted(others))}) than {folder}: use the Python "
                "and packages of those runs, or another file (--work, --results)"
            )
        return folder


def left(groups: Sequence[Group], store: Store) -> Iterator[tuple[Settings, Run]]:
    """Yield the runs that are not there. Lines of a group take turns, so that an interrupted study is balanced."""
    for group in groups:
        done = {line: {(r["seed"], r["nudge"]) for r in store.of(line)} for line in group.lines}
        for turn in zip_longest(*(line.runs for line in group.lines)):
            for line, run in zip(group.lines, turn, strict=True):
                if run and (run.seed, run.nudge) not in done[line]:
                    yield line.settings, run


def gaps(group: Group, store: Store) -> dict[str, Difference]:
    """Return by line how far its losses lie above those of the line that it stands beside."""
    losses: dict[str, dict[int, list[float]]] = {}
    for line in group.lines:
        for record in store.of(line):
            losses.setdefault(line.name, {}).setdefault(record["seed"], []).append(record["loss"])
    found = {base: effects(losses, base) for base in {line.beside for line in group.lines} if base in losses}
    each = {line.name: found.get(line.beside, {}).get(line.name) for line in group.lines}
    return {name: gap for name, gap in each.items() if gap is not None}


def table(groups: Sequence[Group], store: Store) -> str:
    """Return the table of a study, without lines that have no run."""
    rows = []
    for group in groups:
        found, name = gaps(group, store), group.name
        for line in group.lines:
            records = store.of(line)
            if records and line.runs:
                rows.append([name, *_cells(line, records, found.get(line.name))])
                name = ""
    return harness.table(HEAD, rows)


def _cells(line: Line, records: Sequence[Record], gap: Difference | None) -> list[str]:
    by_seed: dict[int, list[float]] = {}
    for record in records:
        by_seed.setdefault(record["seed"], []).append(record["loss"])
    mine = estimate(by_seed)
    label = line.label or VARIANTS[line.variant].label
    sent = fmean(r["sent"] for r in records) / (2 * parameters(line.settings))
    noise = "-" if mine.deviation is None else f"{100 * mine.deviation / mine.mean:.2f}"
    errors = [r["errors"]["gradients"] for r in records if "gradients" in r["errors"]]
    return [
        f"{'Muon: ' if VARIANTS[line.variant].muon else ''}{label}",
        f"{sent:.3f}",
        str(mine.runs),
        f"{mine.mean:.4f}",
        noise,
        f"{gap.percent:+.2f}" if gap else "-",
        gap.bounds if gap else "-",
        f"{fmean(errors):.3f}" if errors else "-",
    ]


# -- the program -------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    studies = parser.add_subparsers(dest="study", required=True)
    shared: dict[str, Any] = {
        "work": (Path("runs/loss"), "the text, and the runs of formats"),
        "results": (RESULTS, "folder of the runs of sizes and outer"),
        "minutes": (math.inf, "begin no run after so many"),
    }
    own: dict[str, Any] = {
        "variants": (list(FORMATS), f"known: {', '.join(VARIANTS)}"),
        "runs": (4, "of each variant, over all seeds"),
        "baseline_runs": (10, "of zero3, over all seeds"),
        "seeds": ([1, 2], "of data order and initial weights"),
        **{each.name: each.default for each in fields(Settings)},
        "peak": ([Settings.peak], "learning rates, each compared for itself"),
    }
    for name, given in {"formats": shared | own, "sizes": shared, "outer": shared}.items():
        of_study = harness.parser(None, **given)
        studies.add_parser(name, parents=[of_study], conflict_handler="resolve", allow_abbrev=False)
    options = parser.parse_args(arguments)
    if unknown := set(getattr(options, "variants", ())) - set(VARIANTS):
        parser.error(f"--variants {' '.join(sorted(unknown))}: known are {', '.join(VARIANTS)}")
    return options


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    file, groups = {
        "formats": lambda: (options.work / "runs.jsonl", formats(options)),
        "sizes": lambda: (options.results / "loss_at_size.jsonl", sizes()),
        "outer": lambda: (options.results / "loss_outer.jsonl", outer()),
    }[options.study]()
    store, began = Store(file), time.monotonic()
    store.claim()
    for settings, run in left(groups, store):
        if time.monotonic() - began > 60 * options.minutes:
            break
        record = run_threads(
            ranks_of(settings, run), train, store.data(options.work, settings), settings, run
        )[0]
        store.append({**record, "settings": asdict(settings)})
        print(f"{run}: loss {record['loss']:.4f} after {record['seconds']:.0f} s", flush=True)
    print(table(groups, store))
    return 0


if __name__ == "__main__":
    harness.start(main)
