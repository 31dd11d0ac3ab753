"""Completes a RunConfig from what the user said, by COMPLETIONS in an order that each of them relies on.

Before them each source's foreign words become options (parse.py: settle), and the sources one layer (sources.py:
merge).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
from megazero.config.options.data_inputs import FILE_OPTIONS, PARTS, tokenizer_type
from megazero.config.options.fields import section_of, show, stand_in, typed
from megazero.config.options.optimizers import OPTIMIZERS, of_schedule
from megazero.config.options.sections import OuterConfig, TrainingConfig, ZeroConfig
from megazero.config.read.beginning import Beginning
from megazero.config.read.data_files import read_data_files
from megazero.config.read.sources import Layer
from megazero.config.run import REMOVED, RunConfig, World, all_options
from megazero.mesh.levels import links_of

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


@dataclass
class Draft:
    """A configuration on its way.

    values: the options that have a value, by name. loaded: the names of those that --load gave. notes, errors: lines
    for the user. beginning: what the folders of --load and --save say, or None before they are read. path, saved: the
    checkpoint of a run that goes on, and its options by name; None and {} where a new run begins.
    """

    said: Layer
    world: World | None
    beginning: Beginning | None
    values: dict[str, Any]
    notes: list[str]
    errors: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    path: Path | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)

    def update(self, values: Mapping[str, Any]) -> None:
        """Take values by name; None unsets an option."""
        self.values.update(values)
        for name in [name for name, value in values.items() if value is None]:
            del self.values[name]


def resolve(
    said: Layer, world: World | None, beginning: Beginning | None
) -> tuple[RunConfig, Collection[str], Collection[str], list[str]]:
    """Return the completed configuration with its notes, the missing options, those of --load, and error lines.

    beginning: what the folders of --load and --save say, or None before they are read.

    Missing options must have a value and were neither given nor derived. They get stand-ins, by which nothing may be
    judged. Raises OSError if the storage of a Hugging Face folder or a data file does not answer.
    """
    draft = Draft(said, world, beginning, {}, [*said.notes])
    draft.update(said.values)
    for complete_part in COMPLETIONS:
        complete_part(draft)
    needed = (opt for opt in all_options().values() if opt.needed and opt.name not in draft.values)
    missing = {opt.name: stand_in(opt) for opt in needed}
    return RunConfig.of(draft.values | missing, draft.notes), missing, draft.loaded, draft.errors


def _of_megatron(draft: Draft) -> None:
    draft.errors += complete_megatron(draft.said, draft.values, draft.notes)


def complete_megatron(said: Layer, values: dict[str, Any], notes: list[str]) -> list[str]:
    """Turn Megatron's derived values into options, and note flags that change nothing. Returns error lines.

    Whether conditional ones change nothing is judged when the model is known (unmet_conditions).
    """
    notes += accepted_note(said.accepted)
    return complete_derived(values, notes)


def _of_load(draft: Draft) -> None:
    """Take the architecture of the checkpoint or folder of --load, and the options of a run that goes on."""
    if draft.beginning is None:
        return
    said, values = draft.said, draft.values
    completed, notes, clashes = take_architecture(values, draft.beginning)
    draft.loaded += [name for name, v in completed.items() if v is not None and name not in values]
    draft.notes += notes
    draft.errors += clashes
    unread = f"--load {values.get('load')}: "
    if any(line.startswith(unread) for line in clashes):  # it may have what is missing
        model = (opt.name for opt in all_options().values() if opt.section == "model")
        said.failed.update(name for name in model if name not in completed)
    draft.update(completed)
    manifest = draft.beginning.manifest
    if manifest and draft.beginning.goes_on(completed):
        draft.path = draft.beginning.path
        saved = (pair for section in manifest.configuration.values() for pair in section.items())
        draft.saved = {name: _as_now(name, value) for name, value in saved}


def _as_now(name: str, value: Any) -> Any:
    """Return a checkpoint's value: a tuple for a list of JSON, and for one number where several may stand now."""
    option = all_options().get(name)
    several = option is not None and option.kind == "ints" and value is not None
    return tuple(value if isinstance(value, list) else [value]) if several else value


