"""RowCounts that do not fit: each is one error line with the value, the rule and the nearest legal choice."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megazero.config import ConfigError, RunConfig, World, begun, make_config, parse
from megazero.config.model.section import ModelConfig
from megazero.config.nearest import around, common_divisors, multiples_around
from megazero.config.options.optimizers import OptimizerConfig
from megazero.config.options.sections import BatchConfig
from megazero.config.run import all_options, section_types, stored_values
from megazero.config.summary import describe
from megazero.config.validate import find_errors
from megazero.families import FAMILIES
from megazero.pp.schedules import make_schedule
from tests.sizes import SMALL

BASE = {**SMALL, "hidden_size": 96, "num_attention_heads": 12}


YARN = {"rotary_scaling": "yarn", "position_embedding_type": "rope"}
WORLD = World(8, 4)


def errors(world=WORLD, **changes):
    with pytest.raises(ConfigError) as caught:
        begun(make_config({**BASE, **changes}, world), world)
    return "\n".join(caught.value.errors)


def legal(world=WORLD, **changes):
    config = make_config({**BASE, **changes}, world)
    assert find_errors(config, world) == []
    return config


def test_nearest_arithmetic():
    assert around(common_divisors(12), 5) == "4 or 6"
    assert around(common_divisors(12), 13) == "12"
    assert common_divisors(12, 18) == [1, 2, 3, 6]
    assert multiples_around(27, 6) == "24 or 30"
    assert multiples_around(4, 6) == "6"


def test_required_options_are_all_named_at_once():
    with pytest.raises(ConfigError) as caught:
        make_config({})
    text = str(caught.value)
    for flag in ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "lr"):
        assert f"--{flag} is required" in text
    assert "exactly one of --train-iters and --train-samples" in text
    assert "exactly one of --data-path and --mock-data" in text


@pytest.mark.parametrize("name", [opt.name for opt in all_options().values() if opt.required])
@pytest.mark.parametrize("world", [None, WORLD])
def test_what_stands_in_for_a_missing_option_is_not_judged(name: str, world: World | None) -> None:
    split = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    assert errors(world, **split, **{name: None}) == f"--{name.replace('_', '-')} is required"


def test_a_configuration_that_holds_has_the_types_that_it_states() -> None:
    for family in FAMILIES:
        config = legal(model_family=family)
        for section in section_types():
            for each in dataclasses.fields(getattr(config, section)):
                value = getattr(getattr(config, section), each.name)
                assert value is not None or str(each.type).endswith("| None"), each.name
    for section in (ModelConfig, OptimizerConfig, BatchConfig):
        with pytest.raises(TypeError, match="missing"):  # one without what a run needs cannot be made
            section()


@pytest.mark.parametrize(
    "changes,part",
    [
        (
            {"tensor_model_parallel_size": 5, "ffn_hidden_size": 240},
            "size 5; nearest size that fits all: 4 or 6",
        ),
        ({"num_query_groups": 5}, "--num-query-groups 5; nearest groups: 4 or 6"),
        ({"hidden_size": 100}, "--hidden-size 100 does not divide by --num-attention-heads 12"),
        ({"hidden_size": 100}, "nearest hidden size: 96 or 108"),
        ({"num_query_groups": 3, "tensor_model_parallel_size": 2}, "--num-query-groups 3 does not divide by"),
        (
            {"tensor_model_parallel_size": 4, "ffn_hidden_size": 250},
            "--ffn-hidden-size 250 does not divide by",
        ),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 30}, "--seq-length 30"),
        ({"kv_channels": 7}, "must be even for rotary positions; nearest: 6 or 8"),
        ({"rotary_percent": 1.5}, "--rotary-percent 1.5 must be at most 1"),
        ({"rotary_percent": 0.4, "position_embedding_type": "rope"}, "which must be even and above 0"),
        (
            {**YARN, "yarn_beta_slow": 40.0},
            "--yarn-beta-slow 40 must be below --yarn-beta-fast 32; nearest: the defaults",
        ),
        ({**YARN, "rotary_base": 1.0}, "--rotary-base 1 must be above 1 with --rotary-scaling yarn"),
        ({**YARN, "rotary_scaling": "dynamic", "rotary_percent": 0.25}, "dynamic needs 4 rotary channels"),
        (
            {**YARN, "rotary_scaling": "longrope", "rotary_short_factor": (1.0,) * 4},
            "--rotary-long-factor has 0 numbers, and --rotary-scaling longrope needs one for each of the 4 pairs",
        ),
        (
            {**YARN, "rotary_scaling": "longrope", "rotary_short_factor": (1.0, 1.0, 0.0, 1.0)},
            "--rotary-short-factor has 0; its numbers must be above 0",
        ),
        ({"squared_relu": True, "swiglu": True}, "--squared-relu and --swiglu exclude each other"),
        ({"pad_vocab_size_to": 16}, "--pad-vocab-size-to 16 is below the vocabulary's"),
        ({"pad_vocab_size_to": 1001, "tensor_model_parallel_size": 4}, "size 4; nearest: 1000 or 1004"),
        (
            {"seq_length": 64, "max_position_embeddings": 32},
            "exceeds --max-position-embeddings 32; nearest: 32",
        ),
        (
            {"profile": True, "profile_step_start": 5, "profile_step_end": 5},
            "--profile-step-end 5 must be above --profile-step-start 5; nearest: 6",
        ),
        (
            {"profile": True, "profile_ranks": (0, 8)},
            "--profile-ranks 8 is not one of the 8 ranks; nearest: 7",
        ),
        ({"profile": True, "profile_ranks": (-1,)}, "--profile-ranks -1 must be at least 0; nearest: 0"),
        ({"num_layers": 0}, "--num-layers 0 must be at least 1; nearest: 1"),
        ({"attention_dropout": 1.0}, "--attention-dropout 1 must be below 1"),
        ({"hidden_dropout": -0.1}, "--hidden-dropout -0.1 must be at least 0"),
        (
            {"num_experts": 4, "moe_layer_freq": (0, 1), "save": "a", "save_hf": "b"},
            "--moe-layer-freq 0,1 has 2 numbers for --num-layers",
        ),
        ({"lr": 0.0}, "--lr 0 must be above 0"),
        ({"seed": 2**32}, "--seed 4294967296 must be at most 4294967295; nearest: 4294967295"),
        ({"min_lr": 1.0}, "--min-lr 1 exceeds --lr 0.001; nearest: 0.001"),
        ({"decoupled_lr": 1e-4, "min_lr": 2e-4}, "--min-lr 0.0002 exceeds --decoupled-lr 0.0001"),
        (
            {"decoupled_lr": 1e-2, "decoupled_min_lr": 0.5},
            "--decoupled-min-lr 0.5 exceeds --decoupled-lr 0.01",
        ),
        ({"lr_warmup_iters": 100}, "must be shorter than the decay of 100 that contains it; nearest: 99"),
        ({"lr_decay_style": "WSD"}, "needs --lr-wsd-decay-iters"),
        ({"lr_warmup_init": 1.0}, "--lr-warmup-init 1 exceeds --lr 0.001; nearest: 0.001"),
        ({"start_weight_decay": 0.1}, "--start-weight-decay 0.1 without growth"),
        ({"weight_decay_incr_style": "cosine", "end_weight_decay": 0.1}, "cosine needs --start-weight-decay"),
        (
            {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
            "--start-weight-decay 0.2 exceeds --end-weight-decay 0.1",
        ),
        ({"lr_decay_style": "cosin"}, "nearest: cosine"),
        ({"lr_decay_samples": 5}, "use --lr-decay-iters"),
        ({"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1}, "exclude each other"),
        ({"train_samples": 5}, "exactly one of --train-iters and --train-samples"),
        ({"mock_data": False}, "exactly one of --data-path and --mock-data"),
        ({"mock_data": False, "data_path": ["1", "b", "c"]}, "a weight before every prefix"),
        ({"mock_data": False, "data_path": ["-1", "b"]}, "weight -1 of b must be above 0"),
        ({"split": "1,x"}, "--split '1,x'"),
        ({"split": "0,0,0"}, "--split '0,0,0'"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": None}, "needs --vocab-size"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "needs --tokenizer-model"),
        ({"save": "x", "save_interval": 10, "save_retain_interval": 25}, "nearest: 20 or 30"),
        ({"global_batch_size": 40}, "not a multiple of micro-batch size 2 x data-parallel size 8 = 16"),
        ({"global_batch_size": 40}, "nearest: 32 or 48"),
        (
            {"global_batch_size": 64, "rampup_batch_size": (24, 8, 100)},
            "starts at 24, which is not a multiple",
        ),
        ({"global_batch_size": 64, "rampup_batch_size": (16, 32, 100)}, "nearest steps: 24 or 48"),
        ({"global_batch_size": 64, "rampup_batch_size": (80, 16, 100)}, "above --global-batch-size 64"),
        ({"global_batch_size": 64, "rampup_batch_size": (16, 16)}, "START INCREMENT SAMPLES"),
        (
            {"optimizer": "muon", "muon_num_ns_steps": 6},
            "sets of coefficients of --muon-coefficient-type quintic; nearest: 5",
        ),
        (
            {"optimizer": "muon", "optimizer_impl": "apex"},
            "--optimizer-impl apex has no muon, only adamw; nearest: auto",
        ),
        ({"zero_shard": (2, 4, 6)}, "nearest legal: 2,4,8"),
        ({"zero_shard": (2, 2)}, "three numbers P,G,OS"),
        ({"zero_shard": (2, 2, 2), "zero_stage": 3}, "excludes --zero-stage"),
        ({"zero_stage": 2, "zero_preset": "hpz"}, "--zero-stage 2 is preset zero2"),
        ({"zero_stage": 2, "zero_hpz_partition_size": 4}, "needs preset hpz"),
        ({"zero_preset": "zero3", "zero_hpz_partition_size": 4}, "or zeropp, not preset zero3"),
        ({"zero_preset": "zeropp", "zero_hpz_partition_size": 8}, "nearest: --zero-hpz-partition-size 4"),
        ({"zero_stage": 2, "zero_preset": "zeropp"}, "--zero-stage 2 is preset zero2"),
        ({"zero_preset": "zero2", "zero_params_lifetime": "use"}, "nearest legal: step"),
        ({"zero_preset": "hpz", "tensor_model_parallel_size": 4}, "nearest legal preset: zero3"),
        ({"ranks_per_node": 3}, "nearest ranks per node: 2"),
        ({"ranks_per_node": 2, "tensor_model_parallel_size": 4}, "nearest tensor-parallel size: 2"),
        ({"tensor_model_parallel_size": 3}, "nearest"),
    ],
)
def test_faults(changes, part):
    assert part in errors(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"adam_beta1": 0.5, "optimizer": "sgd"},
        {"decoupled_min_lr": 1e-4},
        {"sgd_momentum": 0.5},
        {"lion_beta1": 0.8},
        {"lion_beta2": 0.5, "optimizer": "sgd"},
        {"adam_eps": 1e-6, "optimizer": "lion"},
        {"muon_momentum": 0.5},
        {"muon_nesterov": True, "optimizer": "sgd"},
        {"muon_coefficient_type": "simple"},
        {"muon_num_ns_steps": 3},
        {"muon_scale_mode": "shape_scaling"},
        {"muon_extra_scale_factor": 0.2, "optimizer": "lion"},
        {"muon_fp32_matmul_prec": "high"},
        {"muon_tp_mode": "blockwise"},
        {"profile_step_end": 20},
        {"save_interval": 5},
        {"load_optim": False},
        {"finetune": True},
        {"rotary_base": 5e5, "position_embedding_type": "alibi"},
        {"rotary_scaling_factor": 2.0},
        {"rotary_high_freq_factor": 2.0, **YARN},
        {"yarn_beta_fast": 8.0, **YARN, "rotary_scaling": "llama3"},
        {"yarn_mscale": 0.5, "rotary_attention_factor": 1.5, **YARN},
        {"lr_wsd_decay_iters": 5},
        {"wandb_exp_name": "x"},
        {"save": "x", "save_keep_last": 2},
        {"save": "x", "async_save": True},
        {"tokenizer_model": "x"},
        {"reset_position_ids": True, "position_embedding_type": "alibi"},
        {"data_cache_path": "x"},
        {"min_lr": 1e-4, "lr_decay_style": "constant"},
        {"eval_interval": 5, "eval_iters": 0},
        {"lr_warmup_init": 1e-4},
        {"exit_on_missing_checkpoint": True},
        {"loss_policy": "int8"},
    ],
)
def test_options_of_megatron_without_effect_are_noted(changes):
    notes = [note for note in legal(**changes).notes if "has no effect without" in note]
    assert len(notes) == 1 and "leave it out" not in notes[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"load": "x", "save": "x", "finetune": True, "zero_exact_numel": 0},
        {"allow_fresh_start": True},
        {"zero_weight_bits": 8},
        {"zero_gradient_bits": 4},
        {"zero_gradient_bits_intra_node": 8},
        {"zero_gradient_transform": "hadamard"},
        {"zero_block_size": 64},
        {"zero_exact_numel": 0},
    ],
)
def test_options_without_effect_are_refused(changes):
    text = errors(**changes)
    assert text.count("has no effect without") == 1 and "\n" not in text


MIXTURE = {"num_experts": 4, "add_bias_linear": False}


@pytest.mark.parametrize(
    "changes, cure",
    [
        (
            {**MIXTURE, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"},
            "--moe-router-load-balancing-type aux_loss or seq_aux_loss",
        ),
        ({"num_experts": 1, "moe_router_topk": 4}, "--num-experts above 1"),
        (
            {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.1},
            "--num-experts above 1",
        ),
        ({"compile": True, "compile_backend": "eager", "compile_cache": "x"}, "--compile-backend inductor"),
        ({"save": "x", "stop_on_spike": True}, "--save-interval above 0"),
        ({"save": "x", "save_interval": 0, "save_keep_last": 2}, "--save-interval above 0"),
        (
            {"tokenizer_type": "NullTokenizer", "tokenizer_model": "x"},
            "--tokenizer-type other than NullTokenizer",
        ),
    ],
)
def test_what_would_give_an_option_an_effect_is_not_given(changes, cure):
    """Of the options that the cure names, those that are given have another value than the cure's."""
    try:
        lines = legal(**changes).notes
    except ConfigError as error:
        lines = error.errors
    last = [line for line in lines if "has no effect without" in line][-1]
    assert last.split("without ")[1].split(";")[0] == cure


