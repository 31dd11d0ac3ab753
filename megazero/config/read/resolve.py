"""Completes a RunConfig from what the user said, by COMPLETIONS in an order that each of them relies on.

Before them each source's foreign words become options (parse.py: settle), and the sources one layer (sources.py:
merge).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Any

from megazero.config.foreign.derived import DERIVED, EXPERT_TENSORS, MADE_OF, UNFUSED_GELU, complete_derived
from megazero.config.foreign.megatron import accepted_note, unmet_conditions
from megazero.config.layout.shards import DEFAULT_PRESET, IN_NODE, PARTITIONED, STAGE_PRESETS
from megazero.config.layout.wire import (
    OF_BOTH,
    OF_GRADIENTS,
    OF_WEIGHTS,
    PLAIN,
    asked_for,
    few_bits,
    is_plain,
    quantizes_gradients,
)
from megazero.config.layout.wire_rules import may_quantise, message_facts
from megazero.config.model.loaded import take_architecture
from megazero.config.model.section import complete, has_gelu
from megazero.config.options.data_inputs import FILE_OPTIONS, PARTS, tokenizer_type
from megazero.config.options.fields import Resume, section_of, show, stand_in, typed
from megazero.config.options.needs import lacks
from megazero.config.options.optimizers import of_schedule
from megazero.config.options.sections import SINKHORN, TrainingConfig, ZeroConfig
from megazero.config.read.completion import (
    Completed,
    Completion,
    Known,
    Values,
    complete_by,
    section_names,
    set_since,
)
from megazero.config.run import REMOVED, RunConfig, all_options, with_defaults
from megazero.mesh.levels import links_of

TRANSFORM = "zero_gradient_transform"
KEPT_PLAIN = (
    ", so gradients are sent as they were, with a larger error than by today's default; --zero-gradient-transform "
    "hadamard changes to that"
)
ZERO_IS_OFF = ("exit_interval", "exit_duration_in_mins", "save_interval")  # as in Megatron


def resolve(known: Known) -> tuple[RunConfig, Collection[str], Completed]:
    """Return the completed configuration with its notes, the missing options, and what its completions said.

    Missing options must have a value and were neither given nor derived. They get stand-ins, by which nothing may be
    judged. Raises OSError if the storage of a Hugging Face folder or a data file does not answer.
    """
    done = complete_by(COMPLETIONS, known)
    needed = (opt for opt in all_options().values() if opt.needed and opt.name not in done.values)
    missing = {opt.name: stand_in(opt) for opt in needed}
    notes = (*known.said.notes, *accepted_note(known.said.accepted), *done.notes)
    return RunConfig.of({**done.values, **missing}, notes), missing, done


def _loaded(values: Values, known: Known) -> Completed:
    """Take the architecture of the checkpoint or folder of --load."""
    if known.beginning is None or values.get("load") is None:
        return Completed()
    completed, notes, clashes = take_architecture(values, known.beginning)
    loaded = [name for name, value in completed.items() if value is not None and name not in values]
    unread = any(line.startswith(f"--load {values['load']}: ") for line in clashes)
    # What is missing may stand in a folder that cannot be read.
    failed = [name for name in OF_MODEL if name not in completed] if unread else []
    return Completed(set_since(values, completed), notes, clashes, loaded, failed)


def _pattern(values: Values, known: Known) -> Completed:
    """Cut stages where a pattern of layers has bars, as Megatron does."""
    pattern, said = values.get(PATTERN), values.get("pipeline_partition")
    if pattern is None:
        typed = [f"--{flag}" for flag in ("is-hybrid-model", "spec") if flag in known.said.accepted]
        return Completed(
            errors=[f"{flag} needs --hybrid-layer-pattern: which layers there are" for flag in typed]
        )
    if "|" not in pattern:
        return Completed()
    layers = ",".join(str(len(stage)) for stage in pattern.split("|"))
    cut = {PATTERN: pattern.replace("|", ""), "pipeline_partition": layers}
    if said not in (None, layers):
        error = f"--pipeline-partition {said}: bars of --hybrid-layer-pattern {pattern} are {layers}; leave one out"
        return Completed(cut, errors=[error])
    return Completed(cut, [f"the bars of --hybrid-layer-pattern are --pipeline-partition {layers}"])


def _groups(values: Values, known: Known) -> Completed:
    """Note where the model is not that of Megatron, which ignores --num-query-groups by itself.

    Megatron has no --model-family, so a script with it is not Megatron's.
    """
    confirmed, groups = "group-query-attention" in known.said.accepted, values.get("num_query_groups")
    if confirmed and groups is None:
        error = "--group-query-attention needs --num-query-groups: how many key/value heads there are"
        return Completed(errors=[error])
    alike = confirmed or groups in (None, values.get("num_attention_heads"))
    if alike or "model_family" in values:
        return Completed()
    note = (
        f"--num-query-groups {groups} takes effect; Megatron ignores it without --group-query-attention, which "
        "confirms it"
    )
    return Completed(notes=[note])


def _samples_of_all(values: Values, known: Known) -> Completed:
    """With other replicas, take lengths in iterations of one batch for the samples of all replicas."""
    batch = values.get("global_batch_size")
    sizes = ("rampup_batch_size", "step_batch_size_schedule", "train_samples")
    if not (values.get("outer_meet") and values.get("train_iters") and batch) or any(map(values.get, sizes)):
        return Completed()
    given = {name: values[f"{name}_iters"] * batch for name in LENGTHS if values.get(f"{name}_iters")}
    done = {f"{name}_samples": samples for name, samples in given.items()}
    said = ", ".join(typed(all_options()[name], samples) for name, samples in done.items())
    note = f"--outer-meet counts the samples of all replicas: iterations of {batch} are taken as {said}"
    return Completed({**dict.fromkeys(ITERATIONS), **done}, [note])


def _conditions(values: Values, known: Known) -> Completed:
    """Judge the flags of Megatron that change nothing in some models alone."""
    return Completed(errors=unmet_conditions(known.said.conditions, complete(values)))


def _removed(values: Values, known: Known) -> Completed:
    """Note each option of the checkpoint that was removed since."""
    saved = known.saved
    gone = {n: r for n, r in REMOVED.items() if f"{saved.get(n)}".lower() not in ("none", r.off)}
    was = f"{known.path} was trained with"
    return Completed(
        notes=[f"{was} {n} {show(saved[n])}, which was removed: {r.cure}" for n, r in gone.items()]
    )


def _schedule(values: Values, known: Known) -> Completed:
    """At a resume, take the checkpoint's schedule if that is asked for, else note where the flags differ from it."""
    path, use = known.path, values.get("use_checkpoint_opt_param_scheduler")
    if use and (
        override := {"override-lr-scheduler", "override-opt-param-scheduler"} & {*known.said.accepted}
    ):
        error = (
            f"--{override.pop()} and --use-checkpoint-opt-param-scheduler exclude each other; leave one out"
        )
        return Completed(errors=[error])
    before, now = _schedule_of(known.saved), _schedule_of(values)
    changed = [name for name in now if before[name] != now[name]]
    if before["lr"] is None or not changed:  # nothing is continued, or what was imported
        return Completed()
    lengths = [
        f"--train-{'samples' if each.get('train_samples') else 'iters'}" for each in (known.saved, values)
    ]
    if not use:
        note = (
            f"the flags decide the schedule, which is not that of {path}: {_changes(changed, before, now)}. "
            "--use-checkpoint-opt-param-scheduler takes the checkpoint's"
        )
        return Completed(notes=[note])
    if lengths[0] != lengths[1]:
        error = (
            f"--use-checkpoint-opt-param-scheduler: {path} has a schedule by {lengths[0]}, and this run's length is "
            f"{lengths[1]}; nearest: {lengths[0]}, or the flags of the schedule without that flag"
        )
        return Completed(errors=[error])
    said = " ".join(typed(all_options()[n], before[n]) for n in changed if before[n] is not None)
    return Completed(before, [f"--use-checkpoint-opt-param-scheduler: {said}, as in {path}"])