def _of_megatrons_model(draft: Draft) -> None:
    """Judge the flags of Megatron that change nothing in some models, and note where its model is another one.

    Megatron has no --model-family, so a script with it is not Megatron's.
    """
    values, confirmed = draft.values, "group-query-attention" in draft.said.accepted
    groups = values.get("num_query_groups")
    if confirmed and groups is None:
        draft.errors.append(
            "--group-query-attention needs --num-query-groups: how many key/value heads there are"
        )
    alike = confirmed or groups in (None, values.get("num_attention_heads"))
    if not alike and "model_family" not in values:
        draft.notes.append(
            f"--num-query-groups {groups} takes effect; Megatron ignores it without --group-query-attention, which "
            "confirms it"
        )
    draft.errors += unmet_conditions(draft.said.conditions, complete(draft.values))


def _schedule(draft: Draft) -> None:
    """At a resume, take the checkpoint's schedule if that is asked for, else note where the flags differ from it."""
    draft.notes += _removed_since(draft.path, draft.saved)
    values, saved, path = draft.values, draft.saved, draft.path
    use = values.get("use_checkpoint_opt_param_scheduler")
    if use and (
        override := {"override-lr-scheduler", "override-opt-param-scheduler"} & {*draft.said.accepted}
    ):
        draft.errors.append(
            f"--{override.pop()} and --use-checkpoint-opt-param-scheduler exclude each other; leave one out"
        )
        return
    before, now = _schedule_of(saved), _schedule_of(values)
    changed = [name for name in now if before[name] != now[name]]
    if before["lr"] is None or not changed:  # nothing is continued, or what was imported
        return
    lengths = [f"--train-{'samples' if each.get('train_samples') else 'iters'}" for each in (saved, values)]
    if use and lengths[0] != lengths[1]:
        draft.errors.append(
            f"--use-checkpoint-opt-param-scheduler: {path} has a schedule by {lengths[0]}, and this run's length is "
            f"{lengths[1]}; nearest: {lengths[0]}, or the flags of the schedule without that flag"
        )
    elif use:
        draft.update(before)
        said = " ".join(typed(all_options()[n], before[n]) for n in changed if before[n] is not None)
        draft.notes.append(f"--use-checkpoint-opt-param-scheduler: {said}, as in {path}")
    else:
        draft.notes.append(
            f"the flags decide the schedule, which is not that of {path}: {_changes(changed, before, now)}. "
            "--use-checkpoint-opt-param-scheduler takes the checkpoint's"
        )


