"""DeepSpeed files: what their keys mean, what they refuse, who wins."""

import math

import pytest

from megazero.config import ConfigError, parse
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.config.schedule.sequence_lengths import SequenceLengths
from megazero.mesh.levels import INTER
from tests.messages import refused
from tests.unit.config.command_lines import WORLD, base_without, deepspeed, errors, run


def test_deepspeed_keys_map(tmp_path):
    zero = {
        "stage": 3,
        "zero_hpz_partition_size": 2,
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 1000,
    }
    content = {
        "train_batch_size": 48,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero | {"zero_quantized_weights": True, "offload_param": {"device": "none"}},
    }
    config = run(deepspeed(tmp_path, content))
    assert config.batch.global_batch_size == 48 and config.num_micro_batches(WORLD) == 3
    assert config.optimizer.clip_grad == 0.5 and config.precision.params_dtype == "bf16"
    assert config.zero.zero_preset == "hpz" and config.shards(WORLD).factors == (2, 8, 8)
    assert config.zero.zero_prefetch_bytes == 2000
    assert config.wire(WORLD).weights and not config.wire(WORLD).gradients.get(INTER)
    assert any("overlap_comm" in note for note in config.notes)
    mics = run(deepspeed(tmp_path, {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}))
    assert mics.shards(WORLD).factors == (4, 4, 4)
    off = run(deepspeed(tmp_path, {"zero_optimization": {"stage": 2, "mics_shard_size": -1}}))
    assert off.zero.zero_preset == "zero2"


def test_deepspeed_faults(tmp_path):
    content = {
        "bf16": {"enabled": "yes"},
        "fp16": {
            "enabled": True,
            "initial_scale_power": 0.5,
            "hysteresis": 0,
            "consecutive_hysteresis": True,
        },
        "optimizer": {"type": "Adam"},
        "data_types": {"grad_accum_dtype": "bf16"},
        "gradient_acumulation_steps": 2,
        "zero_optimization": {
            "stage": 5,
            "zero_quantized_gradients": 1,
            "zero_quantized_nontrainable_weights": True,
            "zeropp_loco_param": 0.8,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": "/disk"},
        },
        "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"},
        "tensorboard": {"enabled": True},
        "train_batch_size": 512.5,
    }
    found = errors(deepspeed(tmp_path, content))
    for part in (
        "bf16.enabled takes true or false",
        "fp16.initial_scale_power takes a whole number from 0 to 127, got 0.5",
        "--hysteresis 0 must be at least 1",
        "fp16.consecutive_hysteresis is not supported",
        "curriculum_learning: of curricula only curriculum_type seqlen with schedule_type fixed_linear",
        "grad_accum_dtype cannot be 'bf16'",
        "gradient_acumulation_steps is not supported; nearest: gradient_accumulation_steps",
        "zero_quantized_gradients takes true or false, got 1",
        "zero_quantized_nontrainable_weights is not supported",
        "zeropp_loco_param is not supported",
        "offload_optimizer, zero_optimization.offload_param are not supported: offload is not built",
        "tensorboard is not supported: use --tensorboard-dir",
        "train_batch_size takes a whole number, got 512.5",
        "--zero-stage 5 must be at most 3; nearest: 3",
    ):
        assert sum(part in line for line in found) == 1, part
    assert len(found) == 14


# As published files have it: tuning, logging and what is switched off, in DeepSpeed's ways of writing it.
PUBLISHED = {
    "train_batch_size": 4.8e1,
    "train_micro_batch_size_per_gpu": "2",
    "gradient_accumulation_steps": None,
    "steps_per_print": 2000,
    "wall_clock_breakdown": True,
    "dump_state": False,
    "prescale_gradients": True,
    "communication_data_type": "fp16",
    "zero_allow_untested_optimizer": True,
    "elastic_checkpoint": True,
    "comms_logger": {"enabled": True, "verbose": False},
    "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": None},
    "tensorboard": {"enabled": False, "output_path": "logs"},
    "wandb": {"group": "x"},
    "csv_monitor": {"enabled": False},
    "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen", "min_difficulty": 80},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False},
    "aio": {"block_size": 1048576, "queue_depth": 16},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2},
    "bfloat16": {"enabled": True},
    "data_types": {"grad_accum_dtype": None},
    "zero_optimization": {
        "stage": 3,
        "stage3_prefetch_bucket_size": "5e7",
        "stage3_max_live_parameters": 3e9,
        "stage3_max_reuse_distance": 3e9,
        "stage3_param_persistence_threshold": 1e5,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "overlap_comm": False,
        "offload_optimizer": {"device": "none", "buffer_count": 4, "pin_memory": True},
        "offload_param": {"device": None},
    },
}


