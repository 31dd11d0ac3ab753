"""Layers that predict further tokens train on any layout as on one rank: gradients, losses and bits of replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dist.engine.test_parity import check
from tests.dist.parity_cases import FEW_STEPS_OF_PIPELINES, FURTHER, FURTHER_EXPERTS, Case

BASE = Case(1, 2, 2, "zero3", None, False, 3, True, "odd", "none", "fp64", FURTHER)
TENSOR = replace(BASE, tp=2, dp=1, sequence_parallel=True, recompute="full")
PIPELINE = replace(BASE, dp=1, per_node=1, shards="zero1", pp=2)
EXPERTS = replace(BASE, family=FURTHER_EXPERTS, tied=False)
ALWAYS = (
    replace(BASE, tied=False, loss_chunk=3),
    replace(TENSOR, shards="zero1"),
    replace(BASE, cp=2, keys=2, per_node=1),
    replace(PIPELINE, tied=False),
    replace(PIPELINE, schedule="zb-h1", recompute="full"),
    replace(PIPELINE, schedule="interleaved", virtual=2, layers=4, micro_batches=4, tied=False),
    replace(EXPERTS, ep=2, recompute="mlp"),
)
REST = (
    replace(TENSOR, sequence_parallel=False, tied=False, dp=2, per_node=4),
    replace(PIPELINE, dp=2, per_node=2, shards="zero3", tied=False, schedule="zb-h1", loss_chunk=3),
    replace(TENSOR, pp=2, shards="zero1", per_node=4, tied=False),
    replace(BASE, dp=4, per_node=2, shards="2,2,4", dtype="fp32"),  # zeropp's
    replace(EXPERTS, pp=2, ep=2, cp=2, per_node=2, schedule="zb-h1"),
    replace(BASE, compiled="aot_eager", dtype="fp32"),
    replace(PIPELINE, compiled="aot_eager", schedule="zb-h1", recompute="mlp", dtype="fp32"),
)


def test_small_cover() -> None:
    check(ALWAYS, FEW_STEPS_OF_PIPELINES)


@pytest.mark.slow
def test_the_rest_of_it() -> None:
    check(REST, FEW_STEPS_OF_PIPELINES)
