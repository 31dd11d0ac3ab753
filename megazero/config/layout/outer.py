"""Outer steps: their optimizer, the format of what crosses between replicas, and when these meet.

DiLoCo (arXiv 2311.08105) has the steps and the defaults; Streaming DiLoCo (arXiv 2501.18512) the delay; MuLoCo (arXiv
2505.23725) feeds back what rounding lost. zero/outer.py takes the steps.
"""

from __future__ import annotations

from megazero.comm.wire import Coding
from megazero.config.layout.wire import ALIGNMENT
from megazero.config.options.sections import OuterConfig

EXACT_BITS, BF16_BITS = 32, 16


def averages(outer: OuterConfig) -> bool:
    """Tell whether an outer step takes the mean of the replicas: a rate of 1 without momentum."""
    return outer.outer_optimizer == "average"


def keeps_momentum(outer: OuterConfig) -> bool:
    return not averages(outer) and outer.outer_momentum > 0


def feeds_back(outer: OuterConfig) -> bool:
    """Tell whether what rounding lost is added to the next outer gradient: the default where something is rounded."""
    return outer.outer_bits < EXACT_BITS and outer.outer_rounding != "nearest"


def outer_coding(outer: OuterConfig) -> Coding | None:
    """Return the quantised format of outer gradients, or None where they are bf16 or exact."""
    return Coding(outer.outer_bits, ALIGNMENT) if outer.outer_bits < BF16_BITS else None


def last_arrival(steps: int, outer: OuterConfig) -> int:
    """Return the last of ``steps`` steps by which differences have arrived; 0 if there is none."""
    interval, delay = outer.outer_interval, outer.outer_delay
    return (steps - delay) // interval * interval + delay if steps >= interval + delay else 0
