"""--deepspeed-config reads DeepSpeed's JSON. Its keys mean something here, have no effect, or are not built."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megazero.config.nearest import did_you_mean
from megazero.config.options.fields import show
from megazero.config.read.sources import Layer
from megazero.config.run import all_options

OFFLOAD = "offload is not built; shard further instead (--zero-preset zero3)"
ZERO = "zero_optimization."

# DeepSpeed key -> our field, the value taken as it is.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "train_batch_size": "global_batch_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size",
        "gradient_clipping": "clip_grad",
        ZERO + "stage": "zero_stage",
        ZERO + "zero_quantized_weights": "zero_quantized_weights",
        ZERO + "zero_quantized_gradients": "zero_quantized_gradients",
    }
)
# Keys whose only value here is a fact. null, DeepSpeed's default, asks for nothing.
ALWAYS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {"data_types.grad_accum_dtype": ("fp32", "gradients always accumulate in at least fp32")}
)
# Keys that say how DeepSpeed works or what it prints, not what is trained: any value is taken, with one note.
LOGS = "what is printed: --log-interval; the time bill is always in metrics.jsonl"
LEGACY = "of DeepSpeed's own inner workings"
CHECKPOINTS = "a checkpoint always loads on any layout"
NO_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown"), LOGS),
        **dict.fromkeys(("comms_logger", "flops_profiler"), "bytes and FLOP/s are always in metrics.jsonl"),
        "activation_checkpointing": "how, where --recompute-granularity asks for it",
        "prescale_gradients": "the divisor is applied once, to sums in fp32",
        "gradient_predivide_factor": "the divisor is applied once, to sums in fp32",
        "communication_data_type": "sums are in fp32; formats are --zero-quantized-gradients and its kin",
        "seq_parallel_communication_data_type": "activations travel in the parameters' dtype",
        "zero_allow_untested_optimizer": "every --optimizer works with every preset",
        "zero_force_ds_cpu_optimizer": "there is no offload",
        "aio": "there is no offload",
        "disable_allgather": LEGACY,
        "elastic_checkpoint": CHECKPOINTS,
        "checkpoint": CHECKPOINTS,
        "bf16.immediate_grad_update": LEGACY,
        "bf16.check_grad_overflow": "a step whose gradients are not finite is always skipped",
        ZERO + "overlap_comm": "communication always overlaps",
        ZERO + "reduce_scatter": "gradients are always reduce-scattered",
        ZERO + "contiguous_gradients": "gradients always lie in flat buffers",
        ZERO + "reduce_bucket_size": "a module's gradients are one message",
        ZERO + "allgather_bucket_size": "a module's parameters are one message",
        ZERO + "allgather_partitions": "parameters are always gathered",
        ZERO + "stage3_param_persistence_threshold": "units are gathered whole",
        ZERO + "stage3_model_persistence_threshold": "units are gathered whole",
        ZERO + "stage3_module_granularity_threshold": "units are gathered whole",
        ZERO + "stage3_max_live_parameters": "--zero-prefetch-bytes bounds what is gathered ahead",
        ZERO + "stage3_max_reuse_distance": "--zero-params-lifetime says when parameters are dropped",
        ZERO + "stage3_gather_16bit_weights_on_model_save": CHECKPOINTS,
        ZERO + "stage3_gather_fp16_weights_on_model_save": CHECKPOINTS,
        ZERO + "elastic_checkpoint": CHECKPOINTS,
        ZERO + "load_from_fp32_weights": "fp32 master weights are always saved and loaded",
        ZERO + "mics_hierarchical_params_gather": "gathers always follow the node boundary",
        ZERO + "cpu_offload_use_pin_memory": "there is no offload",
        **dict.fromkeys(
            (
                ZERO + "sub_group_size",
                ZERO + "round_robin_gradients",
                ZERO + "ignore_unused_parameters",
                ZERO + "memory_efficient_linear",
                ZERO + "legacy_stage1",
                ZERO + "use_multi_rank_bucket_allreduce",
                ZERO + "stage3_use_all_reduce_for_fetch_params",
                ZERO + "use_all_reduce_for_fetch_params",
            ),
            LEGACY,
        ),
    }
)
# Keys that users have, with what to do instead. What is switched off (see _asks) is accepted.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        ZERO
        + "zero_quantized_nontrainable_weights": "frozen weights are sent as the others are; leave it out",
        ZERO + "offload_optimizer": OFFLOAD,
        ZERO + "offload_param": OFFLOAD,
        ZERO + "cpu_offload": OFFLOAD,
        ZERO + "cpu_offload_params": OFFLOAD,
        "fp16.consecutive_hysteresis": "overflows are counted until the scale grows, as in Megatron; leave it out",
        "bf16.bf16_master_weights_and_grads": "master weights are always fp32; leave it out",
        "fp16.fp16_master_weights_and_grads": "master weights and gradients are in at least fp32; leave it out",
        "amp": "apex is not used; use bf16 or fp16",
        "optimizer": "use --optimizer, --lr, --weight-decay, --adam-beta1, --adam-beta2, --adam-eps",
        "scheduler": "use --lr-decay-style, --lr-warmup-iters",
        "curriculum_learning": "lengths that grow are not built; leave it out to train at --seq-length throughout",
        "data_efficiency": "its sampling and token dropping are not built; leave it out",
        "progressive_layer_drop": "layers are never dropped; leave it out",
        "eigenvalue": "it serves quantised training, which is not built; leave it out",
        "quantize_training": "training with quantised weights is not built; leave it out",
        "compression_training": "compression is not built; leave it out",
        "sparse_attention": "attention is dense; leave it out",
        "sparse_gradients": "gradients are dense; leave it out",
        "elasticity": "the batch is --global-batch-size on any number of ranks; leave it out",
        "autotuning": "sizes are not searched; leave it out",
        "tensorboard": "use --tensorboard-dir",
        "wandb": "use --wandb-project",
        "csv_monitor": "metrics.jsonl has every value; leave it out",
        "comet": "use --tensorboard-dir or --wandb-project",
    }
)
ALWAYS_ON = ("optimizer", "scheduler", "sparse_attention", "compression_training")  # blocks without a switch
# Of the block fp16: key -> (our field, DeepSpeed's own default). It decides the loss scale alone: flags do not.
LOSS_SCALE: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "fp16.loss_scale": ("loss_scale", 0),
        "fp16.initial_scale_power": ("initial_loss_scale", 16),
        "fp16.loss_scale_window": ("loss_scale_window", 1000),
        "fp16.hysteresis": ("hysteresis", 2),
        "fp16.min_loss_scale": ("min_loss_scale", 1),
    }
)
LOSS_SCALE_DECIDED = "DeepSpeed's fp16 block decides the loss scale, and Megatron's flags do not"
SECTIONS = ("zero_optimization", "bf16", "fp16", "data_types")
# What asks for nothing where fp16 is off.
FP16_TUNING = (
    *LOSS_SCALE,
    *("fp16.auto_cast", "fp16.consecutive_hysteresis", "fp16.fp16_master_weights_and_grads"),
)
OLD_NAMES: Mapping[str, str] = MappingProxyType({"bfloat16": "bf16"})
# Keys that need a word of translation (in _special).
SPECIAL: Mapping[str, str] = MappingProxyType(
    {
        "gradient_accumulation_steps": "`--global-batch-size` through micro-batch and ranks, or a check of it",
        "bf16.enabled": "`--bf16`",
        "fp16.enabled": "`--fp16`, with the block's loss scale",
        "fp16.auto_cast": "has no effect: inputs are tokens",
        "fp16.loss_scale": "`--loss-scale`",
        "fp16.initial_scale_power": "n: `--initial-loss-scale` 2^n",
        "fp16.loss_scale_window": "`--loss-scale-window`",
        "fp16.hysteresis": "`--hysteresis`",
        "fp16.min_loss_scale": "`--min-loss-scale`",
        ZERO + "mics_shard_size": "k: `--zero-shard k,k,k`; -1: off",
        ZERO + "zero_hpz_partition_size": "k: `--zero-preset hpz --zero-hpz-partition-size k`; 1: off",
        ZERO
        + "zeropp_loco_param": "`--zero-gradient-rounding feedback`; its err_beta and reset_T are not taken",
        ZERO + "stage3_prefetch_bucket_size": "elements: `--zero-prefetch-bytes` in bytes",
    }
)


def read_deepspeed(path: str) -> Layer:
    """Return a layer of the values that the file sets. Faults are collected in its errors and never raised."""
    layer = Layer(path)
    content = _load(layer, path)
    if content is None:
        return layer
    keys = dict(_flat(layer, content))
    for key, value in keys.items():
        _put(layer, key, value, keys)
    _group(layer, keys)
    if "zero_shard" in layer.values:  # MiCS is a form of stage 3
        layer.values.pop("zero_stage", None)
    return layer


def _flat(layer: Layer, content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each key, with its section's name before it. How fp16 scales its loss is left out where fp16 is off."""
    for written, value in content.items():
        key = OLD_NAMES.get(written, written)
        if key not in SECTIONS:
            yield key, value
        elif isinstance(value, dict):
            silent = FP16_TUNING if key == "fp16" and value.get("enabled", False) is False else ()
            yield from ((f"{key}.{k}", v) for k, v in value.items() if f"{key}.{k}" not in silent)
        elif value not in (None, False):
            layer.errors.append(f"{layer.source}: {written} takes an object, got {value!r}")


