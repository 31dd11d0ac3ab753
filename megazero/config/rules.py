"""Rules between options that hold whatever the size of the world: RULES.

A rule yields error lines with the nearest legal choice. It may trust every option that it reads (options/fields.py:
guarded). Those of the model, pipelines, messages and outer steps are in files of their own. options/needs.py has what
options need to have an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from megazero.config.errors import ConfigError
from megazero.config.layout import context_rules, outer_rules, pipeline_rules, wire_rules
from megazero.config.layout.shards import AUTO
from megazero.config.model import rules as model_rules
from megazero.config.model.mixers import mixers_of
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import model_spec
from megazero.config.nearest import multiples_around
from megazero.config.options.callback_words import parse_callback
from megazero.config.options.data_inputs import PARTS, TOKENIZERS, parse_data_path, parse_split
from megazero.config.options.data_sources import data_kind
from megazero.config.options.fields import show, typed
from megazero.config.options.optimizers import OPTIMIZERS, SMALL_MOMENTS
from megazero.config.options.sections import BALANCE_LOSSES, SINKHORN
from megazero.config.options.skipping import iteration_ranges
from megazero.config.run import RunConfig, all_options
from megazero.config.schedule.batch_sizes import BatchSizes

Rule = Callable[[RunConfig], Iterator[str]]


def _ramp(config: RunConfig) -> Iterator[str]:
    batch = config.batch
    if batch.step_batch_size_schedule or config.data.data_stages or batch.global_batch_size is not None:
        try:
            BatchSizes.of(config, 1)
        except ValueError as error:
            yield f"{error}"


def _stages(config: RunConfig) -> Iterator[str]:
    """Report stages whose samples are longer than the run's, and those that do not end with a global batch."""
    longest, training = config.model.seq_length, config.training
    with suppress(ValueError):  # reported with the batches
        stages, sizes = config.training_stages, BatchSizes.of(config, 1)
        if (length := max(stage.seq_length for stage in stages)) > longest:
            yield (
                f"--data-stages: seq-length {length} exceeds --seq-length {longest}, which the longest samples have; "
                f"nearest: --seq-length {length}"
            )
        if len(stages) > 1 and config.checkpoint.load is None and config.batch.global_batch_size is not None:
            end = training.train_samples or sizes.consumed_after(training.train_iters or 0)
            yield from sizes.uneven_stages(config, 0, end)


def _length(config: RunConfig) -> Iterator[str]:
    training = config.training
    if (training.train_iters is None) == (training.train_samples is None):
        yield "exactly one of --train-iters and --train-samples is required"


def _units(config: RunConfig) -> Iterator[str]:
    opt, unit = config.optimizer, config.lr_lengths.unit
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
    opt, lengths = config.optimizer, config.lr_lengths
    if opt.min_lr > opt.lr:
        yield f"--min-lr {opt.min_lr:g} exceeds --lr {opt.lr:g}; nearest: {opt.lr:g}"
    if opt.decoupled_lr is not None:
        floor = opt.min_lr if opt.decoupled_min_lr is None else opt.decoupled_min_lr
        if floor > opt.decoupled_lr:
            name = "--min-lr" if opt.decoupled_min_lr is None else "--decoupled-min-lr"
            cure = " or --decoupled-min-lr" if opt.decoupled_min_lr is None else ""
            yield f"{name} {floor:g} exceeds --decoupled-lr {opt.decoupled_lr:g}; nearest: {opt.decoupled_lr:g}{cure}"
    if opt.lr_warmup_init > opt.lr:
        yield f"--lr-warmup-init {opt.lr_warmup_init:g} exceeds --lr {opt.lr:g}; nearest: {opt.lr:g}"
    if lengths.total and lengths.warmup >= lengths.decay:
        yield (
            f"a warm-up of {lengths.warmup:.15g} {lengths.unit} must be shorter than the decay of {lengths.decay} "
            f"that contains it; nearest: {max(lengths.decay - 1, 0)}"
        )
    if opt.lr_decay_style == "WSD" and lengths.total and not lengths.wsd_decay:
        unit = "iters" if lengths.unit == "iterations" else "samples"
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of its last phase"


def _experts(config: RunConfig) -> Iterator[str]:
    """Report what is not built together with experts."""
    parallel = config.parallel
    yield from _dispatch(config)
    if config.model.num_experts is None:
        return
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield (
            f"--num-experts with --tensor-model-parallel-size {parallel.tensor_model_parallel_size} needs "
            "--sequence-parallel: without it every rank would compute the experts of all tokens"
        )