def test_a_mixture_without_a_layer_of_experts_is_refused():
    text = errors(**MIXTURE, moe_layer_freq=(0, 0, 0, 0))
    assert "\n" not in text and "--moe-layer-freq 0,0,0,0 gives no layer the 4 experts; nearest: 1" in text
    assert "has 2 numbers for --num-layers 4" in errors(**MIXTURE, moe_layer_freq=(0, 0))


def test_a_size_that_the_ranks_do_not_divide_by_is_one_error():
    text = errors(World(1, 1), context_parallel_size=2)
    assert "\n" not in text and "--context-parallel-size 2 over 1 data-parallel ranks" in text


def test_faults_of_unlike_kinds_come_together():
    text = errors(num_layers=0, tensor_model_parallel_size=8, global_batch_size=7, lr=-1.0, zero_preset="hpz")
    assert text.count("\n") == 3
    for part in ("--num-layers 0", "--lr -1", "tensor-parallel size", "--num-attention-heads 12"):
        assert part in text


def test_legal_configurations():
    config = legal(tensor_model_parallel_size=2, zero_preset="hpz", global_batch_size=48)
    assert config.data_parallel_size(WORLD) == 4 and config.data_ranks_per_node(WORLD) == 2
    assert config.shards(WORLD).factors == (2, 4, 4) and config.num_micro_batches(WORLD) == 6
    pretend = legal(World(4, 4), ranks_per_node=2, zero_preset="hpz")
    assert pretend.shards(World(4, 4)).factors == (2, 4, 4)
    assert legal(zero_stage=3, zero_hpz_partition_size=2).shards(WORLD).factors == (2, 8, 8)
    assert legal(zero_stage=3, zero_preset="zeropp").shards(WORLD).factors == (4, 4, 8)
    assert legal(optimizer="adam").optimizer.optimizer == "adamw"
    assert legal(global_batch_size=64, rampup_batch_size=(16, 16, 100))
    assert legal().batch.global_batch_size == 16


