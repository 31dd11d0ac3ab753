"""Flags of expert parallelism: what is refused and what is nearest, and what --elastic makes of it."""

from __future__ import annotations

import pytest

from megazero.config import ConfigError, RunConfig, World, make_config, parse
from tests.sizes import SMALL

EIGHT = World(8, 4)
EXPERTS = {"model_family": "qwen3_moe", "num_experts": 8, "moe_ffn_hidden_size": 16}


def config(world: World | None = EIGHT, **changes: object) -> RunConfig:
    return make_config({**SMALL, **EXPERTS, **changes}, world)


def test_megatrons_words() -> None:
    sizes = [f"--{name.replace('_', '-')} {value}" for name, value in SMALL.items() if value is not True]
    words = (
        "--num-experts 8 --disable-bias-linear --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    )
    read = parse([*" ".join(sizes).split(), "--mock-data", *words.split()], EIGHT)
    assert read.parallel.expert_model_parallel_size == 4


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"expert_model_parallel_size": 3}, "it does not divide 8 experts"),
        ({"expert_model_parallel_size": 8}, "without --moe-dispatch-across-nodes exact; nearest: 4"),
        ({"moe_dispatch_across_nodes": "exact"}, "exact needs ranks that share the experts, which"),
        (
            {"expert_model_parallel_size": 4, "moe_dispatch_across_nodes": "int8"},
            "for rows that go to other nodes, and the 4 ranks that share the experts lie on one; nearest: no",
        ),
        (
            {"moe_dispatch_across_nodes": "int8", "num_experts": None},
            "int8 needs ranks that share the experts",
        ),
        (
            {"expert_model_parallel_size": 8, "moe_dispatch_across_nodes": "int8", "hidden_size": 36},
            "whole blocks of at least 8 elements, which share a scale; nearest: --hidden-size 32 or 40, or exact",
        ),
        (
            {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 4, "sequence_parallel": True},
            "it is not a multiple of --tensor-model-parallel-size 4; nearest: 4",
        ),
        ({"expert_model_parallel_size": 2, "num_experts": None}, "needs --num-experts"),
    ],
)
def test_other_sizes_are_errors(changes: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert any(line in error for error in caught.value.errors), caught.value.errors


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
    fewer = config(World(4, 4), elastic=True, **crossing)
    assert fewer.parallel.expert_model_parallel_size == 4


def test_elastic_shares_experts_among_as_many_as_a_node_has() -> None:
    given = {"elastic": True, "global_batch_size": 8, "micro_batch_size": 8, "expert_model_parallel_size": 4}
    assert config(World(8, 4), **given).parallel.expert_model_parallel_size == 4
    assert config(World(2, 2), **given).parallel.expert_model_parallel_size == 2
    assert config(World(1, 1), **given).parallel.expert_model_parallel_size == 1