def _asks(key: str, value: Any) -> bool:
    """Tell whether a key asks for something, by DeepSpeed's defaults. A block without its switch is off."""
    if not isinstance(value, dict):
        return value not in (False, None)
    if key in ALWAYS_ON:
        return bool(value)
    switch = value.get("device", value.get("enabled"))
    return switch not in (False, None, "none")


def _group(layer: Layer, keys: Mapping[str, Any]) -> None:
    """Write one line for all keys that have one cause."""
    without = [key for key in keys if key in NO_EFFECT]
    if without:
        layer.notes.append(
            f"{layer.source}: no effect here, where it is always so or is decided elsewhere (docs/flags.md): "
            f"{', '.join(without)}"
        )
    causes: dict[str, list[str]] = {}
    for key, value in keys.items():
        if key in UNSUPPORTED and value != "auto" and _asks(key, value):
            causes.setdefault(UNSUPPORTED[key], []).append(key)
    for cure, asked in causes.items():
        verb = "is" if len(asked) == 1 else "are"
        layer.errors.append(f"{layer.source}: {', '.join(asked)} {verb} not supported: {cure}")
    automatic = [key for key, value in keys.items() if value == "auto" and key not in NO_EFFECT]
    if automatic:
        flags = [all_options()[RENAMED[key]].flag for key in automatic if key in RENAMED]
        use = f" and use {', '.join(flags)}" if flags else ""
        layer.errors.append(
            f"{layer.source}: {', '.join(automatic)} cannot be 'auto', which Hugging Face's Trainer fills in: write "
            f"the value, or leave the key out{use}"
        )


