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
        ({"expert_model_parallel_size": 8}, "which has 4 data-parallel ranks, or straddle it; nearest: 4"),
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


def test_shards_between_which_the_size_lies_are_an_error() -> None:
    six = {"num_experts": 12, "global_batch_size": 24, "expert_model_parallel_size": 2}
    with pytest.raises(ConfigError, match="neither divide P = 3 nor are a multiple of it; nearest: 3"):
        config(World(6, 6), zero_shard=(3, 3, 6), **six)
    config(World(6, 6), zero_shard=(3, 3, 6), **{**six, "expert_model_parallel_size": 3})
    config(World(6, 6), zero_preset="zero3", **six)


def test_elastic_shares_experts_among_as_many_as_a_node_has() -> None:
    given = {"elastic": True, "global_batch_size": 8, "micro_batch_size": 8, "expert_model_parallel_size": 4}
    assert config(World(8, 4), **given).parallel.expert_model_parallel_size == 4
    assert config(World(2, 2), **given).parallel.expert_model_parallel_size == 2
    assert config(World(1, 1), **given).parallel.expert_model_parallel_size == 1
