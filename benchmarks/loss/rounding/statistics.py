"""What rounding does to gradients, of draws and of what they decode to; and what a gap in loss is worth in tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from benchmarks.loss.rounding_noise import noise

EPSILON = 1e-8  # AdamW's, of the gradients' rms
TOP = 0.01  # of the columns: the outliers


def measured(exact: torch.Tensor, sent: torch.Tensor, digits: torch.Tensor) -> dict[str, float | None]:
    """Measure one tensor's draws [m, n], what they decode to [m, n], and the digits' domain of that [m, n].

    error: ||sent - exact|| / ||exact||. zero: the share of digits that are 0. dead: the share of elements with a
    gradient in some draw that are 0 in all that is sent. bias: ||E e|| / ||E exact|| of the error e, estimated
    without bias from the draws; None where they do not show a mean. added: by which share rounding raises the noise.
    information: the mean over elements with a gradient of the squared cosine, over draws, between exact and sent:
    AdamW gives each element the same step, so elements count alike.
    """
    error = sent - exact
    squares, sums = exact.square().sum(0), sent.square().sum(0)
    alive = squares > 0
    count = alive.sum().clamp(min=1)
    cosine = (exact * sent).sum(0).square() / (squares.double() * sums).clamp(min=1e-300)
    cosine = torch.where(alive & (sums > 0), cosine, 0.0)
    (mean, spread), (bias, _), (_, sent_spread) = (_noise(x) for x in (exact, error, sent))
    return {
        "error": float(error.norm() / exact.norm().clamp(min=1e-30)),
        "zero": float((digits == 0).float().mean()),
        "dead": float((alive & (sums == 0)).sum() / count),
        "bias": (max(0.0, bias) / mean) ** 0.5 if mean > 0 else None,
        "added": sent_spread / spread - 1 if spread > 0 else None,
        "information": float(cosine.sum() / count),
    }


def _noise(draws: torch.Tensor) -> tuple[float, float]:
    """Return rounding_noise.noise of draws, and zeros for one, which shows none."""
    return noise(draws) if len(draws) > 1 else (0.0, 0.0)


def direction(sums: torch.Tensor) -> torch.Tensor:
    """Return AdamW's direction [n] of step gradients [k, n]: their mean over the root of their mean square."""
    root = sums.square().mean(0).sqrt_()
    return sums.mean(0) / (root + EPSILON * root.square().mean().sqrt()).clamp(min=1e-30)


def outliers(columns: torch.Tensor) -> torch.Tensor:
    """Return the numbers of the columns that hold most of squares [columns], ``TOP`` of them and at least one."""
    return columns.topk(max(1, round(TOP * len(columns)))).indices


def stability(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    """Compare the columns' squares [columns] of two gradients of a matrix.

    share: of the squared gradient before that its outliers hold. kept: the share of them that are outliers after.
    holds: the share of the squared gradient after that the outliers from before hold. correlation: of the
    logarithms.
    """
    first, then = outliers(before), outliers(after)
    logs = torch.stack([x.double().clamp(min=1e-60).log() for x in (before, after)])
    return {
        "share": float(before[first].sum() / before.sum()),
        "kept": float(torch.isin(first, then).float().mean()),
        "holds": float(after[first].sum() / after.sum()),
        "correlation": float(torch.corrcoef(logs)[0, 1]),
    }


def slope(curve: Sequence[tuple[float, float]]) -> float:
    """Return d loss / d ln(tokens) of a curve (tokens > 0, loss) by least squares, over its second half."""
    points = curve[len(curve) // 2 :] if len(curve) >= 4 else curve
    x = [math.log(tokens) for tokens, _ in points]
    y = [loss for _, loss in points]
    middle, level = sum(x) / len(x), sum(y) / len(y)
    return sum((a - middle) * (b - level) for a, b in zip(x, y, strict=True)) / sum(
        (a - middle) ** 2 for a in x
    )


def worth(gap: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of the tokens with which the exact run, whose curve this is, reaches a loss that is ``gap``
    higher. None where its curve does not fall."""
    fall = slope(curve)
    return math.exp(gap / fall) if fall < 0 else None
