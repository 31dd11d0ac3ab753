"""Mixtures of experts: routers, and ranks that share experts."""

from __future__ import annotations

import pytest

from megazero.config import ConfigError, RunConfig, World, make_config
from megazero.config.model.architecture import architecture_of
from megazero.models import make_model
from tests.sizes import SMALL
from tests.unit.config.command_lines import run

SIGMOID = "EXPERTS --moe-router-score-function sigmoid"


def test_a_loss_that_balances_teaches_a_router_of_one_expert() -> None:
    assert run("EXPERTS --moe-router-topk 1 --moe-aux-loss-coeff 0.01").model.moe_router_topk == 1


def test_one_sigmoid_needs_no_softmax() -> None:
    model = run(f"{SIGMOID} --moe-router-topk 1 --moe-router-enable-expert-bias").model
    assert model.moe_router_topk == 1 and model.moe_router_enable_expert_bias


def test_sinkhorn_weighs_by_sigmoids() -> None:
    words = "--moe-router-topk 1 --moe-router-load-balancing-type sinkhorn"
    assert run(f"EXPERTS {words}").model.moe_router_score_function == "sigmoid"
    assert run(words).model.moe_router_score_function == "softmax"  # without experts
    assert run(f"EXPERTS {words}").training.sinkhorn and not run("EXPERTS").training.sinkhorn


def test_ranks_that_cut_experts_in_megatron_share_them() -> None:
    tensors = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size"
    for words, shared in ((f"{tensors} 2", 2), (f"{tensors} 2 --expert-model-parallel-size 2", 4)):
        done = run(f"EIGHT {words}")
        assert done.parallel.expert_model_parallel_size == shared
        assert any(f"--expert-model-parallel-size {shared}:" in note for note in done.notes)
        assert (
            run(words.partition(" --expert-model")[0]).parallel.expert_model_parallel_size == 1
        )  # no experts
    assert run(f"EIGHT {tensors} 1").parallel.expert_model_parallel_size == 1


def test_no_family_of_softmax_takes_another_router() -> None:
    model = make_model(
        model_family="qwen3_moe",
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=8,
        max_position_embeddings=8,
        num_experts=4,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
    )
    with pytest.raises(ValueError) as caught:
        architecture_of(model)
    for flag in ("score-function sigmoid", "topk-scaling-factor 2.5", "enable-expert-bias"):
        assert f"--moe-router-{flag}" in str(caught.value)


EIGHT = World(8, 4)
EXPERTS = {"model_family": "qwen3_moe", "num_experts": 8, "moe_ffn_hidden_size": 16}


def config(world: World | None = EIGHT, **changes: object) -> RunConfig:
    return make_config({**SMALL, **EXPERTS, **changes}, world)


def test_ranks_need_not_share_an_mlp_that_no_layer_has() -> None:
    odd = {"ffn_hidden_size": 50, "tensor_model_parallel_size": 4, "sequence_parallel": True}
    assert config(**odd).parallel.tensor_model_parallel_size == 4
    with pytest.raises(ConfigError, match="--ffn-hidden-size 50 does not divide"):
        config(**odd, moe_layer_freq=(2,))


def test_shards_between_which_the_size_lies_are_an_error() -> None:
    six = {"num_experts": 12, "global_batch_size": 24, "expert_model_parallel_size": 2}
    with pytest.raises(ConfigError, match="neither divide P = 3 nor are a multiple of it; nearest: 3"):
        config(World(6, 6), zero_shard=(3, 3, 6), **six)
    config(World(6, 6), zero_shard=(3, 3, 6), **{**six, "expert_model_parallel_size": 3})
    config(World(6, 6), zero_preset="zero3", **six)


def test_with_its_flag_ranks_of_several_nodes_share_experts() -> None:
    crossing = {"expert_model_parallel_size": 8, "moe_dispatch_across_nodes": "exact", "micro_batch_size": 1}
    assert config(**crossing).parallel.expert_model_parallel_size == 8
