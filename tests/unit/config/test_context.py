"""Flags of context parallelism: what they mean, what is refused and what is nearest."""

from __future__ import annotations

import pytest

from megazero.config import ConfigError, RunConfig, World, make_config, parse
from megazero.config.summary import describe
from tests.sizes import SMALL

CP2 = {"context_parallel_size": 2}
EIGHT = World(8, 4)


def config(world: World | None = EIGHT, **changes: object) -> RunConfig:
    return make_config({**SMALL, **changes}, world)


def test_ranks_that_share_samples_share_a_batch_and_shard_alike() -> None:
    run = config(global_batch_size=None, tensor_model_parallel_size=2, **CP2)
    assert (run.data_parallel_size(EIGHT), run.shard_ranks(EIGHT), run.own_length) == (2, 4, 16)
    assert run.batch.global_batch_size == 4 and run.num_micro_batches(EIGHT) == 1


def test_megatrons_words() -> None:
    words = "--cp-comm-type a2a --context-parallel-size 2 --hierarchical-context-parallel-sizes 2 1"
    parallel = config(cp_comm_type=("a2a+p2p",), hierarchical_context_parallel_sizes=(2, 1), **CP2).parallel
    assert parallel.context_parallel_size == 2
    sizes = [f"--{name.replace('_', '-')} {value}" for name, value in SMALL.items() if value is not True]
    read = parse([*" ".join(sizes).split(), "--mock-data", *words.split()], EIGHT)
    assert read.parallel.cp_comm_type == ("a2a",)
    assert any("--hierarchical-context-parallel-sizes 2,1 has no effect" in note for note in read.notes)
    alone = config(cp_comm_type=("p2p",))  # Megatron's default, which its scripts may say
    assert any("--cp-comm-type p2p has no effect" in note for note in alone.notes)
    ring = config(cp_comm_type=("p2p",), context_parallel_size=8, seq_length=64)
    said = "--cp-comm-type p2p: instead of a ring, 4 ranks swap heads for sequence and 2 groups of these gather keys"
    assert any(said in note for note in ring.notes), ring.notes
    deepspeed = parse([*" ".join(sizes).split(), "--mock-data", "--ds-sequence-parallel-size", "4"], EIGHT)
    assert deepspeed.parallel.context_parallel_size == 4


LEVELS = [  # words, changes, ranks that swap heads and groups that gather keys; on nodes of 4
    ("a2a", {}, (8, 1)),
    ("all_gather", {}, (1, 8)),
    ("allgather", {}, (1, 8)),
    ("a2a+p2p", {"hierarchical_context_parallel_sizes": (2, 4)}, (2, 4)),
    ("p2p", {}, (4, 2)),
    (None, {}, (4, 2)),
    (None, {"num_attention_heads": 6, "kv_channels": 4}, (2, 4)),
    (None, {"num_query_groups": 1, "tensor_model_parallel_size": 2, "context_parallel_size": 4}, (2, 2)),
    (None, {"ranks_per_node": 8}, (8, 1)),
]


@pytest.mark.parametrize(("word", "changes", "levels"), LEVELS)
def test_how_ranks_attend(word: str | None, changes: dict[str, object], levels: tuple[int, int]) -> None:
    sizes = {"context_parallel_size": 8, "seq_length": 64, "num_attention_heads": 8, "kv_channels": 4}
    run = config(**{**sizes, "num_query_groups": None, "cp_comm_type": word and (word,), **changes})
    assert run.context_levels(EIGHT) == levels
    assert run.own_length == 64 // run.parallel.context_parallel_size


CODED = {"cp_gather_bits": 8, "context_parallel_size": 8, "seq_length": 64}  # 4 of these ranks share a node
EIGHT_HEADS = {"num_attention_heads": 8, "num_query_groups": 8, "kv_channels": 4}


def test_keys_across_nodes_in_eight_bits() -> None:
    run = config(**CODED, **EIGHT_HEADS)
    coding = run.gathered_keys(EIGHT)
    assert coding is not None and (coding.bits, coding.block, coding.hadamard) == (8, 128, 128)
    assert config(**{**CODED, "cp_gather_bits": None}, **EIGHT_HEADS).gathered_keys(EIGHT) is None
    said = "across nodes as INT8 after a Hadamard transform (blocks of 128), gradients exact"
    assert any(said in line for line in describe(run, EIGHT))


def test_groups_do_not_straddle_nodes_unevenly() -> None:
    """12 ranks on nodes of 6: 4 neither divide a node nor fill several."""
    twelve = {"num_attention_heads": 12, "kv_channels": 4, "seq_length": 48, "global_batch_size": 24}
    with pytest.raises(ConfigError, match="over 12 data-parallel ranks, 6 of them per node; nearest: 3"):
        config(World(12, 6), **twelve, context_parallel_size=4)
    for size in (1, 2, 3, 6, 12):
        config(World(12, 6), **twelve, context_parallel_size=size)


def test_elastic_keeps_them() -> None:
    grown = config(World(4, 4), elastic=True, global_batch_size=8, micro_batch_size=8, **CP2)
    assert grown.parallel.context_parallel_size == 2 and grown.batch.micro_batch_size == 4
    with pytest.raises(ConfigError, match="which it does not divide"):
        config(World(3, 3), elastic=True, global_batch_size=8, **CP2)