def _balance(config: RunConfig) -> Iterator[str]:
    """Report losses of experts that do not go together, and routers that sinkhorn is not built with."""
    model, kinds = config.model, config.training.moe_router_load_balancing_type
    weights, said = config.training.moe_aux_loss_coeff, f"--moe-router-load-balancing-type {show(kinds)}"
    if len(set(kinds)) < len(kinds):
        yield f"{said} names a loss twice; nearest: {show(tuple(dict.fromkeys(kinds)))}"
    elif len(kinds) > 1 and not {*kinds} <= {*BALANCE_LOSSES}:
        yield f"{said}: {SINKHORN} and none stand alone; nearest: {show(kinds[:1])}"
    elif len(weights) != len(kinds):
        near = show((*weights, *weights[-1:] * len(kinds))[: len(kinds)])
        yield f"{said} needs a weight for each loss, got --moe-aux-loss-coeff {show(weights)}; nearest: {near}"
    if not config.training.sinkhorn or model.num_experts is None:
        return
    if model.moe_router_topk != 1 or model.moe_router_score_function != "sigmoid":
        yield f"{said} needs --moe-router-topk 1 and --moe-router-score-function sigmoid"
    for name in ("moe_router_enable_expert_bias", "moe_router_group_topk", "moe_router_topk_scaling_factor"):
        if getattr(model, name):
            yield f"{said} does not take --{name.replace('_', '-')}, which Megatron ignores with it; leave it out"


def _fp8(config: RunConfig) -> Iterator[str]:
    """Report products in fp8 of which the model has none."""
    least = config.precision.fp8_least
    if least is None or any(line for rule in model_rules.RULES for line in rule(config.model)):
        return
    layers = model_spec(config.model).layers
    if not any(layer.in_fp8(least).matrices for layer in layers):
        largest = max((min(p.shape) for layer in layers for p in layer.linears), default=None)
        near = "no --fp8-format, which is bf16" if largest is None else largest
        yield f"--fp8-min-size {least}: no matrix of the layers that fp8 takes is as large; nearest: {near}"


def fp8_share(config: RunConfig) -> Iterator[str]:
    """Say how much is multiplied in fp8."""
    if (least := config.precision.fp8_least) is None:
        return
    spec = model_spec(config.model)
    large = sum(len(layer.places) * layer.in_fp8(least).matrices for layer in spec.layers)
    slow = "" if config.training.compile else "; --compile joins the conversions to fp8, which else take long"
    yield (
        f"{large / spec.multiply_adds:.0%} of the layers' multiply-adds are in fp8; head, embedding, router, "
        f"experts and latent attention multiply in bf16{slow}"
    )


def idle_router(config: RunConfig) -> Iterator[str]:
    """Say of a router that learns nothing from the model's loss that no other loss teaches it either."""
    model, training = config.model, config.training
    balanced = bool(training.balance_weights)
    softmax = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    if model.num_experts is not None and model.moe_router_topk == 1 and softmax and not balanced:
        yield (
            "--moe-router-topk 1 needs --moe-router-pre-softmax, or --moe-aux-loss-coeff above 0 for a model that is "
            "published so: the softmax of one chosen score is always 1, which the router cannot learn from"
        )


def _idle_router_of_new_model(config: RunConfig) -> Iterator[str]:
    """Report such a router, but not of a model that --load names: it is computed as published, and a note says so."""
    if config.checkpoint.load is None:
        yield from idle_router(config)


def _dispatch(config: RunConfig) -> Iterator[str]:
    """Report rows that are too short for the way across nodes."""
    hidden = config.model.hidden_size
    if config.parallel.moe_dispatch_across_nodes == "int8" and hidden % wire_rules.LEAST_BLOCK:
        near = multiples_around(hidden, wire_rules.LEAST_BLOCK)
        yield (
            f"--moe-dispatch-across-nodes int8 with --hidden-size {hidden}: a row is whole blocks of at least "
            f"{wire_rules.LEAST_BLOCK} elements, which share a scale; nearest: --hidden-size {near}, or exact"
        )


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.goldfish_loss and (h := data.goldfish_h) > (length := config.model.seq_length):
        yield f"--goldfish-h {h} is longer than --seq-length {length}, so nothing is left out; nearest: {length}"
    readers: dict[str, Callable[[Any], object]] = {"split": parse_split}
    readers |= dict.fromkeys(("data_path", *PARTS), parse_data_path)
    for name, read in readers.items():
        try:
            read(getattr(data, name))
        except ValueError as error:
            yield f"{all_options()[name].flag} {error}"
    for source in TOKENIZERS.get(data.tokenizer_type or "", ()):
        if config.get(source) in (None, ""):
            yield f"--tokenizer-type {data.tokenizer_type} needs {all_options()[source].flag}"


