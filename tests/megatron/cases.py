"""The layouts and options under which megatron-core is run, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.megatron.case import Case

# What megatron_core_patch.enable takes.
EXACT = {"weights": "none", "gradients": "none"}
SMALL = 1024  # elements of a parameter that is sent exactly: norms and biases of the small models here
INT8_INT4 = {"weights": "int8", "gradients": "int4", "exact_numel": SMALL}
DELTA_INT4 = {"weights": "int4-delta", "gradients": "int4", "exact_numel": SMALL}

CASES = {
    "dp4": Case(dp=4),
    "dp4 overlap": Case(dp=4, overlap_grad_reduce=True, overlap_param_gather=True),
    "dp4 overlap gradients": Case(dp=4, overlap_grad_reduce=True),
    "dp4 average in collective": Case(dp=4, average_in_collective=True, overlap_grad_reduce=True),
    "dp4 recompute": Case(dp=4, recompute=True),
    "dp4 per token": Case(dp=4, per_token_loss=True),
    "tp2": Case(dp=2, tp=2),
    "tp2 sp": Case(dp=2, tp=2, sp=True),
    "tp2 sp overlap": Case(dp=2, tp=2, sp=True, overlap_grad_reduce=True, overlap_param_gather=True),
    "pp2 tied": Case(dp=2, pp=2, ranks_per_node=1),
    "pp2 untied": Case(dp=2, pp=2, tied=False, ranks_per_node=1),
    "pp2 overlap": Case(dp=2, pp=2, ranks_per_node=1, overlap_grad_reduce=True, overlap_param_gather=True),
    "tp2 pp2": Case(dp=2, tp=2, sp=True, pp=2),
    "pp2 vpp2": Case(dp=2, pp=2, vpp=2, layers=4, ranks_per_node=1),
    "pp2 vpp2 overlap": Case(
        dp=2, pp=2, vpp=2, layers=4, ranks_per_node=1, overlap_grad_reduce=True, overlap_param_gather=True
    ),
    "moe ep2": Case(dp=4, ep=2, experts=4),
    "moe ep2 overlap": Case(dp=4, ep=2, experts=4, overlap_grad_reduce=True, overlap_param_gather=True),
    "moe tp2 sp ep2": Case(dp=2, tp=2, sp=True, ep=2, experts=4, tied=False),
}


# Larger ones, for what has a hop inside a node and one across and a pipeline or tensor parallelism, too.
LARGE = {
    "tp2 sp dp4": Case(dp=4, tp=2, sp=True, ranks_per_node=4),
    "pp2 tied dp4": Case(dp=4, pp=2),
    "pp2 vpp2 tied dp4 overlap": Case(
        dp=4, pp=2, vpp=2, layers=4, overlap_grad_reduce=True, overlap_param_gather=True
    ),
    "tp2 pp2 per token": Case(dp=2, tp=2, sp=True, pp=2, per_token_loss=True),
}


def of_one_rank(case: Case) -> Case:
    """Return the same training on one rank: all samples of a step are its micro-batches."""
    return replace(
        case,
        dp=1,
        tp=1,
        sp=False,
        pp=1,
        vpp=1,
        ep=1,
        micro_batches=case.micro_batches * case.dp,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        average_in_collective=False,
        recompute=False,
    )


def cases(*always: str) -> list:
    """Return every case as a pytest parameter; those that are not named in ``always`` are slow."""
    assert set(always) <= set(CASES), always
    return [
        pytest.param(case, id=name, marks=[] if name in always else [pytest.mark.slow])
        for name, case in {**CASES, **LARGE}.items()
    ]
