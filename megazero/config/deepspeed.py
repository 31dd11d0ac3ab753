"""--deepspeed-config: DeepSpeed's JSON keys that mean something here; every other key is an error with a cure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megazero.config.fields import show
from megazero.config.layers import Layer
from megazero.config.nearest import did_you_mean
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
# Keys whose only value here is a fact.
ALWAYS: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        ZERO + "overlap_comm": (True, "communication always overlaps"),
        ZERO + "reduce_scatter": (True, "gradients are always reduce-scattered"),
        ZERO + "contiguous_gradients": (True, "gradients always lie in flat buffers"),
        "data_types.grad_accum_dtype": ("fp32", "gradients always accumulate in at least fp32"),
    }
)
# Keys that users have, with what to do instead. False, null and {"device": "none"} ask for nothing: accepted.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        ZERO
        + "zero_quantized_nontrainable_weights": "frozen weights are sent as the others are; leave it out",
        ZERO + "offload_optimizer": OFFLOAD,
        ZERO + "offload_param": OFFLOAD,
        ZERO + "cpu_offload": OFFLOAD,
        ZERO + "reduce_bucket_size": "a module's gradients are one message; leave it out",
        ZERO + "allgather_bucket_size": "a module's parameters are one message; leave it out",
        ZERO + "allgather_partitions": "parameters are always gathered; leave it out",
        ZERO + "stage3_param_persistence_threshold": "units are gathered whole; leave it out",
        ZERO + "stage3_max_live_parameters": "set stage3_prefetch_bucket_size or --zero-prefetch-bytes",
        ZERO + "stage3_max_reuse_distance": "set --zero-params-lifetime",
        ZERO + "sub_group_size": "leave it out",
        ZERO + "mics_hierarchical_params_gather": "gathers always follow the node boundary; leave it out",
        "fp16": 'takes an object, such as {"enabled": true}',
        "fp16.consecutive_hysteresis": "overflows are counted until the scale grows, as in Megatron; leave it out",
        "fp16.fp16_master_weights_and_grads": "master weights and gradients are in at least fp32; leave it out",
        "optimizer": "use --optimizer, --lr, --weight-decay, --adam-beta1, --adam-beta2, --adam-eps",
        "scheduler": "use --lr-decay-style, --lr-warmup-iters",
        "steps_per_print": "use --log-interval",
        "wall_clock_breakdown": "the time bill is always in metrics.jsonl; leave it out",
        "activation_checkpointing": "use --recompute-granularity",
        "tensorboard": "use --tensorboard-dir",
        "wandb": "use --wandb-project",
        "prescale_gradients": "the divisor is applied once; leave it out",
    }
)
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
    """A layer of the values that the file sets. Faults are collected in its errors, never raised."""
    layer = Layer(path)
    content = _load(layer, path)
    if content is None:
        return layer
    keys: dict[str, Any] = {}
    for key, value in content.items():
        if key in SECTIONS and isinstance(value, dict):
            keys.update({f"{key}.{inner}": inner_value for inner, inner_value in value.items()})
        else:
            keys[key] = value
    if keys.get("fp16.enabled", False) is False:  # the tuning keys beside a switched-off fp16 ask for nothing
        keys = {key: value for key, value in keys.items() if not key.startswith("fp16.")}
    for key, value in keys.items():
        _put(layer, key, value, keys)
    if "zero_shard" in layer.values:  # MiCS is a form of stage 3
        layer.values.pop("zero_stage", None)
    return layer


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
    if value == "auto":
        layer.notes.append(f"{where} is auto: our own default or flag decides")
    elif key in RENAMED:
        layer.put(all_options()[RENAMED[key]], value, where)
    elif key in ALWAYS:
        wanted, text = ALWAYS[key]
        if value == wanted:
            layer.notes.append(f"{where}: {text}")
        else:
            layer.errors.append(
                f"{where} cannot be {value!r}: {text}; leave it out or set {json.dumps(wanted)}"
            )
    elif key in UNSUPPORTED:
        if value not in (False, None, {"device": "none"}):
            layer.errors.append(f"{where} is not supported: {UNSUPPORTED[key]}")
    elif key in SPECIAL:
        _special(layer, key, value, keys)
    else:
        known = [*RENAMED, *ALWAYS, *UNSUPPORTED, *SPECIAL]
        layer.errors.append(f"{where} is not supported{did_you_mean(key, known)}; leave it out")


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
    """The whole block's, DeepSpeed's defaults included."""
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