def _changed_update(values: Values, known: Known) -> Completed:
    """Note if a run that goes on has another update, beside its schedule, or another loss than before."""
    saved, now = known.saved, with_defaults(values, UPDATES)
    balanced = [section_of(TrainingConfig, each).balances_micro_batches for each in (saved, values)]
    with_micro = values.get("num_experts") and any(balanced)
    changed = [
        name
        for name in UPDATES
        if name in saved
        and now[name] != saved[name]
        and not lacks(all_options()[name], now)
        and (name != "global_batch_size" or name in values)  # it may be open
        and (name != "micro_batch_size" or with_micro)
    ]
    if not changed:
        return Completed()
    said = _changes(changed, saved, now)
    return Completed(
        notes=[f"the flags decide the update and the loss, which are not those of {known.path}: {said}"]
    )


def _changes(names: Iterable[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return options with their values as they are typed, and as they were."""
    return ", ".join(f"{all_options()[n].flag} {show(now[n])} (was {show(before[n])})" for n in names)


def _formats(values: Values, known: Known) -> Completed:
    """At a resume, take the formats of messages from the checkpoint where the options give none, else note a change.

    A note says what gradients lose that are sent in few bits as they are.
    """
    before, options, path, notes = _formats_of(known.saved), all_options(), known.path, list[str]()
    asked = section_of(ZeroConfig, values)
    planned = may_quantise(asked.zero_preset, values.get("loss_policy"))
    facts = {**message_facts(asked), TRANSFORM: None}
    names = [
        n for n in FORMATS if n not in values and (not lacks(options[n], facts) or planned and n == TRANSFORM)
    ]
    kept = {n: before[n] for n in names if before.get(n) not in (None, options[n].default)}
    now = section_of(ZeroConfig, {**values, **kept})
    plain = few_bits(now) and now.zero_gradient_transform == "none" and (planned or quantizes_gradients(now))
    if kept:
        as_before = f"from {path}: {' '.join(typed(options[n], v) for n, v in kept.items())}"
        notes.append(as_before + KEPT_PLAIN * (plain and TRANSFORM in kept))
    if plain and TRANSFORM not in kept:
        notes.append(PLAIN)
    was = section_of(ZeroConfig, before)
    links = links_of(len(values.get("level_sizes", ())))
    sent = [asked_for(zero, links).gradients for zero in (was, now)]
    if quantizes_gradients(was) and quantizes_gradients(now) and sent[0] != sent[1]:
        names = [n for n in (*OF_GRADIENTS, *OF_BOTH) if getattr(was, n) != getattr(now, n)]
        said = _changes(names, vars(was), vars(now))
        notes.append(f"the flags decide the format of gradients, which is not that of {path}: {said}")
    return Completed(kept, notes, loaded=kept)


def _formats_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a checkpoint, in which plain gradients have their format by its name.

    A checkpoint from before the transform was the default has 'none' whatever it sent, and one from before there was
    a transform nothing.
    """
    none = {TRANSFORM: "none"}
    if is_plain(section_of(ZeroConfig, {**none, **saved})):
        return {**saved, **none}
    return {name: value for name, value in saved.items() if (name, value) not in none.items()}


def _schedule_of(values: Values) -> dict[str, Any]:
    """Return the options of the schedule by name. A decay whose length is not said is as long as the run."""
    found = with_defaults(values, OF_SCHEDULE)
    for unit in ("iters", "samples"):
        found[f"lr_decay_{unit}"] = found[f"lr_decay_{unit}"] or values.get(f"train_{unit}")
    return found


def _gelu(values: Values, known: Known) -> Completed:
    """Set the form of GELU that Megatron computes with --no-bias-gelu-fusion, and note it.

    A form that is given, or that a checkpoint has, stays.
    """
    if not values.get(UNFUSED_GELU):
        return Completed()
    done = dict[str, Any]({UNFUSED_GELU: None})
    if not has_gelu(complete(values)):
        return Completed(done, ["--no-bias-gelu-fusion changes nothing: the MLP has no GELU"])
    if values.get("openai_gelu"):
        why = "GELU is by tanh, as --openai-gelu or the checkpoint says"
        return Completed(done, [f"--no-bias-gelu-fusion changes nothing: {why}"])
    note = "--no-bias-gelu-fusion: GELU is exact (--no-openai-gelu), as in Megatron without that kernel"
    return Completed(done | {"openai_gelu": False}, [note])


def _model(values: Values, known: Known) -> Completed:
    """Set what the family and other sizes of the model decide."""
    return Completed(set_since(values, complete(values)))


def _expert_tensors(values: Values, known: Known) -> Completed:
    """Let the ranks among which Megatron cuts each expert share whole experts."""
    cut, shared = values.get(EXPERT_TENSORS), values.get("expert_model_parallel_size", 1)
    if cut is None:
        return Completed()
    done = dict[str, Any]({EXPERT_TENSORS: None})
    if values.get("num_experts") is None:
        return Completed(done, [f"--expert-tensor-parallel-size {cut} changes nothing: there are no experts"])
    note = (
        f"--expert-tensor-parallel-size {cut} is --expert-model-parallel-size {cut * shared}: as many ranks share "
        "the experts, and each expert lies whole on one"
    )
    return Completed(done | {"expert_model_parallel_size": cut * shared}, [note])


def _sinkhorn(values: Values, known: Known) -> Completed:
    """Set the sigmoids that Megatron's sinkhorn weighs experts by."""
    asked = (
        SINKHORN in values.get("moe_router_load_balancing_type", ()) and (values.get("num_experts") or 0) > 1
    )
    if not asked or "moe_router_score_function" in values:
        return Completed()
    note = "--moe-router-load-balancing-type sinkhorn: --moe-router-score-function sigmoid, as in Megatron"
    return Completed({"moe_router_score_function": "sigmoid"}, [note])


def _saving(values: Values, known: Known) -> Completed:
    """Unset intervals of 0, as in Megatron, and keep one checkpoint beside those that are kept for good."""
    done: dict[str, Any] = {name: None for name in ZERO_IS_OFF if values.get(name) == 0}
    if "save_retain_interval" in values:
        done["save_keep_last"] = values.get("save_keep_last", 1)
    seldom = "save" in values and not values.get("save_interval")
    note = "--save without --save-interval: saved only at the end and at planned stops; a lost rank costs all since"
    return Completed(done, [note] * seldom)


def _tokenizer(values: Values, known: Known) -> Completed:
    """Set Megatron's default, GPT2BPETokenizer, where one of its files is given."""
    said = values.get("tokenizer_type")
    kind = tokenizer_type(said, [name for name in FILE_OPTIONS if name in values])
    if kind is None or said is not None:
        return Completed()
    note = f"--vocab-file, --merge-file: the tokenizer is {kind}, Megatron's default"
    return Completed({"tokenizer_type": kind}, [note])


def _data(values: Values, known: Known) -> Completed:
    """Note that nothing is evaluated where each part but that is named, or a stream, which --split does not cut."""
    given = [name for name in PARTS if values.get(name)] or values.get("data_source") == "stream"
    unseen = given and not values.get("valid_data_path") and values.get("eval_iters") != 0
    note = "no validation data is named: nothing is evaluated while training"
    return Completed(notes=[note] * bool(unseen))


def _zero(values: Values, known: Known) -> Completed:
    """Set zero_preset from whichever of the ZeRO options is given, with an error for each contradiction."""
    notes, errors = list[str](), list[str]()
    stage, preset = values.get("zero_stage"), values.get("zero_preset")
    shard, partition = values.get("zero_shard"), values.get("zero_hpz_partition_size")
    if shard is not None:
        others = ("zero_preset", "zero_stage", "zero_hpz_partition_size")
        given = [all_options()[name].flag for name in others if name in values]
        return Completed(
            errors=[f"--zero-shard {show(shard)} excludes {flag}; leave one out" for flag in given]
        )
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
    return Completed({"zero_preset": preset or DEFAULT_PRESET}, notes, errors)


def _batch(values: Values, known: Known) -> Completed:
    """Set the global batch, or check that the sizes agree if it is given.

    The global batch is micro-batch x data-parallel size (x DeepSpeed's accumulation).
    """
    world, notes, accumulation = known.world, list[str](), values.get(ACCUMULATION)
    done: dict[str, Any] = {ACCUMULATION: None} if accumulation else {}
    micro, batch = values.get("micro_batch_size"), values.get("global_batch_size")
    elastic, kept = values.get("elastic"), known.saved.get("global_batch_size") if batch is None else None
    if kept and elastic:
        done["global_batch_size"] = batch = kept
        notes.append(f"--elastic: the global batch is {kept}, as in the checkpoint")
    ranks = prod(values.get(name, 1) for name in SHARING)
    if world is None or not micro or micro < 1 or ranks < 1 or world.world_size % ranks:
        return Completed(done, notes)
    d = world.world_size // ranks
    wanted = micro * d * (accumulation or 1)
    if batch is None:
        product = f"{wanted} = {micro} x {d} ranks x {accumulation or 1}"
        done["global_batch_size"] = wanted
        if kept in (None, wanted):
            return Completed(done, [*notes, f"global batch {product}"])
        error = (
            f"the global batch would be {product}, but is {kept} in the checkpoint of --load {values['load']}: "
            f"add --global-batch-size {kept} to keep it, as --elastic does, or --global-batch-size {wanted}"
        )
        return Completed(done, notes, [error])
    if accumulation and batch != wanted and elastic:
        notes.append(
            f"--elastic: the global batch of {batch} decides, not gradient_accumulation_steps {accumulation}"
        )
    elif accumulation and batch != wanted:
        error = (
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} x data-parallel size {d} x "
            f"gradient_accumulation_steps {accumulation} = {wanted}; nearest: gradient_accumulation_steps "
            f"{max(1, round(batch / (micro * d)))}"
        )
        return Completed(done, notes, [error])
    return Completed(done, notes)


ACCUMULATION = "gradient_accumulation_steps"  # DeepSpeed's, and no option
LENGTHS = ("train", "lr_decay", "lr_warmup", "lr_wsd_decay")
ITERATIONS, SAMPLES = ([f"{name}_{unit}" for name in LENGTHS] for unit in ("iters", "samples"))
SHARING = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
OF_MODEL = section_names("model")
OF_SCHEDULE = tuple(filter(of_schedule, section_names("optimizer")))
OF_TOKENIZER = ("tokenizer_type", *FILE_OPTIONS)
PRESETTING = ("zero_preset", "zero_stage", "zero_shard", "zero_hpz_partition_size")
ASKING = ("zero_quantized_weights", "zero_quantized_weights_delta", "zero_quantized_gradients")
FORMATS = (*OF_WEIGHTS, *OF_GRADIENTS, *OF_BOTH)
UPDATES = tuple(
    opt.name for opt in all_options().values() if Resume.UPDATE in opt.resume and not of_schedule(opt.name)
)
PATTERN = "hybrid_layer_pattern"
# Of Megatron's words, before and after the model is known.
DERIVED_LENGTHS = Completion(complete_derived, (*DERIVED, *MADE_OF), (*DERIVED, *MADE_OF))
LOADED = Completion(
    _loaded,
    (*OF_MODEL, *OF_TOKENIZER, "load", "finetune", "accept_field", "params_dtype"),
    (*OF_MODEL, *OF_TOKENIZER, "finetune"),
)
CONDITIONS = Completion(_conditions, (*OF_MODEL, "pipeline_model_parallel_size", "fp8_recipe"))
GELU = Completion(_gelu, (*OF_MODEL, UNFUSED_GELU), ("openai_gelu", UNFUSED_GELU))
# The tokenizer and the data come last: they decide nothing else.
COMPLETIONS = (
    DERIVED_LENGTHS,
    Completion(
        _samples_of_all,
        (
            *("outer_meet", "global_batch_size", "rampup_batch_size", "step_batch_size_schedule"),
            *(*ITERATIONS, *SAMPLES),
        ),
        (*ITERATIONS, *SAMPLES),
    ),
    Completion(_pattern, (PATTERN, "pipeline_partition"), (PATTERN, "pipeline_partition")),
    LOADED,
    Completion(_groups, ("num_query_groups", "num_attention_heads", "model_family")),
    CONDITIONS,
    Completion(_removed, ()),
    Completion(
        _schedule,
        (*OF_SCHEDULE, "train_iters", "train_samples", "use_checkpoint_opt_param_scheduler"),
        OF_SCHEDULE,
    ),
    GELU,
    Completion(
        _sinkhorn,
        ("moe_router_load_balancing_type", "moe_router_score_function", "num_experts"),
        ("moe_router_score_function",),
    ),
    Completion(_model, OF_MODEL, OF_MODEL),
    Completion(
        _expert_tensors,
        (EXPERT_TENSORS, "expert_model_parallel_size", "num_experts"),
        (EXPERT_TENSORS, "expert_model_parallel_size"),
    ),
    Completion(_zero, (*PRESETTING, "zero_quantized_gradients", "params_dtype"), ("zero_preset",)),
    Completion(
        _formats,
        (*FORMATS, *ASKING, "zero_preset", "zero_params_lifetime", "loss_policy", "level_sizes"),
        FORMATS,
    ),
    Completion(
        _saving,
        (*ZERO_IS_OFF, "save", "save_retain_interval", "save_keep_last"),
        (*ZERO_IS_OFF, "save_keep_last"),
    ),
    Completion(
        _batch,
        (*SHARING, ACCUMULATION, "elastic", "global_batch_size", "micro_batch_size", "load"),
        (ACCUMULATION, "global_batch_size"),
    ),
    Completion(_changed_update, (*UPDATES, "num_experts")),
    Completion(_tokenizer, OF_TOKENIZER, ("tokenizer_type",)),
    Completion(_data, (*PARTS, "eval_iters")),
)
