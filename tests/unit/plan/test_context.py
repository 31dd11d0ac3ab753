"""The planner's price of context parallelism: seconds by link, memory, and when it is proposed."""

from __future__ import annotations

import pytest

from megazero.config.model.mixers import mixers_of
from megazero.config.model.mixers.mixer import Exchanged
from megazero.config.model.section import make_model
from megazero.config.model.spec import HEAD
from megazero.mesh.levels import INTER, INTRA
from megazero.plan.search import Search, smallest_layout
from megazero.plan.simulate import simulate
from tests.unit.plan.test_plan import MODEL, cluster, layout

LONG = {"seq_length": 4096, "global_batch_size": 8, "num_query_groups": 2, "recompute_granularity": "none"}


def test_what_crosses_nodes_counts_there_and_costs_more() -> None:
    """8 ranks on 2 nodes: of 7 rows 4 cross."""
    swapped = {**LONG, "cp_comm_type": ("a2a",)}
    inside, across = (layout({**swapped, "context_parallel_size": size}, cluster(2, 4)) for size in (4, 8))
    sent = across.bytes_by_stage[0]
    assert 3 * sent["cp", INTER] == 4 * sent["cp", INTRA] > 0 == inside.bytes_by_stage[0]["cp", INTER]
    seconds = [simulate(plan).bill["context"] for plan in (inside, across)]
    assert 0 < 20 * seconds[0] < seconds[1]


def test_activations_shrink() -> None:
    """But for copies of keys and values: 2 x 2 x 32 of the kept elements of a token at 4 ranks."""
    kept = {
        size: layout({**LONG, "context_parallel_size": size}, cluster(1, 4)).base.activation_memory(0, None)
        for size in (1, 2, 4)
    }
    one, two, four = (kept[size][HEAD]["activations"] for size in (1, 2, 4))
    assert two == pytest.approx(one / 2) and one / 4 < four < one / 3.8


def test_it_is_proposed_where_memory_asks_for_it() -> None:
    values = {name: value for name, value in {**MODEL, **LONG}.items() if name != "micro_batch_size"}
    del values["recompute_granularity"]
    values |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "seq_length": 65536}
    roomy, tight = (Search(values, cluster(1, 4, gib=gib), "exact").best(1) for gib in (16.0, 1.0))
    assert roomy[0].layout.base.cp == 1 and tight[0].layout.base.cp > 1
    smallest = smallest_layout(values, cluster(1, 4, gib=0.01))
    assert smallest is not None and smallest.base.cp > 1


def test_ranks_whose_part_of_a_sequence_cannot_be_cut_once_more_are_tried_without() -> None:
    """2 of 4 tensor-parallel ranks cut 6 tokens, but not the 3 of a rank that shares samples with another."""
    sizes = {"seq_length": 6, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    found = {}
    for cp in (1, 2):
        search = Search({**MODEL, **sizes, "context_parallel_size": cp}, cluster(1, 4), "exact")
        found[cp] = {base.config.parallel.sequence_parallel for base in search.bases()}
    assert found == {1: {True}, 2: {False}}


def test_latents_travel_not_the_heads_that_are_made_of_them() -> None:
    """DeepSeek-V3: 576 elements of a token to each other rank, where its keys and values have 40,960."""
    made = {"model_family": "deepseek_v3", "num_layers": 1, "hidden_size": 7168, "num_attention_heads": 128}
    mixer = mixers_of(make_model(**made, seq_length=8, kv_lora_rank=512))[0]
    assert mixer.exchanged(8, 1) == Exchanged(24576 // 8 + 576, 16384 // 8, (576,))
    swapped = mixer.exchanged(8, 4)  # 3 of 4 ranks are others, and each receives the latent
    assert swapped == Exchanged(24576 // 8 + 4 * 576, 16384 // 8, (4 * 576,))


def test_keys_that_fill_no_block_are_padded() -> None:
    ways = {"context_parallel_size": 8, "cp_comm_type": ("all_gather",), "cp_gather_bits": 8}
    short = layout({**LONG, **ways, "seq_length": 16, "num_query_groups": 1}, cluster(2, 4)).bytes_by_stage[0]
    message = 144  # 2 tokens of 32 channels in one block and its scale, filled up to a multiple of 16
    assert short["cp", INTER] == 6 * 8 * (2 * message + 2 * 2 * 32 * 2)


def test_fewer_bytes_of_keys_take_less_time_on_a_slow_link_and_more_on_a_fast_one() -> None:
    ways = {"context_parallel_size": 8, "cp_comm_type": ("all_gather",)}
    for gbits, pays in ((1.0, True), (10_000.0, False)):
        exact, coded = (
            simulate(layout({**LONG, **ways, "cp_gather_bits": bits}, cluster(2, 4, gbits))).bill["context"]
            for bits in (None, 8)
        )
        assert (coded < exact) == pays, (gbits, exact, coded)


def test_a_gather_across_nodes_costs_less_than_a_swap() -> None:
    """Of the same 8 ranks; the planner prices both."""
    ways = ({"cp_comm_type": ("a2a",)}, {})
    plans = [layout({**LONG, "context_parallel_size": 8, **way}, cluster(2, 4)) for way in ways]
    swapped, gathered = (simulate(plan).bill["context"] for plan in plans)
    assert 0 < 1.9 * gathered < swapped
    assert plans[1].bytes_by_stage[0]["cp", INTER] * 2 == plans[0].bytes_by_stage[0]["cp", INTER]
