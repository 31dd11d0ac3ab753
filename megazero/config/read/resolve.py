"""Completes a RunConfig from what the user said, in an order that each step relies on.

1. Each source's foreign words become options (parse.py: settle). Then the sources become one layer (sources.py:
   merge).
2. Megatron's derived values become options (complete_megatron).
3. The checkpoint or folder of --load gives the architecture (take_architecture), by which Megatron's flags are judged
   that change nothing (unmet_conditions), and, to a run that goes on, the schedule (_complete_schedule).
4. The family's defaults and the derived sizes of the model follow (complete).
5. The ZeRO options become one preset or factors (_complete_zero), the formats of a run that goes on follow
   (_complete_formats), then the batch (_complete_batch), which needs the parallel sizes.
6. The tokenizer and the data files come last: they decide nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from megazero.config.foreign.derived import UNFUSED_GELU, complete_derived
from megazero.config.foreign.megatron import accepted_note, unmet_conditions
from megazero.config.layout.outer import averages
from megazero.config.layout.shards import DEFAULT_PRESET, IN_NODE, PARTITIONED, STAGE_PRESETS
from megazero.config.layout.wire import (
    OF_BOTH,
    OF_GRADIENTS,
    PLAIN,
    asked_for,
    few_bits,
    format_options,
    is_plain,
    quantizes_gradients,
)
from megazero.config.layout.wire_rules import may_quantise
from megazero.config.model.loaded import take_architecture
from megazero.config.model.section import complete, has_gelu
from megazero.config.options.data_inputs import FILE_OPTIONS, SPLITS, TOKENIZERS, tokenizer_type
from megazero.config.options.fields import section_of, show, stand_in, typed
from megazero.config.options.optimizers import OPTIMIZERS, of_schedule
from megazero.config.options.sections import OuterConfig, TrainingConfig, ZeroConfig
from megazero.config.read.beginning import Beginning
from megazero.config.read.data_files import read_data_files
from megazero.config.read.sources import Layer
from megazero.config.run import REMOVED, RunConfig, World, all_options

TRANSFORM = "zero_gradient_transform"
KEPT_PLAIN = (
    ", so gradients are sent as they were, with a larger error than by today's default; --zero-gradient-transform "
    "hadamard changes to that"
)
# What beside the optimizer's own options changes a step: its gradients, or what it is trained on.
OF_UPDATE = (
    "optimizer", "clip_grad", "hidden_dropout", "attention_dropout", "z_loss_strength", "params_dtype",
    "seq_length", "global_batch_size", "eod_mask_loss", "reset_attention_mask", "reset_position_ids",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate",
)  # fmt: skip
ZERO_IS_OFF = ("exit_interval", "exit_duration_in_mins", "save_interval")  # as in Megatron


def resolve(
    said: Layer, world: World | None, beginning: Beginning | None
) -> tuple[RunConfig, Collection[str], Collection[str], list[str]]:
    """Return the completed configuration with its notes, the missing options, those of --load, and error lines.

    beginning: what the folders of --load and --save say, or None before they are read.

    Missing options must have a value and were neither given nor derived. They get stand-ins, by which nothing may be
    judged. Raises OSError if the storage of a Hugging Face folder or a data file does not answer.
    """
    values = dict(said.values)
    accumulation = values.pop("gradient_accumulation_steps", None)
    notes, errors = list(said.notes), list[str]()
    errors += complete_megatron(said, values, notes)
    beginning, read = beginning or Beginning(), beginning is not None
    given = values
    values, found, clashes = take_architecture(given, beginning) if read else (given, [], [])
    loaded = [name for name, value in values.items() if value is not None and given.get(name) is None]
    notes, errors = [*notes, *found], [*errors, *clashes]
    unread = values.get("load") and f"--load {values['load']}: "
    if unread and any(line.startswith(unread) for line in clashes):  # it may have what is missing
        said.failed.update(
            o.name for o in all_options().values() if o.section == "model" and o.name not in values
        )
    if "group-query-attention" in said.accepted and values.get("num_query_groups") is None:
        errors.append("--group-query-attention needs --num-query-groups: how many key/value heads there are")
    errors += unmet_conditions(said.conditions, complete(values))
    # The options of the run that goes on, by name; {} where a new one begins.
    stored = beginning.manifest.configuration if beginning.manifest and beginning.goes_on(values) else {}
    saved = {name: value for section in stored.values() for name, value in section.items()}
    goes_on = beginning.path, saved
    notes += _removed_since(*goes_on)
    errors += _complete_schedule(values, said.accepted, *goes_on, notes)
    notes += [*_unlike_megatron(values, said.accepted), *unfused_gelu(values)]
    values = complete(values)
    errors += _complete_zero(values, notes)
    loaded += _complete_formats(values, *goes_on, notes)
    _complete_outer(values, *goes_on, notes)
    values |= {name: None for name in ZERO_IS_OFF if values.get(name) == 0}
    if values.get("save_retain_interval") is not None and values.get("save_keep_last") is None:
        values["save_keep_last"] = 1
    errors += _complete_batch(values, accumulation, world, saved.get("global_batch_size"), notes)
    notes += _changed_update(values, *goes_on)
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        notes.append("--sequence-parallel changes nothing at tensor-parallel size 1")
    if values.get("save") and not values.get("save_interval"):
        notes.append(
            "--save without --save-interval: saved only at the end and at planned stops; a lost rank costs all since"
        )
    notes += _unused_loss_scaling(values)
    notes += _complete_tokenizer(values)
    errors += read_data_files(values, notes)
    notes += _unused_split(values)
    needed = (opt for opt in all_options().values() if opt.needed and values.get(opt.name) is None)
    missing = {opt.name: stand_in(opt) for opt in needed}
    return RunConfig.of(values | missing, notes), missing, loaded, errors


def complete_megatron(said: Layer, values: dict[str, Any], notes: list[str]) -> list[str]:
    """Turn Megatron's derived values into options, and note flags that change nothing. Returns error lines.

    Whether conditional ones change nothing is judged when the model is known (unmet_conditions).
    """
    notes += accepted_note(said.accepted)
    return complete_derived(values, notes)


def _complete_schedule(
    values: dict[str, Any],
    accepted: Collection[str],
    path: Path | None,
    saved: Mapping[str, Any],
    notes: list[str],
) -> list[str]:
    """At a resume, take the checkpoint's schedule if that is asked for, else note where the flags differ from it.

    Returns an error line if the flags ask for both.
    """
    use = values.get("use_checkpoint_opt_param_scheduler")
    if use and (override := {"override-lr-scheduler", "override-opt-param-scheduler"} & {*accepted}):
        return [
            f"--{override.pop()} and --use-checkpoint-opt-param-scheduler exclude each other; leave one out"
        ]
    before, now = _schedule(saved), _schedule(values)
    changed = [name for name in now if before[name] != now[name]]
    if before["lr"] is None or not changed:  # nothing is continued, or what was imported
        return []
    lengths = [f"--train-{'samples' if each.get('train_samples') else 'iters'}" for each in (saved, values)]
    if use and lengths[0] != lengths[1]:
        return [
            f"--use-checkpoint-opt-param-scheduler: {path} has a schedule by {lengths[0]}, and this run's length is "
            f"{lengths[1]}; nearest: {lengths[0]}, or the flags of the schedule without that flag"
        ]
    if use:
        values |= before
        said = " ".join(
            typed(all_options()[name], before[name]) for name in changed if before[name] is not None
        )
        notes.append(f"--use-checkpoint-opt-param-scheduler: {said}, as in {path}")
    else:
        notes.append(
            f"the flags decide the schedule, which is not that of {path}: {_changes(changed, before, now)}. "
            "--use-checkpoint-opt-param-scheduler takes the checkpoint's"
        )
    return []


def _removed_since(path: Path | None, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each option of the checkpoint that was removed since."""
    for name, removed in REMOVED.items():
        if f"{saved.get(name)}".lower() not in ("none", removed.off):
            yield f"{path} was trained with {name} {show(saved[name])}, which was removed: {removed.cure}"