def test_published_deepspeed_files_are_taken_with_one_note_of_what_has_no_effect(tmp_path):
    config = run(deepspeed(tmp_path, PUBLISHED))
    assert config.batch.global_batch_size == 48 and isinstance(config.batch.global_batch_size, int)
    assert config.zero.zero_prefetch_bytes == 100_000_000 and config.precision.params_dtype == "bf16"
    (note,) = [note for note in config.notes if "no effect here" in note]
    for key in ("steps_per_print", "prescale_gradients", "zero_optimization.overlap_comm", "comms_logger"):
        assert key in note
    assert "tensorboard" not in note and "offload" not in note and "curriculum" not in note


def test_one_line_for_one_missing_capability_of_a_deepspeed_file(tmp_path):
    scaling = {"loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}
    automatic = {"train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    (line,) = errors(deepspeed(tmp_path, automatic))
    assert "train_batch_size, gradient_clipping, bf16.enabled cannot be 'auto'" in line
    assert "use --global-batch-size" in line
    (line,) = errors(deepspeed(tmp_path, {"fp16": {"enabld": True, **scaling}}))
    assert "fp16.enabld is not supported; nearest: fp16.enabled" in line
    assert "bf16 takes an object, got 'yes'" in errors(deepspeed(tmp_path, {"bf16": "yes"}))[0]
    (line,) = errors(deepspeed(tmp_path, {"gradient_accumulation_steps": 1.5}))
    assert "gradient_accumulation_steps takes a whole number, got 1.5" in line
    for infinite in (float("inf"), "1e400"):
        assert "train_batch_size takes a" in errors(deepspeed(tmp_path, {"train_batch_size": infinite}))[0]


def test_deepspeeds_fp16_block_decides_the_loss_scale(tmp_path):
    block = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12}
    config = run("--fp16 --loss-scale 12 --hysteresis 2 " + deepspeed(tmp_path, {"fp16": block}))
    precision = config.precision
    assert precision.params_dtype == "fp16" and not precision.loss_scale
    assert precision.initial_loss_scale == 2.0**12 and precision.loss_scale_window == 500
    assert any("loss-scale 12 from flags gives way to 0" in note for note in config.notes)
    assert not any("hysteresis" in note for note in config.notes)
    default = run(deepspeed(tmp_path, {"fp16": {"enabled": True, "auto_cast": False}})).precision
    assert (default.initial_loss_scale, default.loss_scale_window) == (2.0**16, 1000)  # DeepSpeed's own
    static = run(deepspeed(tmp_path, {"fp16": {"enabled": True, "loss_scale": 128}})).precision
    assert static.loss_scale == 128
    for off in ({"enabled": False, "loss_scale": 7}, {"loss_scale": 7}):
        config = run("--fp16 --loss-scale 12 " + deepspeed(tmp_path, {"fp16": off}))
        assert config.precision.loss_scale == 12
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}}
    assert errors(deepspeed(tmp_path, both)) == ("--bf16 and --fp16 exclude each other; leave one out",)
    assert "fp16 takes an object, got True" in errors(deepspeed(tmp_path, {"fp16": True}))[0]


def test_one_rule_says_who_decides_of_the_optimizer(tmp_path):
    """DeepSpeed's file what its engine does, by DeepSpeed's defaults; flags what Megatron makes and passes to it."""
    blocks = {
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "weight_decay": 0.3, "betas": [0.5, 0.6]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}},
    }
    typed = "--clip-grad 0.25 --weight-decay 0.1 --deepspeed "
    config = run(typed + deepspeed(tmp_path, blocks))
    optimizer = config.optimizer
    assert (optimizer.clip_grad, optimizer.weight_decay, optimizer.adam_beta1) == (1.0, 0.1, 0.9)
    assert not config.lr_lengths.warmup
    for part in (
        "clip-grad 0.25 from flags gives way to 1 from",
        'default since June 2026. Before it was none: write "gradient_clipping": 0',
        "optimizer is set aside: flags decide",
        "scheduler is set aside: flags decide",
    ):
        assert sum(part in note for note in config.notes) == 1, (part, config.notes)
    for said in (0, 0.0, 0.5):
        config = run(typed + deepspeed(tmp_path, {"gradient_clipping": said}))
        assert config.optimizer.clip_grad == said and not any("June 2026" in note for note in config.notes)
    assert run("--clip-grad 0.25").optimizer.clip_grad == 0.25
    assert "gradient_clipping takes a number" in errors(deepspeed(tmp_path, {"gradient_clipping": "x"}))[0]
    config = run(deepspeed(tmp_path, {"pipeline": {"pipe_partitioned": True}, "timers": {"throughput": {}}}))
    assert any("pipeline, timers" in note for note in config.notes)


