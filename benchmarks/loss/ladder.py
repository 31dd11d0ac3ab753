"""The study of loss over sizes: its rungs, their runs, which run is next, and what all of them cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

from benchmarks import harness
from benchmarks.loss.plan import Plan, Runs
from benchmarks.loss.run import RANKS, Run, Settings
from benchmarks.loss.variants import BASELINE
from benchmarks.steps import llama
from megazero.config.model.spec import training_flops

# Four nodes of one rank: three of four messages of a sum are rounded. Of two nodes it would be one of two.
BASE = Settings(text="packages", node=1, exact=1024, curve=128)
SIZES = {
    "0.3M": replace(BASE, layers=2, hidden=80, ffn=208, heads=2, micro_batch=2),
    "1.3M": replace(BASE, layers=2, hidden=192, ffn=512, heads=3, micro_batch=4),
    "5M": replace(BASE, layers=4, hidden=320, ffn=720, heads=5, micro_batch=8),
    "20M": replace(BASE, layers=5, hidden=576, ffn=1536, heads=9, micro_batch=16),
    "125M": replace(
        BASE, layers=12, hidden=896, ffn=2560, heads=14, sequence=512, micro_batch=6, device="cuda"
    ),
    # In fp32, which is the faster one of CPUs without instructions for bf16.
    "2.4M of 8 experts": replace(
        BASE,
        layers=2,
        hidden=64,
        ffn=96,
        heads=2,
        vocabulary=16384,
        micro_batch=2,
        experts=8,
        dtype="fp32",
        text="stdlib",
        evaluation=512,
    ),
}
INT4, HADAMARD, DIFFERENCES = "qgz", "int4-hadamard", "zeropp-hadamard"
DISPATCH = "dispatch-int8"
TWO_BITS = ("int2-hadamard-clip", "int2-hadamard-clip-feedback")  # gone: read alone
FLOPS = {"cpu": 45e9, "cuda": 2e14}  # of a second: one core at 1.3M, to be measured; of a card, a guess
RANK_STEP_S = 0.012  # of CPU time beside them: 0.3M took 5.3 s for 39 steps
POINTS = 8  # of a run's curve; a run that is to be left is left at one


@dataclass(frozen=True)
class Rung:
    """Runs of one size for ``share`` training tokens a parameter.

    peaks: learning rates, tried with one exact run each of ``tuned`` of the tokens; the best one is taken.
    seeds: so many, of every variant. nudged: more runs of the baseline, with a nudged weight, over all seeds.
    halved: seeds of runs of the baseline with half the batch for as many steps. Their gap is what twice the noise
        costs: a measure for what rounding adds to the noise.
    """

    size: str
    share: float
    peaks: tuple[float, ...]
    variants: tuple[str, ...]
    seeds: int = 3
    nudged: int = 3
    halved: int = 0
    tuned: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.size} x {self.share:g}"

    def settings(self, share: float = 1.0) -> Settings:
        """share: of the rung's tokens. The peak is the first one."""
        size = SIZES[self.size]
        steps = round(share * self.share * parameters(size) / size.tokens)
        return replace(
            size, steps=steps, warmup=max(1, steps // 10), interval=-(-steps // POINTS), peak=self.peaks[0]
        )

    def trials(self) -> list[Settings]:
        """Return the settings of the exact runs of seed 1 that find the peak."""
        peaks = self.peaks if len(self.peaks) > 1 else ()
        return [replace(self.settings(self.tuned), peak=peak) for peak in peaks]

    def tuned_settings(self, store: Runs) -> Settings | None:
        """Return the settings with the peak of the least loss, or None while a peak has not been tried."""
        found = []
        for settings in self.trials():
            record = store.results(settings).runs.get(FIRST)
            if record is None:
                return None
            found.append((record["loss"], settings.peak))
        return replace(self.settings(), peak=min(found)[1] if found else self.peaks[0])

    def left(self, store: Runs) -> list[tuple[Settings, Run]]:
        """Return the runs that are not done, in order. Until the peak is known, runs at the first one take their
        place."""
        trials = [(s, FIRST) for s in self.trials() if FIRST not in store.results(s).runs]
        settings = self.tuned_settings(store) or self.settings()
        results, runs = store.results(settings), list[Run]()
        while run := self._plan().next(results):
            results.runs[run] = {}
            runs.append(run)
        halved, done = halve(settings), store.results(halve(settings)).runs
        rest = [Run(BASELINE, seed) for seed in range(1, self.halved + 1)]
        every = (
            trials + [(settings, run) for run in runs] + [(halved, run) for run in rest if run not in done]
        )
        return list(dict.fromkeys(every))

    def _plan(self) -> Plan:
        seeds = tuple(range(1, self.seeds + 1))
        return Plan(self.variants, seeds, runs=self.seeds, baseline=self.seeds + self.nudged)


def halve(settings: Settings) -> Settings:
    """Return the settings with half the batch, for as many steps."""
    return replace(settings, micro_batch=settings.micro_batch // 2)


FIRST = Run(BASELINE, 1)
FOUR_BITS = (INT4, HADAMARD, DIFFERENCES)
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
PEAKS = RATES[2:]
LADDER = (
    Rung("0.3M", 1, PEAKS, (*FOUR_BITS, *TWO_BITS), seeds=6, nudged=6, halved=3),
    Rung("0.3M", 4, PEAKS, (*FOUR_BITS, *TWO_BITS), halved=3),
    Rung("1.3M", 1, RATES[1:], (*FOUR_BITS, *TWO_BITS), halved=2),
    Rung("5M", 0.5, RATES[:3], (INT4, HADAMARD), seeds=2, nudged=1, tuned=0.2),
    Rung("0.3M", 16, PEAKS[:2], (INT4, TWO_BITS[0]), seeds=2, nudged=2, tuned=0.25),
)
# What eight hours do not hold, and what needs a card: by name.
MORE = (
    Rung("1.3M", 4, PEAKS[:2], (INT4, HADAMARD), tuned=0.25),
    Rung("5M", 1, PEAKS[:2], (INT4, HADAMARD), tuned=0.1),
    Rung("20M", 1, (1e-3,), (INT4, HADAMARD), seeds=1, nudged=0),
    Rung("125M", 0.2, (1e-3,), (*FOUR_BITS, TWO_BITS[0]), seeds=1, nudged=1),
)
# Differences of weights and sums of gradients of experts, too, in INT4.
EXPERTS = (Rung("2.4M of 8 experts", 0.125, (4e-3,), (DIFFERENCES, DISPATCH)),)
NO_RUNS = Runs(Path("no runs"))
RUNGS = {rung.name: rung for rung in (*LADDER, *MORE, *EXPERTS)}


def following(rungs: Sequence[Rung], store: Runs) -> tuple[Settings, Run] | None:
    """Return the next run, or None."""
    return next((left[0] for rung in rungs if (left := rung.left(store))), None)


@cache
def parameters(settings: Settings) -> int:
    return sum(p.numel() for p in settings.decoder().parameters())


def flops(settings: Settings) -> float:
    """Return the FLOPs of a run with its evaluations; a forward counts a third."""
    of_sample = training_flops(llama(settings), [settings.sequence])
    evaluated = settings.evaluation + (1 + -(-settings.steps // settings.interval)) * settings.curve
    return of_sample * (settings.steps * settings.tokens / settings.sequence + evaluated / 3)


def seconds(settings: Settings, store: Runs) -> float:
    """Return a run's CPU seconds, measured on runs of these settings or estimated from its FLOPs; on a card, its
    seconds."""
    taken = [record["cpu_seconds"] for record in store.results(settings).runs.values()]
    return (
        fmean(taken)
        if taken
        else flops(settings) / FLOPS[settings.device] + RANKS * RANK_STEP_S * settings.steps
    )


def plan(rungs: Sequence[Rung], store: Runs) -> str:
    """Return a table of all runs, their hours, and how many are done."""
    rows, whole, rest = [], 0.0, 0.0
    for rung in rungs:
        every, left = rung.left(NO_RUNS), rung.left(store)
        hours = sum(seconds(s, store) for s, _ in every) / 3600
        missing = sum(seconds(s, store) for s, _ in left) / 3600
        whole, rest = whole + hours, rest + missing
        settings = rung.settings()
        rows.append(
            [
                rung.name,
                f"{parameters(settings):,}",
                f"{settings.steps} x {settings.tokens:,}",
                f"{len(rung.trials())} + {len(every) - len(rung.trials())}",
                f"{max(seconds(s, store) for s, _ in every):.0f}",
                f"{hours:.2f}",
                str(len(every) - len(left)),
                f"{missing:.2f}",
            ]
        )
    rows.append(["all", "", "", "", "", f"{whole:.2f}", "", f"{rest:.2f}"])
    head = [
        "rung",
        "parameters",
        "steps x tokens",
        "trials + runs",
        "s of a run",
        "hours",
        "done",
        "hours left",
    ]
    return harness.table(head, rows)
