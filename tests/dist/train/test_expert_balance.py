"""Loads, losses and the bias of experts are those of one rank on every layout, and go on from a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.log.metrics import read_metrics
from tests.dist.runs import checkpoint_of, differences, train_each

MODEL = {
    **{"num_experts": 6, "moe_router_topk": 4, "moe_ffn_hidden_size": 8, "moe_layer_freq": (0, 1, 1)},
    **{"moe_router_score_function": "sigmoid", "moe_router_num_groups": 3, "moe_router_group_topk": 2},
    **{"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.015625, "num_layers": 3},
    **{"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1, "moe_per_layer_logging": True},
    **{"init_method_std": 0.3, "params_dtype": "fp64", "train_iters": 3, "micro_batch_size": 2},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "zero3, recompute": (2, {"zero_preset": "zero3", "recompute_granularity": "full"}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2, "pipeline_partition": "2,1"}),
    "tp 2 x zero2, recompute": (
        4,
        {
            **{"tensor_model_parallel_size": 2, "sequence_parallel": True, "zero_preset": "zero2"},
            **{"recompute_granularity": "full", "ranks_per_node": 2},
        },
    ),
    "context parallel": (2, {"context_parallel_size": 2}),
}
BIASES = [f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line["experts"] for line in read_metrics(folder) if "lm_loss" in line]


@pytest.mark.first(1)
@pytest.mark.parametrize("layouts", [["tp 2 x zero2, recompute"], sorted(LAYOUTS)], ids=["one", "every"])
def test_a_layout_balances_as_one_rank(tmp_path: Path, layouts: list[str]) -> None:
    jobs = {
        name: (
            world,
            {**MODEL, **values, "save": str(tmp_path / name), "log_dir": str(tmp_path / f"{name} logs")},
        )
        for name, (world, values) in ((name, LAYOUTS[name]) for name in ("one rank", *layouts))
    }
    seen = train_each(jobs)
    wanted, own = lines(tmp_path / "one rank logs"), checkpoint_of(tmp_path / "one rank")["weights"]
    steps = MODEL["train_iters"]
    assert isinstance(steps, int) and len(wanted) == steps
    for name in BIASES:  # every step moves a bias by the rate, unless an expert got just the mean
        moves = own[name] / 0.015625
        assert own[name].dtype is torch.float32 and 0 < moves.abs().max() <= steps
        assert torch.equal(moves, moves.round())
    assert set(wanted[0]["layers"]) == {"1", "2"} and f"{wanted[0]['fullest_layer']}" in wanted[0]["layers"]
    assert wanted[0]["load"] == max(each["load"] for each in wanted[0]["layers"].values()) > 1
    for name in layouts:
        weights = checkpoint_of(tmp_path / name)["weights"]
        for bias in BIASES:
            assert torch.equal(weights[bias], own[bias]), (name, bias)
        for got, want in zip(lines(tmp_path / f"{name} logs"), wanted, strict=True):
            assert (got["load"], got["fullest_layer"]) == (want["load"], want["fullest_layer"]), name
            for key in ("load_balancing_loss", "z_loss"):
                assert math.isclose(got[key], want[key], rel_tol=1e-9), (name, key)
                for layer in want["layers"]:
                    one, other = got["layers"][layer][key], want["layers"][layer][key]
                    assert math.isclose(one, other, rel_tol=1e-9), (name, key, layer)
        (_, first), (_, wanted_first) = seen[name][0].losses[-1], seen["one rank"][0].losses[-1]
        assert math.isclose(first, wanted_first, rel_tol=1e-9), name


@pytest.mark.parametrize("layout", ["zero3, recompute"])
def test_a_run_with_biases_goes_on_to_the_bit(tmp_path: Path, layout: str) -> None:
    world, values = LAYOUTS[layout]
    values = {**MODEL, **values, "params_dtype": "bf16", "log_dir": str(tmp_path / "logs")}
    one, two = str(tmp_path / "straight"), str(tmp_path / "parts")
    jobs = [
        {**values, "save": one},
        {**values, "save": two, "exit_interval": 2},
        {**values, "load": two, "save": two},
    ]
    seen = train_each({i: (world, job) for i, job in enumerate(jobs)})
    assert seen[1][0].losses + seen[2][0].losses == seen[0][0].losses
    straight = checkpoint_of(one)
    assert not differences(straight, checkpoint_of(two))
    assert all(straight["weights"][name].dtype is torch.float32 for name in BIASES)
