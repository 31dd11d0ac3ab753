"""Options of pipelines: what they resolve to, what is refused, and how stages are weighed."""

import itertools

import pytest

from megazero.config import ConfigError, World, make_config, parse
from megazero.config.layout.pipeline import layout_layers, layout_letters, stage_costs
from megazero.config.model.spec import training_flops
from megazero.config.summary import describe
from tests.sizes import SMALL

BASE = {**SMALL, "num_layers": 8, "vocab_size": 128}
WORLD = World(8, 4)
PP = {"pipeline_model_parallel_size": 2}


def errors(world=WORLD, **changes):
    with pytest.raises(ConfigError) as caught:
        make_config({**BASE, **PP, **changes}, world)
    return "\n".join(caught.value.errors)


def legal(world=WORLD, **changes):
    return make_config({**BASE, **PP, **changes}, world)


def layers(config):
    return [len(stage.layers) for stage in config.stages()]


def test_without_a_pipeline_there_is_one_stage():
    config = legal(pipeline_model_parallel_size=1)
    (stage,) = config.stages()
    assert stage.layers == range(8) and stage.embedding and stage.head
    assert config.pipeline_schedule == "1f1b" and config.virtual_stages == 1


def test_schedule_and_virtual_stages_are_resolved():
    config = legal()
    assert config.pipeline_schedule == "1f1b" and config.virtual_stages == 1 and len(config.stages()) == 2
    for said in (
        {"num_layers_per_virtual_pipeline_stage": 2},
        {"num_virtual_stages_per_pipeline_rank": 2},
    ):
        config = legal(**said, global_batch_size=32)
        assert config.pipeline_schedule == "interleaved" and config.virtual_stages == 2
        assert [stage.rank for stage in config.stages()] == [0, 1, 0, 1]
    assert legal(num_layers_per_virtual_pipeline_stage=4).pipeline_schedule == "1f1b"
    assert legal(pipeline_schedule="zb-h1").pipeline_schedule == "zb-h1"
    assert legal(num_virtual_stages_per_pipeline_rank=1).virtual_stages == 1


def test_partition_options():
    assert layers(legal(vocab_size=20000)) == [7, 1]  # the head costs more than a layer
    assert layers(legal(vocab_size=20000, pipeline_partition="uniform")) == [4, 4]
    assert layers(legal(pipeline_partition="3,5")) == [3, 5]
    assert layers(legal(vocab_size=20000, decoder_last_pipeline_num_layers=3)) == [5, 3]
    assert layers(legal(pipeline_partition="1,3,3,1", global_batch_size=32)) == [1, 3, 3, 1]
    even = {"num_layers_per_virtual_pipeline_stage": 2, "global_batch_size": 32, "vocab_size": 20000}
    assert layers(legal(**even)) == [2, 2, 2, 2]
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in BASE.items() if value is not True]
    argv += ["--mock-data", "--pipeline-model-parallel-size=4", "--num-layers=70"]
    bloom = parse([*argv, "--pp-partition-method", "type:transformer|embedding"], WORLD)
    assert layers(bloom) == [17, 18, 18, 17]