def _load(layer: Layer, path: str) -> dict[str, Any] | None:
    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        layer.errors.extend(
            f"{path}: {n} stands there twice" for n in sorted({n for n in names if names.count(n) > 1})
        )
        return dict(pairs)

    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=no_twins)
    except OSError as error:
        layer.errors.append(f"--deepspeed-config {path} cannot be read: {error.strerror or error}")
        return None
    except ValueError as error:
        layer.errors.append(f"--deepspeed-config {path} is not JSON: {error}")
        return None
    if not isinstance(content, dict):
        layer.errors.append(f"--deepspeed-config {path} holds no JSON object")
        return None
    return content


def _put(layer: Layer, key: str, value: Any, keys: Mapping[str, Any]) -> None:
    where = f"{layer.source}: {key}"
    if value == "auto" or key in NO_EFFECT or key in UNSUPPORTED:
        return  # _group
    known = [*RENAMED, *SPECIAL, *ALWAYS, *NO_EFFECT, *UNSUPPORTED]
    if key not in known:
        layer.errors.append(f"{where} is not supported{did_you_mean(key, known)}; leave it out")
    elif value is None:  # as if it were not there
        return
    elif key in RENAMED:
        option = all_options()[RENAMED[key]]
        layer.put(option, _whole(value) if option.kind == "int" else value, where)
    elif key in ALWAYS:
        wanted, text = ALWAYS[key]
        if value == wanted:
            layer.notes.append(f"{where}: {text}")
        else:
            layer.errors.append(
                f"{where} cannot be {value!r}: {text}; leave it out or set {json.dumps(wanted)}"
            )
    else:
        _special(layer, key, _whole(value), keys)