def _removed_since(path: Path | None, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for each option of the checkpoint that was removed since."""
    for name, removed in REMOVED.items():
        if f"{saved.get(name)}".lower() not in ("none", removed.off):
            yield f"{path} was trained with {name} {show(saved[name])}, which was removed: {removed.cure}"


def _changed_update(draft: Draft) -> None:
    """Note if a run that goes on has another update, beside its schedule, or another loss than before."""
    values, saved = draft.values, draft.saved
    optimizer = OPTIMIZERS.get(_or_default(values, "optimizer"))
    read = [name for name in optimizer.options if not of_schedule(name)] if optimizer else []
    balanced = [section_of(TrainingConfig, each).balances_micro_batches for each in (saved, values)]
    blocks = ["micro_batch_size"] if values.get("num_experts") and any(balanced) else []
    names = [name for name in dict.fromkeys((*read, *OF_UPDATE, *blocks)) if name in saved]
    names = [name for name in names if name != "global_batch_size" or name in values]  # it may be open
    now = {name: _or_default(values, name) for name in names}
    if changed := [name for name in names if now[name] != saved[name]]:
        said = _changes(changed, saved, now)
        draft.notes.append(
            f"the flags decide the update and the loss, which are not those of {draft.path}: {said}"
        )


def _or_default(values: Mapping[str, Any], name: str) -> Any:
    value = values.get(name)
    return all_options()[name].default if value is None else value


def _changes(names: Iterable[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return options with their values as they are typed, and as they were."""
    return ", ".join(f"{all_options()[n].flag} {show(now[n])} (was {show(before[n])})" for n in names)


def _formats(draft: Draft) -> None:
    """At a resume, take the formats of messages from the checkpoint where the options give none, else note a change.

    A note says what gradients lose that are sent in few bits as they are.
    """
    before, options, path = _formats_of(draft.saved), all_options(), draft.path
    asked = section_of(ZeroConfig, draft.values)
    planned = may_quantise(asked.zero_preset, draft.values.get("loss_policy"))
    names = [name for name in format_options(asked) + [TRANSFORM] * planned if name not in draft.values]
    kept = {n: before[n] for n in names if before.get(n) not in (None, options[n].default)}
    draft.loaded += kept
    draft.update(kept)
    now = section_of(ZeroConfig, draft.values)
    plain = few_bits(now) and now.zero_gradient_transform == "none" and (planned or quantizes_gradients(now))
    if kept:
        as_before = f"from {path}: {' '.join(typed(options[n], v) for n, v in kept.items())}"
        draft.notes.append(as_before + KEPT_PLAIN * (plain and TRANSFORM in kept))
    if plain and TRANSFORM not in kept:
        draft.notes.append(PLAIN)
    was = section_of(ZeroConfig, before)
    links = links_of(len(draft.values.get("level_sizes", ())))
    sent = [asked_for(zero, links).gradients for zero in (was, now)]
    if quantizes_gradients(was) and quantizes_gradients(now) and sent[0] != sent[1]:
        names = [n for n in (*OF_GRADIENTS, *OF_BOTH) if getattr(was, n) != getattr(now, n)]
        said = _changes(names, vars(was), vars(now))
        draft.notes.append(f"the flags decide the format of gradients, which is not that of {path}: {said}")


def _outer(draft: Draft) -> None:
    """At a resume, take the outer momentum from the checkpoint where the options give none: what it has summed up is
    by that rule, and the default was 0.9 before 0.3.0."""
    before, now = (section_of(OuterConfig, each) for each in (draft.saved, draft.values))
    if "outer_momentum" in draft.values or not (before.outer_interval and now.outer_interval):
        return
    if before.outer_momentum != now.outer_momentum and not (averages(before) or averages(now)):
        draft.update({"outer_momentum": before.outer_momentum})
        draft.notes.append(f"from {draft.path}: --outer-momentum {before.outer_momentum:g}")


def _formats_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a checkpoint, in which plain gradients have their format by its name.

    A checkpoint from before the transform was the default has 'none' whatever it sent, and one from before there was
    a transform nothing.
    """
    none = {TRANSFORM: "none"}
    if is_plain(section_of(ZeroConfig, {**none, **saved})):
        return {**saved, **none}
    return {name: value for name, value in saved.items() if (name, value) not in none.items()}


def _schedule_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the schedule by name. A decay whose length is not said is as long as the run."""
    named = (
        opt.name for opt in all_options().values() if opt.section == "optimizer" and of_schedule(opt.name)
    )
    found = {name: _or_default(values, name) for name in named}
    for unit in ("iters", "samples"):
        found[f"lr_decay_{unit}"] = found[f"lr_decay_{unit}"] or values.get(f"train_{unit}")
    return found


def _model(draft: Draft) -> None:
    """Set what the family and other sizes of the model decide."""
    draft.notes += unfused_gelu(draft.values)
    draft.values = {name: v for name, v in complete(draft.values).items() if v is not None}


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


def _saving(draft: Draft) -> None:
    """Unset intervals of 0, as in Megatron, and keep one checkpoint beside those that are kept for good."""
    values = draft.values
    draft.update({name: None for name in ZERO_IS_OFF if values.get(name) == 0})
    if "save_retain_interval" in values:
        draft.update({"save_keep_last": values.get("save_keep_last", 1)})
    if "save" in values and "save_interval" not in values:
        draft.notes.append(
            "--save without --save-interval: saved only at the end and at planned stops; a lost rank costs all since"
        )


def _tokenizer(draft: Draft) -> None:
    """Set Megatron's default, GPT2BPETokenizer, where one of its files is given."""
    given = [name for name in FILE_OPTIONS if name in draft.values]
    kind = tokenizer_type(draft.values.get("tokenizer_type"), given)
    if kind and "tokenizer_type" not in draft.values:
        draft.update({"tokenizer_type": kind})
        draft.notes.append(f"--vocab-file, --merge-file: the tokenizer is {kind}, Megatron's default")


def _data(draft: Draft) -> None:
    """Read files with groups of data, and note that nothing is evaluated where each part but that is named."""
    values = draft.values
    draft.errors += read_data_files(values, draft.notes)
    given = [name for name in PARTS if values.get(name)]
    if given and not any(name.startswith("valid") for name in given) and values.get("eval_iters") != 0:
        draft.notes.append("no validation data is named: nothing is evaluated while training")


def _zero(draft: Draft) -> None:
    """Set zero_preset from whichever of the ZeRO options is given, with an error for each contradiction."""
    values, notes, errors = draft.values, draft.notes, draft.errors
    stage, preset = values.get("zero_stage"), values.get("zero_preset")
    shard, partition = values.get("zero_shard"), values.get("zero_hpz_partition_size")
    if shard is not None:
        others = ("zero_preset", "zero_stage", "zero_hpz_partition_size")
        given = [all_options()[name].flag for name in others if name in values]
        errors += [f"--zero-shard {show(shard)} excludes {flag}; leave one out" for flag in given]
        return
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


def _batch(draft: Draft) -> None:
    """Set the global batch, or check that the sizes agree if it is given.

    The global batch is micro-batch x data-parallel size (x DeepSpeed's accumulation).
    """
    values, world, notes = draft.values, draft.world, draft.notes
    accumulation = values.pop("gradient_accumulation_steps", None)
    elastic, kept = values.get("elastic"), None
    if "global_batch_size" not in values:
        kept = draft.saved.get("global_batch_size")
        if kept and elastic:
            values["global_batch_size"] = kept
            notes.append(f"--elastic: the global batch is {kept}, as in the checkpoint")
    micro, batch = values.get("micro_batch_size"), values.get("global_batch_size")
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    ranks = prod(values.get(name, 1) for name in sizes)
    if world is None or not micro or micro < 1 or ranks < 1 or world.world_size % ranks:
        return
    d = world.world_size // ranks
    wanted = micro * d * (accumulation or 1)
    if batch is None:
        values["global_batch_size"] = wanted
        product = f"{wanted} = {micro} x {d} ranks x {accumulation or 1}"
        if kept in (None, wanted):
            notes.append(f"global batch {product}")
            return
        draft.errors.append(
            f"the global batch would be {product}, but is {kept} in the checkpoint of --load {values['load']}: "
            f"add --global-batch-size {kept} to keep it, as --elastic does, or --global-batch-size {wanted}"
        )
    elif accumulation and batch != wanted and elastic:
        notes.append(
            f"--elastic: the global batch of {batch} decides, not gradient_accumulation_steps {accumulation}"
        )
    elif accumulation and batch != wanted:
        draft.errors.append(
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x data-parallel size {d} x "
            f"gradient_accumulation_steps {accumulation} = {wanted}; nearest: gradient_accumulation_steps "
            f"{max(1, round(batch / (micro * d)))}"
        )


# The tokenizer and the data come last: they decide nothing else.
COMPLETIONS: tuple[Callable[[Draft], None], ...] = (
    _of_megatron,
    _of_load,
    _of_megatrons_model,
    _schedule,
    _model,
    _zero,
    _formats,
    _outer,
    _saving,
    _batch,  # needs the parallel sizes
    _changed_update,
    _tokenizer,
    _data,
)
