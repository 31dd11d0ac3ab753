"""--compile on every layout: the bits of eager with aot_eager, close to them with inductor, and no graph too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.dist.engine.test_parity import cover
from tests.dist.parity import assemble, gradient_errors, run_cases
from tests.dist.parity_cases import Case
from tests.dist.pipeline.cases import pipeline_cover

STEPS = dict.fromkeys((1, 2, 4, 8), 3)  # gathers run ahead from the second on
CLOSE = {"fp32": 1e-5, "fp64": 1e-10}


def both(cases: Sequence[Case], backend: str):
    compiled = run_cases([replace(case, compiled=backend) for case in cases], STEPS)
    return zip(cases, run_cases(cases, STEPS), compiled, strict=True)


def check(cases: Sequence[Case], backend: str = "aot_eager") -> None:
    for case, eager, compiled in both(cases, backend):
        for one, other in zip(eager, compiled, strict=True):
            cut = max(case.tp, case.cp) > 1 or case.schedule == "zb-h1" or "experts" in case.family
            assert len(set(other.graphs)) == 1, (case.id, other.graphs)  # none after the first step
            graphs, whole = other.graphs[0], 1 + other.last  # of the layers, and of the head with its loss
            chunks = bool(case.loss_chunk and other.last)
            assert graphs > 1 if cut else graphs > whole if chunks else graphs == whole, (case.id, graphs)
            assert one.graphs[-1] == 0
            if backend == "aot_eager":
                assert (one.losses, one.norms, one.prints) == (other.losses, other.norms, other.prints), (
                    case.id
                )
        if backend == "inductor":
            want, got = (assemble(case, each, "first") for each in (eager, compiled))
            errors = gradient_errors(case.model, got, want)
            assert max(errors.values()) < CLOSE[case.dtype], (case.id, errors)
            for one, other in zip(eager, compiled, strict=True):
                assert other.losses[0] == pytest.approx(one.losses[0], rel=CLOSE[case.dtype], abs=0), case.id


PLAIN = Case(1, 2, 2, "zero3", None, False, 3, True, "odd", "none", "fp32", "llama")
TENSOR = Case(2, 1, 2, "ddp", None, True, 1, False, "odd", "selective", "fp64", "gpt")
SPLIT = replace(
    TENSOR, tp=1, sequence_parallel=False, pp=2, schedule="zb-h1", recompute="full", micro_batches=3
)
CONTEXT = replace(PLAIN, cp=2, recompute="mlp")
EXPERTS = replace(PLAIN, ep=2, family="experts", recompute="mlp")


def test_sharded_layers_give_the_bits_of_eager():
    check([PLAIN])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        TENSOR,
        replace(TENSOR, recompute="mlp", loss_chunk=8),
        SPLIT,
        replace(SPLIT, recompute="mlp", schedule="1f1b"),
        CONTEXT,
        EXPERTS,
    ],
    ids=lambda case: case.id,
)
def test_what_is_cut_out_leaves_the_bits_of_eager(case):
    check([case])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_cover(world):
    check([case for case in cover() if case.world == world])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_cover_of_pipelines(world):
    check([case for case in pipeline_cover() if case.world == world])


@pytest.mark.slow
def test_inductor():
    check([PLAIN, TENSOR, SPLIT, replace(PLAIN, family="gpt", dtype="fp64", recompute="full")], "inductor")
