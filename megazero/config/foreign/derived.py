"""Megatron's lengths in tokens and window, and the width that BLOOM's fork gives to a gated MLP, as options.

With --train-tokens, Megatron-DeepSpeed ends after the first iteration that reaches them, or earlier where
--train-samples or --train-iters ends. Tokens of a schedule replace its samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from megazero.config.options.fields import show, typed
from megazero.config.read.completion import Completed, Known, Values, set_since
from megazero.config.run import all_options
from megazero.config.schedule.batch_sizes import BatchSizes, batch_steps, scheduled_steps

# Decided with the architecture, which a checkpoint may say.
WITH_MODEL = UNFUSED_GELU, EXPERT_TENSORS = ("no_bias_gelu_fusion", "expert_tensor_parallel_size")
UNFUSED_GELU_MEANS = "--no-openai-gelu, where the MLP has GELU and --openai-gelu is not given"
# What megatron.tsv gives values to, and is no option.
DERIVED = (
    "train_tokens",
    "lr_decay_tokens",
    "lr_warmup_tokens",
    "glu_activation",
    "window_size",
    *WITH_MODEL,
)
# The options that they are made of, or replace.
MADE_OF = (
    *("hidden_size", "ffn_hidden_size", "sliding_window", "seq_length", "global_batch_size"),
    *("rampup_batch_size", "step_batch_size_schedule", "lr_warmup_fraction"),
    *(
        f"{name}_{u}"
        for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay")
        for u in ("iters", "samples")
    ),
)


def complete_derived(said: Values, known: Known) -> Completed:
    """Replace the derived values by options."""
    values, notes, errors = dict(said), list[str](), list[str]()
    errors += _last_batch(values)
    derived = {name: values.pop(name, None) for name in DERIVED if name not in WITH_MODEL}
    if derived.pop("glu_activation") and not values.get("ffn_hidden_size") and values.get("hidden_size"):
        values["ffn_hidden_size"] = 4 * values["hidden_size"]
        notes.append(f"--glu-activation: --ffn-hidden-size {values['ffn_hidden_size']}, 4 x hidden")
    if (window := derived.pop("window_size")) is not None:
        errors += _window(values, window, notes)
    errors += _lengths(values, derived, notes)
    return Completed(set_since(said, values), notes, errors)


def _window(values: dict[str, Any], window: tuple[int, ...], notes: list[str]) -> Iterator[str]:
    """Set the window of Megatron's (tokens before, tokens after) a query, of which -1 are all. Yield error lines."""
    typed_window, said = f"--window-size {show(window)}", values.get("sliding_window")
    size = window[0] + 1
    if len(window) != 2 or min(window) < -1 or window[1] > 0:
        yield f"{typed_window} must be tokens before and after a query, and attention is causal; nearest: 127,0"
    elif window[0] == -1:
        notes.append(f"{typed_window} is no window")
    elif said not in (None, size):
        yield f"{typed_window} is --sliding-window {size}, but {said} is given; leave one of them out"
    else:
        values["sliding_window"] = size
        notes.append(f"{typed_window} is --sliding-window {size}, the query's own token included")


def _lengths(values: dict[str, Any], derived: dict[str, Any], notes: list[str]) -> list[str]:
    """Replace lengths in tokens by samples. Returns error lines."""
    tokens: dict[str, int] = {name: count for name, count in derived.items() if count is not None}
    if not tokens:
        return []
    faults = list(_faults(values, tokens))
    if not faults:
        before = dict(values)
        _in_samples(values, tokens)
        told = ", ".join(f"--{name.replace('_', '-')} {count}" for name, count in tokens.items())
        changed = [name for name in values if values[name] is not None and values[name] != before.get(name)]
        means = ", ".join(typed(all_options()[name], values[name]) for name in changed)
        notes.append(f"{told} at --seq-length {values['seq_length']}: {means}")
    return faults


def _faults(values: dict[str, Any], tokens: dict[str, int]) -> Iterator[str]:
    for name, count in tokens.items():
        if count < 1:
            yield f"--{name.replace('_', '-')} {count} must be at least 1"
    if not values.get("seq_length") or values["seq_length"] < 1:
        yield f"--{next(iter(tokens)).replace('_', '-')} needs --seq-length"
    if "train_tokens" in tokens and not values.get("global_batch_size"):
        yield "--train-tokens needs --global-batch-size: the run ends with the batch that reaches them"
    if "lr_warmup_tokens" in tokens and "lr_decay_tokens" not in tokens:
        yield "--lr-warmup-tokens needs --lr-decay-tokens; or use --lr-warmup-samples"
    changes = values.get("rampup_batch_size") or values.get("step_batch_size_schedule")
    if values.get("train_iters") and (changes or not values.get("global_batch_size")):
        yield (
            "lengths in tokens with --train-iters need one --global-batch-size, without --rampup-batch-size and "
            "--step-batch-size-schedule; use --train-samples"
        )


def _last_batch(values: dict[str, Any]) -> Iterator[str]:
    """Set the global batch to the last of a schedule."""
    last, given = None, values.get("global_batch_size")
    with suppress(ValueError):  # reported elsewhere
        last = scheduled_steps(values.get("step_batch_size_schedule", ()), 1)[-1][1]
        values["global_batch_size"] = last
    if last and given not in (None, last):
        yield (
            f"--global-batch-size {given} is not the last of --step-batch-size-schedule, which is {last}; leave one "
            "of them out"
        )


def _sizes(values: dict[str, Any], batch: int) -> BatchSizes:
    """Return the batches up to ``batch``. Steps that are not legal, which is reported elsewhere, are none."""
    schedule, ramp = values.get("step_batch_size_schedule"), values.get("rampup_batch_size")
    with suppress(ValueError):
        return BatchSizes(batch_steps(schedule, ramp, batch, values["seq_length"]), 1, 1)
    return BatchSizes(((0, batch),), 1, 1)


def _in_samples(values: dict[str, Any], tokens: dict[str, int]) -> None:
    """Set the lengths in samples, of whole samples: rounded up for the length of the run, else down."""
    length, batch = values["seq_length"], values.get("global_batch_size") or 1
    if values.get("train_iters"):
        for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay"):
            count = values.pop(f"{name}_iters", None)
            if count is not None and not values.get(f"{name}_samples"):
                values[f"{name}_samples"] = count * batch
    if "train_tokens" in tokens:
        wanted = -(-tokens["train_tokens"] // length)
        given = values.get("train_samples")
        if given and not values.get("lr_decay_samples"):
            values["lr_decay_samples"] = given
        # The run ends with the last whole batch within --train-samples: the one that reaches the tokens.
        end = _sizes(values, batch).reaching(wanted)
        values["train_samples"] = min(given, end) if given else end
    if "lr_decay_tokens" in tokens:
        values["lr_decay_samples"] = max(1, tokens["lr_decay_tokens"] // length)
    if "lr_warmup_tokens" in tokens:
        values["lr_warmup_samples"] = tokens["lr_warmup_tokens"] // length
        values.pop("lr_warmup_fraction", None)