def _fragments(config: RunConfig) -> Iterator[str]:
    """Report files of documents that are to be cut with no probability."""
    if config.data.fim_split_sample is not None and config.data.fim_fragment_rate is None:
        yield "--fim-split-sample needs --fim-fragment-rate, the probability of a file to be cut"


def _vocabulary(config: RunConfig) -> Iterator[str]:
    if config.data.tokenizer_type is None and config.model.vocab_size is None:
        yield "the vocabulary is unknown: give --tokenizer-type and --tokenizer-model, or --vocab-size"


def _compiled(config: RunConfig) -> Iterator[str]:
    if config.training.compile and config.model.attention_dropout:
        yield (
            f"--compile does not take --attention-dropout {config.model.attention_dropout:g}, whose masks torch's "
            "attention draws from a generator; nearest: --attention-dropout 0"
        )


def _largest_scores(config: RunConfig) -> Iterator[str]:
    """Report runs whose largest scores are not found, and norms that undo what scales queries and keys."""
    flags = {"--qk-clip": config.optimizer.qk_clip}
    flags["--log-max-attention-logit"] = config.logging.log_max_attention_logit
    mixers = mixers_of(config.model)
    for flag in (flag for flag, given in flags.items() if given):
        if config.training.compile:
            yield f"{flag} with --compile: compiled layers tell nobody their scores; leave one of them out"
        if all(mixer.heads is None for mixer in mixers):
            yield f"{flag}: no layer has attention; leave it out"
    if config.optimizer.qk_clip and any(
        "attention.k_norm.weight" in {p.name for p in mixer.parameters()} for mixer in mixers
    ):
        yield (
            f"--qk-clip with --qk-norm {config.model.qk_norm}: norms of queries and keys undo what scales them, and "
            "bound scores themselves; leave one of them out"
        )


def _loss_scale(config: RunConfig) -> Iterator[str]:
    precision = config.precision
    least, first = precision.min_loss_scale, precision.initial_loss_scale
    if precision.params_dtype == "fp16" and not precision.loss_scale and least > first:
        yield f"--min-loss-scale {least:g} exceeds --initial-loss-scale {first:g}; nearest: {first:g}"


def _implementations(config: RunConfig) -> Iterator[str]:
    """Report an implementation of the update that lacks what is asked of it."""
    chosen, optimizer = config.training.optimizer_impl, config.optimizer.optimizer
    if chosen not in OPTIMIZERS[optimizer].factories:
        having = " and ".join(name for name, each in OPTIMIZERS.items() if chosen in each.factories)
        yield f"--optimizer-impl {chosen} has no {optimizer}, only {having}; nearest: auto"
    if chosen not in SMALL_MOMENTS:
        for name in config.optimizer.moments_in("bf16"):
            given = typed(all_options()[name], config.get(name))
            yield f"--optimizer-impl {chosen} keeps moments in fp32, and {given} is given; nearest: auto"


def _retention(config: RunConfig) -> Iterator[str]:
    every, chosen = config.checkpoint.save_interval, config.checkpoint.save_retain_interval
    if chosen and every and chosen % every:
        yield (
            f"--save-retain-interval {chosen} is not a multiple of --save-interval {every}; nearest: "
            f"{multiples_around(chosen, every)}"
        )


def _tasks(config: RunConfig) -> Iterator[str]:
    every, tasks = config.training.eval_interval, config.training.eval_tasks_interval
    if tasks and every and tasks % every:
        yield (
            f"--eval-tasks-interval {tasks} is not a multiple of --eval-interval {every}; nearest: "
            f"{multiples_around(tasks, every)}"
        )


def _profiled_steps(config: RunConfig) -> Iterator[str]:
    start, end = config.profiling.profile_step_start, config.profiling.profile_step_end
    if end <= start:
        yield f"--profile-step-end {end} must be above --profile-step-start {start}; nearest: {start + 1}"
    for rank in config.profiling.profile_ranks:
        if rank < 0:
            yield f"--profile-ranks {rank} must be at least 0; nearest: 0"


