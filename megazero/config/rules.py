"""Rules between options, whatever the size of the world. Each yields error lines with the nearest legal choice."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from megazero.config import model_rules, pipeline_rules, wire_rules
from megazero.config.fields import show
from megazero.config.nearest import around, common_divisors, multiples_around
from megazero.config.run import RunConfig

Rule = Callable[[RunConfig], Iterator[str]]


def _ramp(config: RunConfig) -> Iterator[str]:
    ramp, target = config.batch.rampup_batch_size, config.batch.global_batch_size
    assert ramp is not None and target
    if len(ramp) != 3 or min(ramp) < 1:
        yield f"--rampup-batch-size {show(ramp)} must be START INCREMENT SAMPLES, three numbers of at least 1"
        return
    start, increment, _ = ramp
    if start > target:
        yield f"--rampup-batch-size starts at {start}, above --global-batch-size {target}; nearest: {target}"
    elif (target - start) % increment:
        yield (
            f"--rampup-batch-size from {start} in steps of {increment} does not reach --global-batch-size {target}; "
            f"nearest steps: {around(common_divisors(target - start), increment)}"
        )


def _length(config: RunConfig) -> Iterator[str]:
    training, opt = config.training, config.optimizer
    if (training.train_iters is None) == (training.train_samples is None):
        yield "exactly one of --train-iters and --train-samples is required"
        return
    unit = config.lr_span.unit
    other = "samples" if unit == "iterations" else "iters"
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(opt, f"{name}_{other}"):
            right = f"--{name}_{'iters' if other == 'samples' else 'samples'}".replace("_", "-")
            yield (
                f"--{name.replace('_', '-')}-{other} has no meaning where the run's length is in {unit}; use {right}"
            )
    if opt.lr_warmup_fraction is not None and (opt.lr_warmup_iters or opt.lr_warmup_samples):
        yield "--lr-warmup-fraction and a warm-up in iterations or samples exclude each other; leave one out"


def _schedule(config: RunConfig) -> Iterator[str]:
    opt, span = config.optimizer, config.lr_span
    assert opt.lr is not None
    if opt.min_lr > opt.lr:
        yield f"--min-lr {opt.min_lr:g} exceeds --lr {opt.lr:g}; nearest: {opt.lr:g}"
    if span.total and span.warmup >= span.decay:
        yield (
            f"a warm-up of {span.warmup} {span.unit} must be shorter than the decay of {span.decay} that contains "
            f"it; nearest: {max(span.decay - 1, 0)}"
        )
    if opt.lr_decay_style != "WSD" or not span.total:
        return
    room = span.decay - span.warmup
    if not 0 < span.wsd_decay <= room:
        unit = "iters" if span.unit == "iterations" else "samples"
        yield (
            f"--lr-decay-style WSD needs --lr-wsd-decay-{unit} of 1 to {room} (the decay without its warm-up), got "
            f"{span.wsd_decay or 'none'}; nearest: {min(max(span.wsd_decay, 1), max(room, 1))}"
        )


def _data_path(words: tuple[str, ...]) -> Iterator[str]:
    weights, prefixes = words[::2], words[1::2]
    if not any(map(_is_number, words)):
        return
    if len(words) % 2 or not all(map(_is_number, weights)) or any(map(_is_number, prefixes)):
        yield f"--data-path {' '.join(words)} must be PREFIX ... or a weight before every prefix"
        return
    for weight, prefix in zip(weights, prefixes, strict=True):
        if not 0 < float(weight) < math.inf:
            yield f"--data-path weight {weight} of {prefix} must be above 0; leave that data set out instead"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    if bool(data.data_path) == data.mock_data:
        yield "exactly one of --data-path and --mock-data is required"
    yield from _data_path(data.data_path)
    # the same words as megazero.data takes, which is above this floor
    shares = re.fullmatch(r"\s*\d*\.?\d+\s*([,/]\s*\d*\.?\d+\s*){0,2}", data.split)
    if shares is None or not sum(float(share) for share in re.split("[,/]", data.split)):
        yield f"--split {data.split!r} must be up to three shares with a sum above 0; nearest: 969,30,1"
    if data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        yield "--tokenizer-type NullTokenizer needs --vocab-size"
    if data.tokenizer_type in ("SentencePieceTokenizer", "HuggingFaceTokenizer") and not data.tokenizer_model:
        yield f"--tokenizer-type {data.tokenizer_type} needs --tokenizer-model"
    if data.tokenizer_type is None and config.model.vocab_size is None:
        yield "the vocabulary is unknown: give --tokenizer-type and --tokenizer-model, or --vocab-size"


def _retention(config: RunConfig) -> Iterator[str]:
    keep, every = config.checkpoint.save_retain_interval, config.checkpoint.save_interval
    assert keep and every
    if keep % every:
        yield (
            f"--save-retain-interval {keep} is not a multiple of --save-interval {every}; nearest: "
            f"{multiples_around(keep, every)}"
        )


# (options that must be known and legal by themselves, rule)
RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (
        ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        lambda c: model_rules.heads(c.model),
    ),
    (("kv_channels", "position_embedding_type", "rotary_percent"), lambda c: model_rules.rotary(c.model)),
    ((), lambda c: model_rules.mlp(c.model)),
    (
        ("pad_vocab_size_to", "make_vocab_size_divisible_by", "tensor_model_parallel_size"),
        lambda c: model_rules.padded_vocabulary(c.model, c.parallel.tensor_model_parallel_size),
    ),
    (("seq_length", "max_position_embeddings"), lambda c: model_rules.sequence(c.model)),
    (
        (
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
            "seq_length",
            "tensor_model_parallel_size",
        ),
        lambda c: model_rules.tensor_parallel(
            c.model, c.parallel.tensor_model_parallel_size, c.parallel.sequence_parallel
        ),
    ),
    (("pipeline_model_parallel_size", "num_layers"), pipeline_rules.virtual),
    (("pipeline_model_parallel_size", "num_layers"), pipeline_rules.schedule),
    (("pipeline_model_parallel_size", "num_layers"), pipeline_rules.layers_per_stage),
    (("rampup_batch_size", "global_batch_size"), _ramp),
    ((), _length),
    (("lr",), _schedule),
    ((), _data),
    (("save_retain_interval", "save_interval"), _retention),
    (("zero_block_size",), wire_rules.block_size),
    (("zero_quantized_weights_delta",), wire_rules.delta_refresh),
    (("zero_gradient_clip_search",), wire_rules.clip_search),
    (("zero_quantized_gradients_until",), wire_rules.until),
)