def test_without_a_world_only_sizes_that_need_it_stay_unchecked():
    assert legal(None, global_batch_size=7, zero_preset="hpz").batch.global_batch_size == 7
    assert legal(None).batch.global_batch_size is None
    assert "P = 2 does not divide G = 3" in errors(None, zero_shard=(2, 3, 4))
    assert "nearest size that fits all" in errors(None, tensor_model_parallel_size=5)


def test_data_words_and_lifetimes_that_are_legal():
    for words in (["a"], ["a", "b", "c"], ["0.3", "a", "7", "b"]):
        assert legal(mock_data=False, data_path=words).data.data_path == tuple(words)
    for split in ("100", "9/1", "98, 1.5, .5"):
        assert legal(split=split).data.split == split
    config = legal(zero_preset="zero3", zero_params_lifetime="step")
    assert config.shards(WORLD).lifetime == "use" and any("is 'use' here" in note for note in config.notes)


def test_schedule_lengths():
    span = legal(lr_warmup_fraction=0.1, lr_decay_iters=50).lr_lengths
    assert (span.unit, span.total, span.decay, span.warmup) == ("iterations", 100, 50, 5)
    span = legal(train_iters=None, train_samples=1000, lr_warmup_samples=64).lr_lengths
    assert (span.unit, span.total, span.decay, span.warmup) == ("samples", 1000, 1000, 64)


