"""Outer steps: which replicas there are, what their outer optimizer is, and what crosses between them.

DiLoCo (arXiv 2311.08105) has the steps and the defaults; MuLoCo (arXiv 2505.23725) feeds back what rounding lost.
zero/outer.py takes the steps.
"""

from __future__ import annotations

from megazero.config.layout.wire import LEAST_BLOCK, Coding
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
    return Coding(outer.outer_bits, LEAST_BLOCK) if outer.outer_bits < BF16_BITS else None


def outer_summary(outer: OuterConfig, replicas: int, ranks: int) -> str:
    """Describe the outer steps of ``replicas`` of so many ranks each."""
    if replicas == 1:
        return "outer steps: none, one replica (--outer-replicas, by default the number of nodes, is 1)"
    rule = outer.outer_optimizer
    if not averages(outer):
        rule += f" (learning rate {outer.outer_lr:g}, momentum {outer.outer_momentum:g})"
    form = {EXACT_BITS: "exact", BF16_BITS: "bf16"}.get(outer.outer_bits, f"INT{outer.outer_bits}")
    form += ", error feedback" if feeds_back(outer) else ""
    every = f"every {outer.outer_interval} steps" if outer.outer_interval > 1 else "every step"
    said = f"outer steps: {replicas} replicas of {ranks} ranks meet {every}: {rule}, differences {form}"
    return said + ("; evaluations are of the first replica" if outer.outer_evaluation == "replica" else "")
