"""Is one set of runs worse than another, and by how much at most? Welch's t interval, with seeds as blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

CONFIDENCE = 0.95  # one-sided
BySeed = Mapping[int, Sequence[float]]  # losses of the runs of each seed


@dataclass(frozen=True)
class Estimate:
    """mean: of the seeds' means. deviation: of one run among those of its seed (None: not known). error: the mean's
    standard error. freedom: degrees of freedom of the deviation, runs less seeds."""

    runs: int
    mean: float
    deviation: float | None
    error: float
    freedom: int


def estimate(losses: BySeed) -> Estimate:
    """Estimate mean, deviation and standard error. Runs of a seed differ by one nudged weight, which is the noise of
    a run; seeds differ by data and start, which is not.

    So deviations are from the seed's own mean, and each seed counts alike: with r_s runs in each of S seeds the
    variance of the mean is deviation^2 / S^2 * sum of 1 / r_s. With one seed this is the usual standard error.
    """
    groups = [list(runs) for runs in losses.values()]
    if not groups or not all(groups):
        raise ValueError("no runs to estimate from")
    runs, means = sum(map(len, groups)), [fmean(g) for g in groups]
    freedom = runs - len(groups)
    if not freedom:
        return Estimate(runs, fmean(means), None, math.inf, 0)
    squares = sum((x - m) ** 2 for g, m in zip(groups, means, strict=True) for x in g)
    deviation = math.sqrt(squares / freedom)
    error = deviation * math.sqrt(sum(1 / len(g) for g in groups)) / len(groups)
    return Estimate(runs, fmean(means), deviation, error, freedom)


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

    def verdict(self, target: float) -> str:
        """Return 'met' if even the upper bound is at most the target, 'missed' if even the lower one is above it,
        else 'open'."""
        if self.upper <= target:
            return "met"
        return "missed" if self.lower > target else "open"


def difference(baseline: BySeed, other: BySeed) -> Difference:
    """Return Welch's interval (unequal variances) over the seeds that both have. Raises ValueError if there are none.

    The baseline's mean as divisor counts as known: its own error of a few thousandths is of second order.
    """
    seeds = [seed for seed in baseline if other.get(seed) and baseline[seed]]
    base, mine = (estimate({seed: side[seed] for seed in seeds}) for side in (baseline, other))
    percent = 100 * (mine.mean - base.mean) / base.mean
    if not (base.freedom and mine.freedom):
        return Difference(percent, -math.inf, math.inf)
    v, w = base.error**2, mine.error**2
    if not v + w:
        return Difference(percent, percent, percent)
    freedom = (v + w) ** 2 / (v**2 / base.freedom + w**2 / mine.freedom)  # Welch-Satterthwaite
    half = 100 * t_quantile(CONFIDENCE, freedom) * math.sqrt(v + w) / base.mean
    return Difference(percent, percent - half, percent + half)


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
    """Return the value below which Student's t lies with this probability. freedom: degrees > 0, fractions too."""
    if not (0 < probability < 1 and freedom > 0):
        raise ValueError(f"probability {probability} must lie between 0 and 1, freedom {freedom} above 0")
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(200):  # halving to the last bit
        middle = (low + high) / 2
        if t_probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_probability(t: float, freedom: float) -> float:
    """Return Student's t distribution function at t >= 0."""
    x = freedom / (freedom + t * t)
    return 1 - _incomplete_beta(freedom / 2, 0.5, x) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised I_x(a, b), by its continued fraction (Abramowitz and Stegun 26.5.8), which converges
    quickly for x < (a + 1) / (a + b + 2); else by symmetry."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # From the inside out, deep enough for every freedom a comparison of runs can have.
    fraction = 1.0
    for k in range(200, 0, -1):
        m = k // 2
        if k % 2:
            d = -(a + m) * (a + b + m) / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) / ((a + 2 * m - 1) * (a + 2 * m))
        fraction = 1 + d * x / fraction
    return front / (a * fraction)
