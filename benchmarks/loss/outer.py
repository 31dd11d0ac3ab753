"""The study of outer steps: its runs, what they cost, and its section of loss.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Generic, NamedTuple, TypeVar

from benchmarks import harness
from benchmarks.harness import filled
from benchmarks.loss import ladder
from benchmarks.loss.intervals import Difference, effects
from benchmarks.loss.ladder import NO_RUNS, PEAKS, RATES, parameters
from benchmarks.loss.plan import Results, Runs, taken
from benchmarks.loss.run import RANKS, Run, Settings
from benchmarks.loss.variants import BASELINE, EVERY, INTERVALS, MUON, RULES, outer_name
from megazero.config.nearest import multiples_around
from megazero.config.summary import outer_summary

TITLE = "Outer steps"
STEPS = 1536  # the longest interval divides it: at the end all replicas have met
PUBLISHED = "0.7"  # of RULES: DiLoCo's
SEARCHED = (32, 128)  # intervals whose rule is searched; shorter ones take the first's
INTERVAL = 32  # of the formats, of streaming and of Muon
SEEDS = 3
BASE = "1.3M"  # the shape of Settings
LARGER, LARGER_SEEDS = "5M", 1  # of ladder.SIZES: each step exact, the best interval, and it with 4 bits
Piece = tuple[Settings, Run]
T = TypeVar("T", float, str)
TEXT = """\
`python -m benchmarks.loss.study --outer` writes this section; each run is a line of
[loss_outer.jsonl](../../benchmarks/results/loss_outer.jsonl).

{setting}

{table}

{explanation}

### What was searched

{searched}