def _skipped_ranges(config: RunConfig) -> Iterator[str]:
    """Report words of --skip-train-iteration-range that are no iterations."""
    try:
        iteration_ranges(config.skipping.skip_train_iteration_range)
    except ValueError as error:
        yield f"--skip-train-iteration-range {error}"


def _missing_checkpoint(config: RunConfig) -> Iterator[str]:
    if config.checkpoint.allow_fresh_start and config.checkpoint.exit_on_missing_checkpoint:
        yield "--allow-fresh-start contradicts --exit-on-missing-checkpoint; leave one of them out"


def _planned(config: RunConfig) -> Iterator[str]:
    if config.planning.cluster is not None:
        from megazero.config.options.cluster import load_cluster  # only where a run names one

        try:
            load_cluster(config.planning.cluster)
        except ConfigError as error:
            yield from error.errors
    elif config.zero.zero_preset == AUTO:
        yield (
            "--zero-preset auto needs --cluster FILE, the cluster by which the planner chooses (megazero plan --help "
            "lists those that come with it); without one: --zero-preset zero1"
        )


def _loss_chunk(config: RunConfig) -> Iterator[str]:
    if config.training.loss_chunk_tokens == AUTO and config.precision.params_dtype == "fp64":
        yield "--loss-chunk-tokens auto: the planner does not know fp64; give a number of tokens, 1024 say"


def _outer_policy(config: RunConfig) -> Iterator[str]:
    if config.planning.loss_policy == "outer":
        yield (
            "--loss-policy outer is for megazero plan, which proposes outer steps: give a run the flags of its "
            "answer; nearest: --loss-policy exact"
        )


def _callbacks(config: RunConfig) -> Iterator[str]:
    """Report words that name no class. Whether it is there is seen when the run starts."""
    for word in config.logging.callbacks:
        try:
            parse_callback(word)
        except ValueError as error:
            yield f"--callbacks {error}"


def _attention(config: RunConfig) -> Iterator[str]:
    yield from context_rules.backend(config, config.context_levels(None)[1])


def at_each_length(rule: Callable[..., Iterator[str]]) -> Callable[..., Iterator[str]]:
    """Return the rule as it judges the samples of stages, too, that have another length than the run's."""

    def judged(config: RunConfig, *of: Any) -> Iterator[str]:
        told = list[str]()
        for line in rule(config, *of):  # not a list of it: the lines before what is not judged count
            told.append(line)
            yield line
        with suppress(ValueError):  # stages that are none are reported elsewhere
            for length in {stage.seq_length for stage in config.training_stages} - {config.model.seq_length}:
                lines = (line for line in rule(config.at_length(length), *of) if line not in told)
                yield from (f"--data-stages: {line}" for line in lines)

    return judged


def _of_model(rule: Callable[[ModelConfig], Iterator[str]]) -> Rule:
    return lambda config: rule(config.model)


RULES: tuple[Rule, ...] = (
    *map(_of_model, model_rules.RULES),
    lambda c: model_rules.padded_vocabulary(c.model, c.parallel.tensor_model_parallel_size),
    _of_model(model_rules.sequence),
    at_each_length(
        lambda c: model_rules.tensor_parallel(
            c.model, c.parallel.tensor_model_parallel_size, c.parallel.sequence_parallel
        )
    ),
    context_rules.mechanism,
    context_rules.order,
    at_each_length(context_rules.shares),
    pipeline_rules.virtual,
    pipeline_rules.schedule,
    pipeline_rules.layers_per_stage,
    _ramp,
    _stages,
    _length,
    _units,
    _schedule,
    _experts,
    _balance,
    _idle_router_of_new_model,
    lambda c: data_kind(c.data).faults(c.data),
    _data,
    _fragments,
    _vocabulary,
    _profiled_steps,
    at_each_length(_attention),
    _compiled,
    _largest_scores,
    _loss_scale,
    _fp8,
    _implementations,
    _retention,
    _tasks,
    _missing_checkpoint,
    _skipped_ranges,
    _planned,
    _loss_chunk,
    _outer_policy,
    _callbacks,
    outer_rules.meets,
    lambda c: wire_rules.legal_block(c.zero),
    wire_rules.links_have_bits,
    wire_rules.delta_refresh,
)
