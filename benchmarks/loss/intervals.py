"""How far sets of runs lie apart: estimates with seeds as blocks, and bounds by least squares and Student's t."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import mpmath
import numpy as np

CONFIDENCE = 0.95  # one-sided
BySeed = Mapping[int, Sequence[float]]  # losses of the runs of each seed


@dataclass(frozen=True)
class Estimate:
    """mean: of the seeds' means. deviation: of one run among those of its seed (None: not known)."""

    runs: int
    mean: float
    deviation: float | None


def estimate(losses: BySeed) -> Estimate:
    """Estimate mean and deviation. Runs of a seed differ by one nudged weight, which is the noise of a run; seeds
    differ by data and start, which is not. So deviations are from the seed's own mean, and each seed counts alike."""
    groups = [list(runs) for runs in losses.values()]
    runs, means = sum(map(len, groups)), [fmean(g) for g in groups]
    freedom = runs - len(groups)
    squares = sum((x - m) ** 2 for g, m in zip(groups, means, strict=True) for x in g)
    return Estimate(runs, fmean(means), math.sqrt(squares / freedom) if freedom else None)


@dataclass(frozen=True)
class Difference:
    """How many percent another mean is above the baseline's. Each bound holds with 95%."""

    percent: float
    lower: float
    upper: float

    @property
    def bounds(self) -> str:
        """The bounds as a table has them."""
        return f"{self.lower:+.2f} to {self.upper:+.2f}" if math.isfinite(self.upper) else "-"


def effects(losses: Mapping[str, BySeed], baseline: str) -> dict[str, Difference]:
    """Return by variant the difference from the baseline, by least squares and Student's t. The model: a run is its
    variant's mean plus its seed's, plus noise of one deviation for all.

    Runs of one seed share data and start, so this compares them in pairs. With two variants and a run of each on
    every seed it is the paired t-test. A variant that shares no seed with the baseline is left out; bounds are
    infinite where runs are no more than means.
    """
    base = losses[baseline]
    names = [name for name in losses if name != baseline and set(losses[name]) & set(base)]
    kept = {name: losses[name] for name in (baseline, *names)}
    seeds = sorted({seed for by_seed in kept.values() for seed in by_seed})
    rows, values = [], []
    for name, by_seed in kept.items():
        for seed, runs in by_seed.items():
            row = [float(each == name) for each in names] + [float(each == seed) for each in seeds]
            rows += [row] * len(runs)
            values += runs
    design, y = np.array(rows), np.array(values)
    inverse = np.linalg.pinv(design.T @ design)
    means = inverse @ design.T @ y
    freedom = len(y) - int(np.linalg.matrix_rank(design))
    variance = float(((y - design @ means) ** 2).sum()) / freedom if freedom else math.inf
    quantile = t_quantile(CONFIDENCE, freedom) if freedom else math.inf
    whole = fmean(x for runs in base.values() for x in runs)
    found = {}
    for i, name in enumerate(names):
        percent, half = 100 * means[i] / whole, 100 * quantile * math.sqrt(variance * inverse[i, i]) / whole
        found[name] = Difference(float(percent), float(percent - half), float(percent + half))
    return found


def t_quantile(probability: float, freedom: float) -> float:
    """Return the value below which Student's t lies with this probability, above 0.5. freedom: degrees, above 0."""

    def above(t: float) -> float:
        return (
            1
            - mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True) / 2
            - probability
        )

    return float(mpmath.findroot(above, 2.0))