def _changed_update(values: Mapping[str, Any], path: Path | None, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if a run that goes on has another update, beside its schedule, or another loss than before."""
    optimizer = OPTIMIZERS.get(values.get("optimizer") or all_options()["optimizer"].default)
    read = [name for name in optimizer.options if not of_schedule(name)] if optimizer else []
    balanced = [section_of(TrainingConfig, each).balances_micro_batches for each in (saved, values)]
    blocks = ["micro_batch_size"] if values.get("num_experts") and any(balanced) else []
    names = [name for name in dict.fromkeys((*read, *OF_UPDATE, *blocks)) if name in saved]
    names = [name for name in names if name != "global_batch_size" or values.get(name)]  # it may be open
    now = {name: all_options()[name].default if values.get(name) is None else values[name] for name in names}
    if changed := [name for name in names if now[name] != saved[name]]:
        said = _changes(changed, saved, now)
        yield f"the flags decide the update and the loss, which are not those of {path}: {said}"


def _changes(names: Iterable[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return options with their values as they are typed, and as they were."""
    return ", ".join(f"{all_options()[n].flag} {show(now[n])} (was {show(before[n])})" for n in names)


def _complete_formats(
    values: dict[str, Any], path: Path | None, saved: Mapping[str, Any], notes: list[str]
) -> Collection[str]:
    """At a resume, take the formats of messages from the checkpoint where the options give none, else note a change.

    Returns the options that were taken. A note says what gradients lose that are sent in few bits as they are.
    """
    before = _formats(saved)
    options, said = all_options(), {name: value for name, value in values.items() if value is not None}
    asked = section_of(ZeroConfig, said)
    planned = may_quantise(asked.zero_preset, said.get("loss_policy"))
    names = [name for name in format_options(asked) + [TRANSFORM] * planned if name not in said]
    kept = {n: before[n] for n in names if before.get(n) not in (None, options[n].default)}
    values |= kept
    now = section_of(ZeroConfig, kept | said)
    plain = few_bits(now) and now.zero_gradient_transform == "none" and (planned or quantizes_gradients(now))
    if kept:
        as_before = f"from {path}: {' '.join(typed(options[n], v) for n, v in kept.items())}"
        notes.append(as_before + KEPT_PLAIN * (plain and TRANSFORM in kept))
    if plain and TRANSFORM not in kept:
        notes.append(PLAIN)
    notes += _changed_format(section_of(ZeroConfig, before), now, path)
    return kept


def _complete_outer(
    values: dict[str, Any], path: Path | None, saved: Mapping[str, Any], notes: list[str]
) -> None:
    """At a resume, take the outer momentum from the checkpoint where the options give none: what it has summed up is
    by that rule, and the default was 0.9 before 0.3.0."""
    said = {name: value for name, value in values.items() if value is not None}
    before, now = (section_of(OuterConfig, each) for each in (saved, said))
    if "outer_momentum" in said or not (before.outer_interval and now.outer_interval):
        return
    if before.outer_momentum != now.outer_momentum and not (averages(before) or averages(now)):
        values["outer_momentum"] = before.outer_momentum
        notes.append(f"from {path}: --outer-momentum {before.outer_momentum:g}")


def _formats(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a checkpoint, in which plain gradients have their format by its name.

    A checkpoint from before the transform was the default has 'none' whatever it sent, and one from before there was
    a transform nothing.
    """
    none = {TRANSFORM: "none"}
    if is_plain(section_of(ZeroConfig, {**none, **saved})):
        return {**saved, **none}
    return {name: value for name, value in saved.items() if (name, value) not in none.items()}


def _changed_format(was: ZeroConfig, now: ZeroConfig, path: Path | None) -> Iterator[str]:
    """Yield a note if a run that goes on sends its quantised gradients in another format than before."""
    if not (quantizes_gradients(was) and quantizes_gradients(now)):
        return
    formats = [(w.gradients_intra, w.gradients_inter) for w in (asked_for(was), asked_for(now))]
    if formats[0] != formats[1]:
        names = [n for n in (*OF_GRADIENTS, *OF_BOTH) if getattr(was, n) != getattr(now, n)]
        said = _changes(names, vars(was), vars(now))
        yield f"the flags decide the format of gradients, which is not that of {path}: {said}"


def _schedule(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the schedule by name. A decay whose length is not said is as long as the run."""
    named = (opt for opt in all_options().values() if opt.section == "optimizer" and of_schedule(opt.name))
    found = {opt.name: opt.default if values.get(opt.name) is None else values[opt.name] for opt in named}
    for unit in ("iters", "samples"):
        found[f"lr_decay_{unit}"] = found[f"lr_decay_{unit}"] or values.get(f"train_{unit}")
    return found


def _unlike_megatron(said: Mapping[str, Any], accepted: Collection[str]) -> Iterator[str]:
    """Note where Megatron makes another model of the same flags: those without --model-family, which it has not."""
    if said.get("model_family") is not None:
        return
    groups = said.get("num_query_groups")
    if (
        groups is not None
        and "group-query-attention" not in accepted
        and groups != said.get("num_attention_heads")
    ):
        yield (
            f"--num-query-groups {groups} takes effect; Megatron ignores it without --group-query-attention, which "
            "confirms it"
        )


def unfused_gelu(values: dict[str, Any]) -> Iterator[str]:
    """Set the form of GELU that Megatron computes with --no-bias-gelu-fusion, and note it.

    A form that is given, or that a checkpoint has, stays.
    """
    if not values.pop(UNFUSED_GELU, None):
        return
    if not has_gelu(complete(values)):
        yield "--no-bias-gelu-fusion changes nothing: the MLP has no GELU"
    elif values.get("openai_gelu"):
        yield "--no-bias-gelu-fusion changes nothing: GELU is by tanh, as --openai-gelu or the checkpoint says"
    else:
        values["openai_gelu"] = False
        yield "--no-bias-gelu-fusion: GELU is exact (--no-openai-gelu), as in Megatron without that kernel"


def _unused_loss_scaling(values: Mapping[str, Any]) -> list[str]:
    """Return notes on options of a loss scale that does not exist or does not change."""
    unused: tuple[str, ...] = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    if values.get("params_dtype") != "fp16":
        unused, why = ("loss_scale", *unused), "without --fp16: losses are not scaled"
    elif values.get("loss_scale"):
        why = f"with --loss-scale {show(values['loss_scale'])}: the scale is fixed"
    else:
        return []
    given = [all_options()[name].flag for name in unused if values.get(name) is not None]
    return [f"{', '.join(given)} change{'' if len(given) > 1 else 's'} nothing {why}"] if given else []


def _unused_split(values: Mapping[str, Any]) -> list[str]:
    """Return notes where train, validation and test data are named apart."""
    named = [f"{split}_{form}" for form in ("data_path", "weighted_split_paths") for split in SPLITS]
    given = [name for name in named if values.get(name)]
    if not given:
        return []
    notes = ["--split changes nothing where each part's data is named"] if "split" in values else []
    if not any(name.startswith("valid") for name in given) and values.get("eval_iters") != 0:
        notes.append("no validation data is named: nothing is evaluated while training")
    return notes


def _complete_tokenizer(values: dict[str, Any]) -> list[str]:
    """Set Megatron's default, GPT2BPETokenizer, where one of its files is given.

    Returns notes on that, and on files that the tokenizer is not made from.
    """
    files = [name for name in FILE_OPTIONS if values.get(name) is not None]
    notes = []
    said = values.get("tokenizer_type")
    kind = tokenizer_type(said, files) or ""
    if kind and said is None:
        values["tokenizer_type"] = kind
        notes.append(f"--vocab-file, --merge-file: the tokenizer is {kind}, Megatron's default")
    if kind in TOKENIZERS and kind != "NullTokenizer":
        unused = [all_options()[name].flag for name in files if name not in TOKENIZERS[kind]]
        plural = "" if len(unused) > 1 else "s"
        notes += (
            [f"{', '.join(unused)} change{plural} nothing with --tokenizer-type {kind}"] if unused else []
        )
    return notes


def _complete_zero(values: dict[str, Any], notes: list[str]) -> list[str]:
    """Set zero_preset from whichever of the ZeRO options is given. Returns one error line for each contradiction."""
    stage, preset = values.get("zero_stage"), values.get("zero_preset")
    shard, partition = values.get("zero_shard"), values.get("zero_hpz_partition_size")
    errors = []
    if shard is not None:
        given = [
            n for n in ("zero_preset", "zero_stage", "zero_hpz_partition_size") if values.get(n) is not None
        ]
        errors += [
            f"--zero-shard {show(shard)} excludes --{n.replace('_', '-')}; leave one out" for n in given
        ]
        return errors
    if preset is None and partition is not None and stage in (None, 3):
        preset = "hpz"
        notes.append(f"--zero-hpz-partition-size {partition} is preset hpz")
    if partition is not None and preset not in PARTITIONED:
        errors.append(
            f"--zero-hpz-partition-size {partition} needs preset hpz (ZeRO stage 3) or zeropp, not "
            f"{f'preset {preset}' if preset else f'stage {stage}'}; nearest: --zero-preset hpz without --zero-stage"
        )
    if preset == "hpz" and values.get("zero_quantized_gradients"):
        notes.append(
            "preset hpz sends gradients across nodes with every micro-batch; preset zeropp does so once per step"
        )
    if stage is not None and 0 <= stage <= 3:
        own = STAGE_PRESETS[stage]
        legal = (own, *IN_NODE) if stage == 3 else (own,)
        if stage == 0 and preset is None and values.get("params_dtype") == "bf16":
            own = "zero1"
            notes.append(
                "--zero-stage 0 with --bf16 is preset zero1: DeepSpeed's optimizer for bf16 shards its states at "
                "stage 0. --zero-preset ddp keeps full replicas"
            )
        if preset is not None and preset not in legal:
            errors.append(
                f"--zero-stage {stage} is preset {own}, but --zero-preset is {preset}; leave one out: without "
                f"--zero-stage it is {preset}, without --zero-preset {own}"
            )
        preset = preset or own
    values["zero_preset"] = preset or DEFAULT_PRESET
    return errors


def _complete_batch(
    values: dict[str, Any], accumulation: int | None, world: World | None, saved: int | None, notes: list[str]
) -> list[str]:
    """Set the global batch, or check that the sizes agree if it is given. Returns error lines.

    The global batch is micro-batch x data-parallel size (x DeepSpeed's accumulation). saved: that of the checkpoint.
    """
    elastic, kept = values.get("elastic"), None
    if values.get("global_batch_size") is None:
        kept = saved
        if kept and elastic:
            values["global_batch_size"] = kept
            notes.append(f"--elastic: the global batch is {kept}, as in the checkpoint")
    micro, batch = values.get("micro_batch_size"), values.get("global_batch_size")
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    ranks = prod(values.get(name, 1) for name in sizes)
    if world is None or not micro or micro < 1 or ranks < 1 or world.world_size % ranks:
        return []
    d = world.world_size // ranks
    if batch is None:
        values["global_batch_size"] = batch = micro * d * (accumulation or 1)
        product = f"{batch} = {micro} x {d} ranks x {accumulation or 1}"
        if kept not in (None, batch):
            return [
                f"the global batch would be {product}, but is {kept} in the checkpoint of --load {values['load']}: "
                f"add --global-batch-size {kept} to keep it, as --elastic does, or --global-batch-size {batch}"
            ]
        notes.append(f"global batch {product}")
    elif accumulation and batch != micro * d * accumulation and elastic:
        notes.append(
            f"--elastic: the global batch of {batch} decides, not gradient_accumulation_steps {accumulation}"
        )
    elif accumulation and batch != micro * d * accumulation:
        fits = f"; nearest: gradient_accumulation_steps {max(1, round(batch / (micro * d)))}"
        return [
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x data-parallel size {d} x "
            f"gradient_accumulation_steps {accumulation} = {micro * d * accumulation}{fits}"
        ]
    return []
