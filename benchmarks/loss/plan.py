"""The finished runs, and which one is next."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Store
from benchmarks.loss.data import corpus, prepare
from benchmarks.loss.intervals import Difference, difference
from benchmarks.loss.run import Run, Settings
from benchmarks.loss.variants import BASELINE, VARIANTS

Record = dict[str, Any]


class Runs(Store):
    """Records of runs, of several Settings."""

    def add(self, settings: Settings, record: Record) -> None:
        self.append({**record, "settings": asdict(settings)})

    def results(self, settings: Settings) -> Results:
        return Results([r for r in self.records() if Settings(**r["settings"]) == settings])

    def data(self, work: Path, settings: Settings) -> Path:
        """Prepare the text of these settings in ``work``; return its folder. Raises ValueError if runs that are there
        were of other tokens."""
        folder, text = prepare(work, settings.text, settings.vocabulary), (settings.text, settings.vocabulary)
        records = [r for r in self.records() if (r["settings"]["text"], r["settings"]["vocabulary"]) == text]
        here = corpus(folder)
        if others := sorted({str(r.get("corpus")) for r in records} - {here}):
            raise ValueError(
                f"{self.file} has runs of another text: tokens {', '.join(others)}, {here} in {folder}. Delete this "
                "folder and use the Python and packages of those runs, or name another file for these (--out, --work)"
            )
        return folder


class Results:
    """Runs of one Settings."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.runs = {Run(r["variant"], r["seed"], r["nudge"]): r for r in records}

    def of(self, variant: str) -> list[Record]:
        return [record for run, record in self.runs.items() if run.variant == variant]

    def losses(self, variant: str, step: int | None = None) -> dict[int, list[float]]:
        """Return by seed the losses over the whole evaluation set, or the curve's at ``step``."""
        out = defaultdict(list)
        for record in self.of(variant):
            loss = record["loss"] if step is None else dict(record["curve"])[step]
            out[record["seed"]].append(loss)
        return dict(out)

    def difference(self, variant: str, step: int | None = None) -> Difference:
        """Return the difference from the baseline of ``losses`` at ``step``, without bounds if runs are too few."""
        base, other = self.losses(BASELINE, step), self.losses(variant, step)
        if not set(base) & set(other):
            return Difference(math.nan, -math.inf, math.inf)
        return difference(base, other)

    def equal(self, variant: str) -> tuple[int, int]:
        """Return how many runs end with the master of the baseline's run of the same seed and nudge, bit for bit, and
        how many have such a run."""
        pairs = [
            (mine["digest"], base["digest"])
            for mine in self.of(variant)
            if (base := self.runs.get(Run(BASELINE, mine["seed"], mine["nudge"])))
        ]
        return sum(mine == base for mine, base in pairs), len(pairs)

    def verdict(self, variant: str) -> str | None:
        """Return 'met', 'missed' or 'open', or None for a variant without target."""
        target = VARIANTS[variant].target
        if target is None:
            return None
        if not target:
            equal, pairs = self.equal(variant)
            return "open" if not pairs else "met" if equal == pairs else "missed"
        return self.difference(variant).verdict(target)


@dataclass(frozen=True)
class Plan:
    """Run number k of a variant has seed k mod seeds and nudge k // seeds.

    runs: of each variant that has no bit-equality to show (that takes one per seed); baseline: of the baseline.
    most: with until_decided, runs are added to variants whose interval has not decided yet, up to so many each; the
    baseline keeps up with them.
    """

    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: int
    baseline: int
    until_decided: bool = False
    most: int = 0

    def next(self, results: Results) -> Run | None:
        """Return the next run, or None when all are done. Variants take turns, so that an interrupted comparison is
        balanced."""
        quotas = {name: self._quota(name, results) for name in (BASELINE, *self.variants)}
        quotas[BASELINE] = max(self.baseline, *quotas.values())
        for number in range(max(quotas.values())):
            for name, quota in quotas.items():
                run = self._run(name, number)
                if number < quota and run not in results.runs:
                    return run
        return None

    def _quota(self, name: str, results: Results) -> int:
        if name == BASELINE:
            return self.baseline
        if VARIANTS[name].target == 0:
            return len(self.seeds)
        if not self.until_decided or results.verdict(name) != "open":
            return self.runs
        done = next(k for k in range(self.most + 1) if self._run(name, k) not in results.runs)
        return max(self.runs, min(done + 1, self.most))

    def _run(self, name: str, number: int) -> Run:
        return Run(name, self.seeds[number % len(self.seeds)], number // len(self.seeds))


def taken(best: float, tried: Iterable[float]) -> str:
    """Return the best of several values in words. If it is the lowest or the highest tried, a better one may lie
    beyond."""
    values = list(tried)
    edges = {min(values): ", the lowest tried", max(values): ", the highest tried"}
    return f"{best:g}{edges.get(best, '')}"