@pytest.mark.parametrize(
    "layout",
    [
        "Et*4|t*4L",
        "Ett,|(tt|)*2,ttL",
        "E|(tt|)*2ttL",
        "E|tttt|tttt|L",
        "E(t|t)*3|(tt|)*1L",
        "Etttt|(t|tt|tL)*1",
        "Et*4|t*3,mL",
        "E|tttt|tttt|m*2L",
    ],
)
def test_layouts_are_read_as_megatron_reads_them(layout):
    core = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    theirs = core.PipelineParallelLayerLayout(layout, 2)
    more = {"mtp_num_layers": (layout_letters(layout) or "").count("m"), "position_embedding_type": "rope"}
    sizes = {"num_layers": sum(layout_layers(layout)), "global_batch_size": 32}
    config = legal(pipeline_partition=layout, **sizes, **more)
    assert config.virtual_stages == theirs.virtual_pipeline_model_parallel_size
    for stage in config.stages():
        held = theirs.layout[stage.rank][stage.index // 2]
        assert [each.name for each in held] == [
            *["embedding"] * stage.embedding, *["decoder"] * len(stage.main),
            *["mtp"] * stage.further, *["loss"] * stage.head,
        ]  # fmt: skip


def test_stage_costs_are_the_flops_of_the_model():
    for changes in ({}, {"swiglu": False}, {"num_query_groups": 2, "kv_channels": 32}):
        model = legal(**changes).model
        costs = stage_costs(model, "none")
        assert 6 * 32 * (8 * costs.layer + costs.head) == training_flops(model, [32])
        assert 0 < costs.embedding < 0.02 * costs.layer
        full, selective = stage_costs(model, "full"), stage_costs(model, "selective")
        assert full.layer == pytest.approx(4 / 3 * costs.layer) and full.head == costs.head
        assert costs.layer < selective.layer < full.layer


def test_every_size_of_a_ramp_is_taken_by_the_schedule():
    for start, increment in itertools.product((16, 32), (16, 32)):
        changes = {"num_virtual_stages_per_pipeline_rank": 2, "rampup_batch_size": (start, increment, 1000)}
        batch = start + 4 * increment
        config = legal(**changes, global_batch_size=batch)
        for size in range(start, batch + 1, increment):
            assert size // (2 * config.data_parallel_size(WORLD)) % 2 == 0


def test_the_mapping_decides_who_shares_a_node():
    """4 stages of 2 data-parallel ranks on nodes of 4: two stages to a node, or a pipeline to a node."""
    shape = {"pipeline_model_parallel_size": 4, "zero_stage": 3}
    inside, across = legal(**shape), legal(**shape, use_tp_pp_dp_mapping=True)
    assert inside.data_ranks_per_node(WORLD) == 2 and across.data_ranks_per_node(WORLD) == 1
    assert "nearest legal preset: zero3" in errors(
        pipeline_model_parallel_size=4, use_tp_pp_dp_mapping=True, zero_preset="hpz"
    )
    twelve = {"pipeline_model_parallel_size": 3, "use_tp_pp_dp_mapping": True, "num_layers": 9}
    assert "straddle nodes" in errors(World(12, 4), **twelve)


def test_describe_says_order_schedule_and_stages():
    config = legal(num_virtual_stages_per_pipeline_rank=2, global_batch_size=32)
    text = "\n".join(describe(config, WORLD))
    for part in (
        "per node: 1 tensor-parallel x 4 data-parallel (4 of them on one node) x 2 pipeline, innermost first",
        "2 stages per rank, schedule interleaved: idle 11.1% with equal stages",
        "activations of up to 5,3 forwards on ranks 0 to 1",
        "stage  rank  layers",
        "embedding, 2 layers",
    ):
        assert part in text, part
    text = "\n".join(describe(legal(use_tp_pp_dp_mapping=True), WORLD))
    assert "per node: 1 tensor-parallel x 2 pipeline x 4 data-parallel (2 of them on one node), inner" in text
    assert "pipeline:" not in "\n".join(describe(legal(pipeline_model_parallel_size=1), WORLD))
    unread = legal(vocab_size=None, tokenizer_type="HuggingFaceTokenizer", tokenizer_model="x")
    text = "\n".join(describe(unread, WORLD))
    assert "schedule 1f1b" in text and "stage  rank" not in text


def test_gathered_is_noted_in_the_policy():
    config = legal(zero_stage=3, zero_params_lifetime="gathered")
    assert config.shards(WORLD).keep_gathered and config.shards(WORLD).lifetime == "use"
    assert any("full parameters to the end of the step" in line for line in describe(config, WORLD))
    assert not any("is 'use' here" in note for note in config.notes)
    assert (
        legal(zero_preset="zeropp", zero_params_lifetime="gathered", pipeline_model_parallel_size=1)
        .wire(WORLD)
        .delta
    )