def curriculum(low, high):
    schedule = {"total_curriculum_step": 110, "difficulty_step": 8}
    block = {"curriculum_type": "seqlen", "schedule_type": "fixed_linear", "schedule_config": schedule}
    return {"curriculum_learning": {**block, "enabled": True, "min_difficulty": low, "max_difficulty": high}}


@pytest.mark.parametrize(("low", "high"), [(8, 32), (13, 30), (8, 64)])  # the last: beyond the samples
def test_lengths_grow_by_deepspeeds_rule(tmp_path, low, high):
    """Against the rule in the words of its documentation, down to a multiple."""
    config = run(deepspeed(tmp_path, curriculum(low, high)))
    full = config.model.seq_length
    lengths = SequenceLengths(full, config.batch.rampup_seq_length)
    for step in range(1, 200):
        wanted = math.floor(step / 110 * (high - low) + low)
        assert lengths.at(step) == min(wanted - wanted % 8, high, full), step
    settled = lengths.settled
    assert lengths.at(settled) == lengths.at(10**6)
    assert high > full or lengths.at(settled - 1) < lengths.at(settled)


def test_lengths_in_tokens_count_what_growing_samples_have(tmp_path):
    flags = [*base_without("train_iters"), *["--global-batch-size", "16", "--train-tokens", "60000"]]
    path = deepspeed(tmp_path, curriculum(8, 32)).split()
    config = parse([*flags, *path], WORLD)
    lengths, tokens, iterations = SequenceLengths(32, config.batch.rampup_seq_length), 0, 0
    while tokens < 60000:  # as Megatron-DeepSpeed's loop
        iterations += 1
        tokens += 16 * lengths.at(iterations)
    assert config.training.train_samples == 16 * iterations > 60000 / 32
    sizes, reached = BatchSizes(((0, 16),), 1, 1), 16 * sum(map(lengths.at, range(1, 41)))
    found = [lengths.samples_reaching(tokens, sizes) for tokens in (reached - 1, reached, reached + 1)]
    assert found == [640, 640, 656]
    assert parse(flags, WORLD).training.train_samples == 1888
    with refused("--lr-decay-tokens", "--lr-decay-samples"):
        parse([*flags, *path, "--lr-decay-tokens", "32000"], WORLD)


def test_deepspeed_zeropp_keys(tmp_path):
    zero = {"stage": 3, "zero_hpz_partition_size": 4}
    zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zeropp_loco_param": None}
    config = run(deepspeed(tmp_path, {"zero_optimization": zero}))
    wire = config.wire(WORLD)
    assert config.zero.zero_preset == "hpz" and config.shards(WORLD).factors == (4, 8, 8)
    assert (
        wire.weights
        and wire.weights.bits == 8
        and wire.gradients.get(INTER)
        and wire.gradients.get(INTER).bits == 4
    )
    assert any("hpz" in note and "zeropp does so once per step" in note for note in config.notes)
    faster = run(deepspeed(tmp_path, {"zero_optimization": zero}) + " --zero-preset zeropp")
    assert faster.shards(WORLD).factors == (4, 4, 8) and faster.wire(WORLD) == run(
        "--zero-preset zeropp"
    ).wire(WORLD)
    assert faster.wire(WORLD).delta and not wire.delta
    assert not any("once per step" in note for note in faster.notes)
    zero["zero_quantized_weights"] = False
    partly = run(deepspeed(tmp_path, {"zero_optimization": zero}) + " --zero-preset zeropp")
    assert partly.wire(WORLD).weights is None and partly.wire(WORLD).gradients.get(INTER)
    assert not partly.wire(WORLD).delta and partly.shards(WORLD).lifetime == "step"
    zero["zero_quantized_weights"] = True
    path = deepspeed(tmp_path, {"zero_optimization": zero})
    for choice in ("--no-zero-quantized-weights-delta", "--zero-params-lifetime step"):
        assert run(f"{path} --zero-preset zeropp {choice}").wire(WORLD) == wire


def test_deepspeed_accumulation_is_checked_and_flags_replace_it(tmp_path):
    flags = base_without("micro_batch_size")
    sizes = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    path = deepspeed(tmp_path, sizes).split()
    with pytest.raises(ConfigError, match="= 32; nearest: gradient_accumulation_steps 3"):
        parse([*flags, *path], WORLD)
    assert run(" ".join(path)).num_micro_batches(WORLD) == 3  # BASE says --micro-batch-size
    assert parse([*flags, *path, "--global-batch-size", "64"], WORLD).num_micro_batches(WORLD) == 4
    del sizes["train_batch_size"]
    assert parse([*flags, *deepspeed(tmp_path, sizes).split()], WORLD).batch.global_batch_size == 32
