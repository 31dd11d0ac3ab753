"""Outer steps: their optimizer and its rate, the format of what crosses between replicas, and where these meet.

DiLoCo (arXiv 2311.08105) has the steps and the defaults; Streaming DiLoCo (arXiv 2501.18512) the delay; MuLoCo (arXiv
2505.23725) feeds back what rounding lost. zero/outer.py takes the steps.
"""

from __future__ import annotations

from megazero.comm.wire import Coding, Sparse
from megazero.config.layout.wire import ALIGNMENT
from megazero.config.options.sections import TOPK, OuterConfig

EXACT_BITS, BF16_BITS = 32, 16
LOCAL = "local"  # --outer-meet local:R


def averages(outer: OuterConfig) -> bool:
    """Tell whether an outer step takes the mean of the replicas: a rate of 1 without momentum."""
    return outer.outer_optimizer == "average"


def keeps_momentum(outer: OuterConfig) -> bool:
    return not averages(outer) and outer.outer_momentum > 0


def feedback(outer: OuterConfig) -> float:
    """Return the share of what rounding lost that is added to the next outer gradient: the default where something is
    rounded is all of it."""
    if outer.outer_format == TOPK:
        return Sparse.FEEDBACK
    return float(outer.outer_bits < EXACT_BITS and outer.outer_rounding != "nearest")


def outer_coding(outer: OuterConfig) -> Coding | Sparse | None:
    """Return the coded format of outer gradients, or None where they are bf16 or exact."""
    if outer.outer_format == TOPK:
        return Sparse()
    return Coding(outer.outer_bits, ALIGNMENT) if outer.outer_bits < BF16_BITS else None


def outer_rate(outer: OuterConfig, consumed: int, samples: int) -> float:
    """Return the outer learning rate of a meeting after ``consumed`` of a run's ``samples``."""
    if averages(outer):
        return 1.0
    fall = (outer.outer_lr - outer.outer_min_lr) * (outer.outer_lr_decay_style == "linear")
    return outer.outer_lr - fall * min(1.0, consumed / samples)


def wires(outer: OuterConfig, d: int) -> int:
    """Return how many slices of each of d data-parallel ranks cross by themselves: as many as the largest replica has
    ranks for one of these."""
    return (outer.outer_ranks or d) // d


def local_replicas(outer: OuterConfig) -> int | None:
    """Return how many replicas are started on this machine, or None where each is started by itself."""
    word, _, count = (outer.outer_meet or "").partition(":")
    return int(count) if word == LOCAL and count.isdecimal() else None


def planned_replicas(outer: OuterConfig) -> int:
    """Return how many replicas a plan counts with: those of local:R, else the least that meet, 2 at least."""
    return local_replicas(outer) or max(2, outer.outer_least)


def meeting_point(outer: OuterConfig) -> tuple[str, int]:
    """Return the host and port of --outer-meet. Raises ValueError for other words."""
    host, _, port = (outer.outer_meet or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"--outer-meet {outer.outer_meet} must be HOST:PORT or {LOCAL}:R; nearest: {LOCAL}:2"
        )
    return host.strip("[]"), int(port)