{plan}
"""


class StudyRow(NamedTuple):
    """A line of the table: runs of one variant, one of each seed. beside: the variant that its gap is from."""

    label: str
    settings: Settings
    variant: str
    beside: str = BASELINE
    seeds: int = SEEDS


@dataclass(frozen=True)
class Trials(Generic[T]):
    """Runs of seed 1 that differ in one choice. The best is taken; ``default`` until all are done."""

    label: str
    tried: Mapping[T, Piece]
    default: T

    def losses(self, store: Runs) -> dict[T, float]:
        found = {
            value: store.results(settings).runs.get(run) for value, (settings, run) in self.tried.items()
        }
        return {value: record["loss"] for value, record in found.items() if record is not None}

    def done(self, store: Runs) -> bool:
        return len(self.losses(store)) == len(self.tried)

    def best(self, store: Runs) -> T:
        losses = self.losses(store)
        return min(losses, key=lambda value: losses[value]) if self.done(store) else self.default


class OuterStudy:
    """Runs that meet in every step, beside runs with outer steps, all equally long. Raises ValueError if replicas
    would not meet at the end."""

    def __init__(self, store: Runs, steps: int = STEPS) -> None:
        longest = max(INTERVALS)
        if steps < 1 or steps % longest:
            raise ValueError(
                f"--outer {steps}: replicas that meet every {longest} steps do not meet at the end; nearest: "
                f"{multiples_around(steps, longest)}"
            )
        self.store = store
        self.first = Settings(steps=steps, warmup=max(1, steps // 10), interval=-(-steps // 6), peak=PEAKS[0])

    # -- the runs --------------------------------------------------------------------------------

    def peaks(self, variant: str, size: str = BASE) -> Trials[float]:
        """Return the trials of the inner optimizer's rate. As in DiLoCo it is that of runs that meet in every step.
        Two of RATES are tried, then the neighbours of the best one until it has both."""
        settings = self._settings(size)
        label = f"peak learning rate of {size}, {'Muon' if variant == MUON else 'AdamW'}"
        tried = {*RATES[1:3]}
        while True:
            every = {peak: (replace(settings, peak=peak), Run(variant, 1)) for peak in sorted(tried)}
            trials = Trials(label, every, settings.peak)
            best = RATES.index(trials.best(self.store))
            around = {*RATES[max(best - 1, 0) : best + 2]}
            if around <= tried or not trials.done(self.store):
                return trials
            tried |= around

    def rules(self, interval: int) -> Trials[str]:
        """Return the trials of the outer optimizer: averages, or Nesterov's momentum at one of several rates."""
        settings = self._tuned(BASELINE)
        tried = {rule: (settings, Run(outer_name(interval, rule), 1)) for rule in RULES}
        return Trials(f"average, or outer learning rate, every {interval} steps", tried, PUBLISHED)

    def searches(self) -> list[Trials[float] | Trials[str]]:
        """Return all searches, each after those that it needs."""
        rates = [self.peaks(BASELINE), self.peaks(MUON), self.peaks(BASELINE, LARGER)]
        return [*rates, *map(self.rules, SEARCHED)]

    def rows(self) -> list[StudyRow]:
        adamw, muon, large = self._tuned(BASELINE), self._tuned(MUON), self._tuned(BASELINE, LARGER)
        rule = {interval: self.rules(max(interval, SEARCHED[0])).best(self.store) for interval in INTERVALS}

        def outer(label: str, settings: Settings, form: str, beside: str = BASELINE) -> StudyRow:
            return StudyRow(label, settings, outer_name(INTERVAL, rule[INTERVAL], form), beside)

        def larger(label: str, variant: str) -> StudyRow:
            return StudyRow(f"{LARGER}: {label}", large, variant, seeds=LARGER_SEEDS)

        intervals = {i: (adamw, Run(outer_name(i, rule[i]), 1)) for i in INTERVALS}
        best = Trials("interval", intervals, INTERVALS[0]).best(self.store)
        return [
            StudyRow("AdamW, zero3", adamw, BASELINE),
            StudyRow("AdamW, zeropp", adamw, "zeropp"),
            *(StudyRow("AdamW", adamw, outer_name(interval, rule[interval])) for interval in INTERVALS),
            *(outer("AdamW", adamw, form) for form in ("4bit", "2bit")),
            StudyRow("Muon, zero3", muon, MUON),
            outer("Muon", muon, MUON, beside=MUON),
            larger("AdamW, zero3", BASELINE),
            *(larger("AdamW", outer_name(best, rule[best], form)) for form in ("", "4bit")),
        ]

    def pieces(self) -> list[Piece]:
        """Return all runs in order. A search that is not done counts as its default."""
        trials = [piece for search in self.searches() for piece in search.tried.values()]
        seeds, rows = range(1, SEEDS + 1), self.rows()
        runs = [(row.settings, Run(row.variant, seed)) for seed in seeds for row in rows if seed <= row.seeds]
        return list(dict.fromkeys([*trials, *runs]))

    def left(self) -> list[Piece]:
        return [(s, run) for s, run in self.pieces() if run not in self.store.results(s).runs]

    def _tuned(self, variant: str, size: str = BASE) -> Settings:
        return replace(self._settings(size), peak=self.peaks(variant, size).best(self.store))

    def _settings(self, size: str) -> Settings:
        return enlarged(self.first) if size == LARGER else self.first

    # -- text ------------------------------------------------------------------------------------

    def plan(self) -> str:
        every, left = self.pieces(), self.left()
        hours, missing = (sum(map(self._seconds, pieces)) / 3600 for pieces in (every, left))
        return filled(f"""
            {len(every) - len(left)} of {len(every)} runs are done; {missing:.1f} of {hours:.1f} hours of one core are
                left: measured where there are runs, else estimated from their operations (without Muon's own).""")

    def _seconds(self, piece: Piece) -> float:
        settings, run = piece
        taken = [record["cpu_seconds"] for record in self.store.results(settings).of(run.variant)]
        return fmean(taken) if taken else ladder.seconds(settings, NO_RUNS)

    def section(self) -> str:
        s = self.first
        return TEXT.format(
            setting=filled(f"""
                The model, text and ranks of this page, {s.steps:,} steps of {s.tokens:,} tokens, with {s.warmup} of
                warm-up: {RANKS // s.node} nodes of {s.node} ranks, and with outer steps each node is a replica, zero3
                inside."""),
            table=self._table(),
            explanation=filled(f"""
*loss* is that of the anchor, *of replicas* the mean of those that train. Gaps are at equal tokens,
                to the first line of the size, or for Muon's outer steps to Muon's own zero3; bounds (95%) are least
                squares over lines and {SEEDS} seeds with one deviation for all. Runs of seed 1, which made the
                choices, count here, too. The outer optimizer of runs every {INTERVALS[0]} steps, of few bits
                and of Muon is the one found for AdamW's exact differences every {SEARCHED[0]} steps.
                {LARGER}: as many steps and tokens, its own peak, the interval of the
                least loss; one seed has no bounds. Bytes: sent by one node."""),
            searched=harness.table(
                ["", "tried: loss", "taken"], [self._searched(t) for t in self.searches()]
            ),
            plan=self.plan(),
        )

    def _table(self) -> str:
        rows = self.rows()
        results = {row: self.store.results(row.settings) for row in rows}
        losses = defaultdict[int, dict[str, dict[int, list[float]]]](dict)  # by size and variant
        for row in rows:
            if found := results[row].losses(row.variant):
                losses[parameters(row.settings)][row.variant] = found
        gaps = {
            (size, base): effects(of_size, base)
            for size, of_size in losses.items()
            for base in (BASELINE, MUON)
            if base in of_size
        }
        head = [
            "inside",
            "crosses",
            "bytes per step / 2N",
            "runs",
            "loss",
            "gap %",
            "95% bounds %",
            "of replicas",
        ]
        lines = [(row, gaps.get((parameters(row.settings), row.beside), {}).get(row.variant)) for row in rows]
        return harness.table(head, [self._row(row, results[row], gap) for row, gap in lines])

    def _row(self, row: StudyRow, results: Results, gap: Difference | None) -> list[str]:
        outer, records = EVERY[row.variant].outer, results.of(row.variant)
        replicas, node = RANKS // row.settings.node, row.settings.node
        said = outer_summary(outer, replicas, node).partition(" meet ")[2] if outer else "every step"
        if not records:
            return [row.label, said, "", "not run", *[""] * 4]
        sent = fmean(record["sent"] for record in records) / (2 * parameters(row.settings))
        cells = [row.label, said, f"{sent:.3f}", str(len(records)), f"{_mean(records, 'loss'):.4f}"]
        cells += [f"{gap.percent:+.2f}", gap.bounds] if gap else ["-", "-"]
        return [*cells, f"{_mean(records, 'replicas'):.4f}" if outer else "-"]

    def _searched(self, trials: Trials[float] | Trials[str]) -> list[str]:
        losses: Mapping[Any, float] = trials.losses(self.store)
        tried = (f"{v}: {f'{losses[v]:.4f}' if v in losses else 'not run'}" for v in trials.tried)
        best = trials.best(self.store)
        said = best if isinstance(best, str) else taken(best, losses) if losses else ""
        return [trials.label, "; ".join(tried), said if trials.done(self.store) else "-"]


def enlarged(settings: Settings) -> Settings:
    shape = ladder.SIZES[LARGER]
    return replace(settings, layers=shape.layers, hidden=shape.hidden, ffn=shape.ffn, heads=shape.heads)


def _mean(records: Sequence[Mapping[str, float]], name: str) -> float:
    return fmean(record[name] for record in records)
