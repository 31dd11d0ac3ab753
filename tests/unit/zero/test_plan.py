"""A unit's plan: its bytes are those of a formula that shares no code with it."""

from __future__ import annotations

import ast

import pytest

from megazero.verify.expected_bytes import ExpectedBytes
from tests import ROOT
from tests.byte_formula import sent_in_step
from tests.unit.house.test_imports import imports
from tests.unit.plan.test_plan import EXPERTS, cluster, layout

KINDS = ("refresh", "gather", "reduce")
INSIDE = {"zero_quantized_gradients": True, "zero_gradient_bits_intra_node": 8}
LAYOUTS: tuple[dict[str, object], ...] = (
    *({"zero_preset": name} for name in ("ddp", "zero1", "zero2", "zero3", "hpz", "zeropp")),
    *({"zero_preset": name, "zero_prefetch_bytes": 0} for name in ("zero3", "zeropp")),
    {
        "zero_preset": "zero3",
        "zero_prefetch_bytes": 0,
        "global_batch_size": 32,
        "zero_gradients_lifetime": "step",
    },
    {"zero_preset": "hpz", "global_batch_size": 8, **INSIDE},
    {
        "zero_preset": "zeropp",
        "zero_exact_numel": 300,
        "zero_quantized_weights_delta": False,
        "params_dtype": "bf16",
    },
    {"zero_shard": (2, 4, 8), "zero_quantized_weights": True, "tensor_model_parallel_size": 1},
    {"zero_preset": "zeropp", "tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"zero_preset": "zero1", "pipeline_model_parallel_size": 2, **INSIDE},
    {
        "zero_preset": "zeropp",
        "pipeline_model_parallel_size": 2,
        "untie_embeddings_and_output_weights": False,
    },
    {**EXPERTS, "zero_preset": "zeropp", "expert_model_parallel_size": 4},
    {**EXPERTS, "zero_preset": "hpz", "expert_model_parallel_size": 2, "zero_quantized_gradients": True},
)


@pytest.mark.parametrize("values", LAYOUTS, ids=str)
def test_the_bytes_of_a_layout_are_those_of_the_formula(values: dict[str, object]) -> None:
    """The planner's, and those that verify compares with every rank's counters."""
    plan = layout(values, cluster())
    config, world = plan.config, plan.base.world
    verified = ExpectedBytes(config, world, False, plan.wire.block)
    for stage, total in enumerate(plan.bytes_by_stage):
        want = +sent_in_step(config, world, stage)
        assert {key: sent for key, sent in total.items() if key[0] in KINDS} == want
        got = verified.bytes_of(plan.grid.rank_of(stage, 1, 0), 1, False)
        named = {f"{kind}_{link}_bytes": sent for (kind, link), sent in want.items()}
        assert {key: sent for key, sent in got.items() if key.startswith(KINDS)} == named


def test_the_formula_shares_no_code_with_what_it_judges() -> None:
    found = {name for name, _ in imports(ast.parse((ROOT / "tests/byte_formula.py").read_text()), "", False)}
    assert found and not [
        name for name in found if name.startswith(("megazero.zero", "megazero.plan", "tests"))
    ]
