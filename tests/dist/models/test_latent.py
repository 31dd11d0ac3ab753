"""Latent attention on any layout trains as on one rank: gradients, losses and the bits of replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dist.engine.test_parity import check
from tests.dist.parity_cases import FEW_STEPS_OF_PIPELINES, LATENT, Case

BASE = Case(1, 2, 2, "zero3", None, False, 3, False, "odd", "none", "fp64", LATENT)
TENSOR = replace(BASE, tp=2, dp=2, per_node=4, recompute="selective")
EXPERTS = replace(BASE, family="latent experts")
ALWAYS = (
    replace(TENSOR, dp=1, per_node=2, shards="zero1"),
    replace(TENSOR, family="latent experts", sequence_parallel=True, shards="zero3"),
    replace(BASE, cp=2, recompute="selective"),
    replace(EXPERTS, cp=2, keys=2, per_node=1),
)
REST = (
    replace(EXPERTS, dp=4, per_node=4, cp=4, keys=2, recompute="full"),
    replace(BASE, dp=4, per_node=2, shards="2,2,4"),  # zeropp's
    replace(BASE, pp=2, cp=2, schedule="zb-h1", layers=4, recompute="selective"),
    replace(TENSOR, cp=2, sequence_parallel=True, dtype="fp32"),
    replace(EXPERTS, dp=4, per_node=4, ep=2, recompute="full"),
    replace(BASE, cp=2, compiled="aot_eager", dtype="fp32"),
)


def test_small_cover() -> None:
    check(ALWAYS, FEW_STEPS_OF_PIPELINES)


@pytest.mark.slow
def test_the_rest_of_it() -> None:
    check(REST, FEW_STEPS_OF_PIPELINES)