def _whole(value: Any) -> Any:
    """Return whole numbers as JSON files have them, 5e7 and "5e8", as int. Anything else is returned as it is."""
    try:
        number = float(value) if isinstance(value, str | float) else None
    except ValueError:
        return value
    return int(number) if number is not None and number.is_integer() else value


def _special(layer: Layer, key: str, value: Any, keys: Mapping[str, Any]) -> None:
    where = f"{layer.source}: {key}"
    put: Callable[[str, Any], None] = lambda name, v: layer.put(all_options()[name], v, where)  # noqa: E731
    if key.endswith(".enabled"):
        if not isinstance(value, bool):
            layer.errors.append(f"{where} takes true or false, got {value!r}")
        elif value:
            put("params_dtype", key.removesuffix(".enabled"))
            if key == "fp16.enabled":
                _loss_scale(layer, keys)
    elif key in LOSS_SCALE:
        if keys["fp16.enabled"] is not True:  # else they are read with it
            layer.notes.append(f"{where} {show(value)} is left out: fp16.enabled is not true")
    elif key == "fp16.auto_cast":
        layer.notes.append(f"{where} {SPECIAL[key]}")
    elif key.endswith("zeropp_loco_param"):
        _loco(layer, where, value)
    elif not isinstance(value, int) or isinstance(value, bool):
        layer.errors.append(f"{where} takes a whole number, got {value!r}")
    elif key == "gradient_accumulation_steps":
        if value < 1:
            layer.errors.append(f"{where} {value} must be at least 1; nearest: 1")
        layer.values["gradient_accumulation_steps"] = value
    elif key.endswith("mics_shard_size"):
        if value > 0:  # -1, DeepSpeed's default, is off
            put("zero_shard", [value] * 3)
    elif key.endswith("zero_hpz_partition_size"):
        if value != 1:  # 1, DeepSpeed's default, is off
            put("zero_hpz_partition_size", value)
    else:
        width = 2 if True in (keys.get("bf16.enabled"), keys.get("fp16.enabled")) else 4
        layer.notes.append(
            f"{where}: {value} elements of {width} bytes are --zero-prefetch-bytes {value * width}"
        )
        put("zero_prefetch_bytes", value * width)


def _loss_scale(layer: Layer, keys: Mapping[str, Any]) -> None:
    """Take over the whole block about the loss scale, with DeepSpeed's defaults for the keys that it leaves out."""
    for key, (name, default) in LOSS_SCALE.items():
        value, where = keys.get(key, default), f"{layer.source}: {key}"
        if value == "auto":
            value = default
        if key == "fp16.initial_scale_power":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 127:
                layer.errors.append(f"{where} takes a whole number from 0 to 127, got {value!r}")
                continue
            value = 2.0**value
        layer.put(all_options()[name], value, where)
        if name in layer.values:
            layer.final[name] = LOSS_SCALE_DECIDED


def _loco(layer: Layer, where: str, value: Any) -> None:
    if not isinstance(value, dict | None):
        layer.errors.append(f"{where} takes an object, got {value!r}")
    elif value:
        layer.put(all_options()["zero_gradient_rounding"], "feedback", where)
        layer.notes.append(
            f"{where} is --zero-gradient-rounding feedback; err_beta and reset_T are not taken: the whole of a "
            "step's rounding error goes into the next step, none is reset"
        )