NUMBERS = st.integers(-2, 40).map(str)
WORDS = st.one_of(
    NUMBERS,
    st.floats().map(repr),
    st.sampled_from(sorted({str(word) for opt in all_options().values() for word in opt.choices})),
    st.lists(NUMBERS, max_size=4).map(",".join),
    st.text("ab-=,.1 ", max_size=4),
)
FLAGS = st.sampled_from([opt.flag for opt in all_options().values()])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(FLAGS, WORDS), max_size=6), st.integers(1, 12), st.integers(1, 12))
@example([("--lr-warmup-fraction", "1e306")], 1, 1)
@example([("--lr-warmup-fraction", "-1e308")], 1, 1)
@example([("--load", "0"), ("--model-family", "0")], 1, 2)
@example([("--pipeline-model-parallel-size", "2"), ("--num-virtual-stages-per-pipeline-rank", "2")], 4, 2)
@example([("--pipeline-model-parallel-size", "3"), ("--num-layers-per-virtual-pipeline-stage", "0")], 3, 3)
@example([("--pipeline-model-parallel-size", "2"), ("--pipeline-partition", "-1,5")], 2, 2)
@example([("--context-parallel-size", "2"), ("--tensor-model-parallel-size", "16")], 4, 2)
def test_any_command_line_gives_a_configuration_or_the_list_of_its_faults(extra, size, per_node):
    """Never another exception; what is accepted is whole on its world."""
    argv = [
        w
        for name, value in BASE.items()
        for w in (f"--{name.replace('_', '-')}", str(value))
        if value is not True
    ]
    argv += ["--mock-data", *(word for pair in extra for word in pair)]
    world = World(size, per_node)
    try:
        config = begun(parse(argv, world), world)
    except ConfigError as error:
        assert error.errors and all(error.errors)
        return
    assert config.num_micro_batches(world) >= 1 and config.shards(world) and describe(config, world)
    stages, pp = config.stages(), config.parallel.pipeline_model_parallel_size
    micro_batches = config.num_micro_batches(world)
    assert sum(len(stage.layers) for stage in stages) == config.model.num_layers
    assert make_schedule(config.pipeline_schedule, pp, len(stages) // pp, micro_batches)
    assert RunConfig.of(stored_values(config.to_dict())) == config
