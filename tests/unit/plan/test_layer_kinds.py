"""Layers of two kinds go through units, memory, compute, activations, bytes and the simulated clock.

A stand-in changes the description alone: layers without a window have an MLP twice as wide. Half of the layers are
such, so sums are the mean of those of two models with layers of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from megazero.config.layout.pipeline import stage_costs
from megazero.config.model import spec
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import EMBEDDING, HEAD, LAYER, model_spec, parameter_count, training_flops
from megazero.families.layer_kinds import LayerKind
from megazero.models import Decoder
from megazero.plan import units
from megazero.plan.layout import Layout
from megazero.plan.memory import checkpoint_bytes
from megazero.plan.simulate import simulate
from tests.unit.plan.test_plan import cluster, layout

SECOND = "layer 2"
FFN = 512
SIZES: dict[str, Any] = {
    **{"num_layers": 8, "ffn_hidden_size": FFN, "sliding_window": 16, "window_attn_skip_freq": (2,)},
    **{"recompute_granularity": "none", "zero_prefetch_bytes": 0},
}


@contextmanager
def wide_without_windows() -> Iterator[None]:
    def wider(c: ModelConfig, choices: LayerKind) -> spec.Block:
        return feed_forward(
            c if choices.window else replace(c, ffn_hidden_size=2 * c.ffn_hidden_size), choices
        )

    def forget() -> None:
        for known in (model_spec, spec.padded_spec, units.layer_matrices, units._module_units):
            known.cache_clear()

    feed_forward = spec._feed_forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "_feed_forward", wider)
        forget()
        yield
    forget()


def numbers(plan: Layout) -> dict[str, float]:
    """Return the numbers that are linear in the layers' sizes."""
    config, base = plan.config, plan.base
    held = [plan.units(rank) for rank in range(base.pp)]
    return {
        "parameters": parameter_count(config.model),
        "operations": training_flops(config.model, [64]),
        "cost": stage_costs(config.model, "selective").layer,
        "checkpoint": checkpoint_bytes(config.model, "bf16", config.optimizer, plan.wire),
        "elements": sum(each.elements for each in held),
        "matrices": sum(each.matrices_apart.total() for each in held),
        "states": sum(plan.memory_of(rank, None).model_states for rank in range(base.pp)),
        "kept": sum(
            each[HEAD]["activations"]
            for each in (base.activation_memory(rank, None) for rank in range(base.pp))
            if HEAD in each
        ),
        "bytes": sum(sum(total.values()) for total in plan.bytes_by_stage),
        "compute": simulate(plan).bill["compute"],
        "tensor": simulate(plan).bill["tensor"],
    }


def planned(values: dict[str, Any]) -> tuple[Layout, dict[str, float]]:
    plan = layout({**SIZES, **values}, cluster())
    return plan, numbers(plan)


@pytest.mark.parametrize(
    "values",
    [
        {"zero_preset": "zero1"},
        {"zero_preset": "zero3"},
        {"zero_preset": "zeropp", "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"zero_preset": "zero2", "zero_unit_layers": 2},
        {"zero_preset": "zero2", "optimizer": "muon"},
        {"zero_preset": "zero3", "pipeline_model_parallel_size": 2},
    ],
    ids=str,
)
def test_two_kinds_count_as_the_mean_of_models_of_each(values: dict[str, Any]) -> None:
    narrow, small = planned(values)
    wide, large = planned({**values, "ffn_hidden_size": 2 * FFN})
    with wide_without_windows():
        plan, found = planned(values)
        layers = model_spec(plan.config.model).layers
        memory, seconds = plan.memory, simulate(plan).seconds
    assert [(kind.kind, kind.places) for kind in layers] == [(LAYER, (0, 2, 4, 6)), (SECOND, (1, 3, 5, 7))]
    assert small.keys() == found.keys() and all(small[name] <= found[name] <= large[name] for name in small)
    means = {name: (small[name] + large[name]) / 2 for name in small}
    assert found == {name: pytest.approx(mean, rel=1e-9) for name, mean in means.items()}
    assert narrow.memory.total < memory.total < wide.memory.total
    assert simulate(narrow).seconds < seconds < simulate(wide).seconds


def test_each_kind_has_its_own_units_operations_and_moments() -> None:
    values = {"zero_preset": "zero3", "pipeline_model_parallel_size": 2}
    narrow, wide = planned(values)[0], planned({**values, "ffn_hidden_size": 2 * FFN})[0]
    with wide_without_windows():
        plan = planned(values)[0]
        own, sizes, memory = (
            plan.units(0),
            plan.base.compute.sizes,
            [plan.base.activation_memory(rank, None) for rank in range(plan.base.pp)],
        )
        parts = own.parts
    for kind, like in ((LAYER, narrow), (SECOND, wide)):
        assert own.modules[kind] == like.units(0).modules[LAYER]
        assert sizes[kind] == like.base.compute.sizes[LAYER]
        working, theirs = memory[1], like.base.activation_memory(1, None)
        assert working[kind]["activations"] - working[HEAD]["activations"] == (
            theirs[LAYER]["activations"] - theirs[HEAD]["activations"]
        )
    assert [module.kind for module in parts[0]] == [EMBEDDING, LAYER, SECOND, LAYER, SECOND]


def test_layers_of_two_kinds_are_gathered_together() -> None:
    with wide_without_windows():
        apart, joined = (planned({"zero_unit_layers": n})[0].units(0) for n in (1, 2))
    assert joined.modules[LAYER] == joined.modules[SECOND] == apart.modules[LAYER] + apart.modules[SECOND]
    assert {shape.elements for shape in apart.reduced(1)} == {shape.elements for shape in apart.shapes}


def test_a_decoder_that_is_not_as_described_is_not_built() -> None:
    with wide_without_windows(), pytest.raises(AssertionError):
        Decoder(planned({})[0].config.model, device="meta")
