"""One pass over a configuration reports every error at once: the value, the rule, the nearest legal choice.

Of options that another option makes meaningless, megazero's own are errors. Megatron's are notes, since its scripts
give them and Megatron ignores them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from megazero.config.layout.batch_sizes import BatchSizeRampup
from megazero.config.layout.outer import EXACT_BITS, averages, last_arrival
from megazero.config.layout.pipeline_rules import OF_PIPELINES
from megazero.config.layout.shards import AUTO, resolve_shards
from megazero.config.layout.wire import quantizes_gradients
from megazero.config.layout.wire_rules import message_conditions
from megazero.config.model.published import is_published
from megazero.config.model.rules import conditions
from megazero.config.options.fields import Condition, fault, without_effect
from megazero.config.options.optimizers import optimizer_conditions
from megazero.config.options.sections import INDUCTOR, OuterConfig, ZeroConfig
from megazero.config.rules import RULES, batch_multiples
from megazero.config.run import RunConfig, World, all_options
from megazero.families import FAMILIES


def find_errors(
    config: RunConfig, world: World | None, skip: Collection[str] = (), missing: Collection[str] = ()
) -> list[str]:
    """Return all error lines. Nothing is judged by an option in ``skip``, which has been reported, or ``missing``."""
    broken, errors = set(skip), []
    for opt in all_options().values():
        value = None if opt.name in missing else config.get(opt.name)
        if broken.intersection(DERIVED_FROM.get(opt.name, ())):
            broken.add(opt.name)
        if opt.name not in broken and (error := fault(opt, value)):
            errors.append(error)
            broken.add(opt.name)
    broken.update(missing)
    for reads, rule in RULES:
        if not broken.intersection(reads):
            errors += rule(config)
    errors += [line for name, line in _without_effect(config, broken) if _own(name)]
    if world is not None:
        errors += _layout(config, world, broken)
    if not config.knows_nodes(world) and config.zero.zero_shard:
        errors += _shard_chain(config.zero, config.zero.zero_shard)
    return errors


def ignored(config: RunConfig) -> list[str]:
    """Return notes on Megatron's options that were changed although another option makes them meaningless."""
    return [line.split("; leave it out")[0] for name, line in _without_effect(config, ()) if not _own(name)]


def on_outer_steps(config: RunConfig) -> list[str]:
    """Return notes on what outer steps leave out: of the run's end, and of what replicas learn."""
    outer = config.outer
    notes = _last_meeting(config)
    if outer.outer_interval and outer.outer_delay and outer.outer_mixing == 1:
        notes.append(
            f"--outer-mixing 1 with --outer-delay {outer.outer_delay}: what replicas learn while a fragment is on "
            "its way is dropped when it arrives; published: --outer-mixing 0.5"
        )
    return notes


def _last_meeting(config: RunConfig) -> list[str]:
    """Return a note if outer replicas do not meet at the run's end: the anchor then lacks the last steps."""
    training, outer = config.training, config.outer
    steps, said = training.train_iters, f"--train-iters {training.train_iters}"
    length: Callable[[int], int] = int
    if outer.outer_interval and training.train_samples is not None and config.batch.global_batch_size:
        sizes = BatchSizeRampup.of(config, 1)
        steps, length = sizes.iterations_within(training.train_samples), sizes.consumed_after
        said = f"--train-samples {training.train_samples}, {steps} steps"
    if not outer.outer_interval or not steps:
        return []
    last = last_arrival(steps, outer)
    if last == steps:
        return []
    following = last_arrival(steps + outer.outer_interval, outer)
    nearest = " or ".join(str(length(at)) for at in (last, following) if at)
    return [
        f"{said}: outer replicas meet last at {last}, and that anchor is evaluated and exported at the end; nearest: "
        f"{nearest}"
    ]


def _own(name: str) -> bool:
    """Tell whether an option is megazero's own, so that no script of Megatron's gives it."""
    return name.startswith(("zero_", "outer_", "spike_", "compile_")) or name in OWN


# What may follow from options that are not legal; where it was said itself, it is judged when these are right.
DERIVED_FROM = {
    "ffn_hidden_size": ("hidden_size",),
    "kv_channels": ("hidden_size", "num_attention_heads"),
    "num_query_groups": ("num_attention_heads",),
    "max_position_embeddings": ("seq_length",),
}
OWN = ("allow_fresh_start", "accept_field", "save_hf", "rollback_on_spike", "max_rollbacks")
# What the arrangement of ranks follows from.
LAYOUT = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "ranks_per_node"),
    *("outer_interval", "outer_replicas"),
}
_SAVES = "--save and --save-interval"


def _without_effect(config: RunConfig, broken: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield options that were changed although another option makes them meaningless, with a line that says it."""
    table = (
        *conditions(config.model),
        *optimizer_conditions(config.optimizer.optimizer),
        *_conditions_of_training(config),
        *_conditions_of_files(config),
        *_conditions_of_messages(config),
        *_conditions_of_outer_steps(config),
    )
    family = FAMILIES.get(config.model.model_family)
    defaults = family.defaults if family else {}
    yield from without_effect(table, all_options(), config.values(), defaults, broken)


def _conditions_of_training(config: RunConfig) -> Iterator[Condition]:
    """Yield what the schedule, data, evaluation and pipeline options need."""
    opt = config.optimizer
    wsd = [name for name in all_options() if name.startswith("lr_wsd_")]
    decaying = ("min_lr", "decoupled_min_lr", "lr_decay_iters", "lr_decay_samples")
    # ALiBi's distances are those within a document wherever attention stays in it.
    positions = config.model.position_embedding_type != "alibi" or config.data.reset_attention_mask
    tokenized = config.data.tokenizer_type not in (None, "NullTokenizer")
    pipelines = config.parallel.pipeline_model_parallel_size > 1
    grows = bool(config.batch.rampup_seq_length or config.batch.seq_length_steps)
    yield ["rampup_seq_length_root"], bool(config.batch.rampup_seq_length), "--rampup-seq-length"
    yield ["lr_by_tokens"], grows, "--rampup-seq-length or --seq-length-steps"
    yield wsd, opt.lr_decay_style == "WSD", "--lr-decay-style WSD"
    yield decaying, opt.lr_decay_style != "constant", "a --lr-decay-style that decays"
    yield ["decoupled_min_lr"], opt.decoupled_lr is not None, "--decoupled-lr"
    yield ["reset_position_ids"], positions, "--reset-attention-mask, or positions other than ALiBi"
    yield ["data_cache_path"], not config.data.mock_data, "--data-path instead of --mock-data"
    yield ["tokenizer_model", "vocab_file", "merge_file"], tokenized, "--tokenizer-type"
    yield ["eval_interval", "eval_at_start"], config.training.eval_iters > 0, "--eval-iters above 0"
    yield ["compile_backend"], config.training.compile, "--compile"
    inductor = config.training.compile and config.training.compile_backend == INDUCTOR
    yield ["compile_cache"], inductor, "--compile with inductor"
    yield list(OF_PIPELINES), pipelines, "--pipeline-model-parallel-size above 1"


def _conditions_of_files(config: RunConfig) -> Iterator[Condition]:
    """Yield what the options of checkpoints, profiles and loggers need."""
    files, published = config.checkpoint, is_published(config.checkpoint.load)
    kept = ["save_retain_interval", "save_keep_last"]
    profile, wandb = config.profiling.profile, config.logging.wandb_project is not None
    copies = ["save_copy_interval", "save_copy_keep_last"]
    of_save = ["save_interval", "save_hf", "async_save", "save_retry_minutes", "save_copy", *kept]
    yield of_save, files.save is not None, "--save"
    yield [*kept, "async_save", copies[0]], files.save_interval is not None, "--save-interval"
    yield copies, files.save_copy is not None, "--save-copy"
    loading = ["allow_fresh_start", "finetune", "load_optim", "load_rng"]
    yield [*loading, "use_checkpoint_opt_param_scheduler"], files.load is not None, "--load"
    yield ["allow_fresh_start", "exit_on_missing_checkpoint"], not published, "--load of a checkpoint"
    yield ["accept_field"], published, "--load hf:DIR"
    rollback = config.skipping.rollback_on_spike
    of_rollback = ["max_rollbacks", *(name for name in all_options() if name.startswith("spike_"))]
    yield ["rollback_on_spike"], files.save is not None and files.save_interval is not None, _SAVES
    yield of_rollback, rollback, "--rollback-on-spike"
    continuing = ["load_optim", "load_rng", "use_checkpoint_opt_param_scheduler"]
    yield continuing, not files.finetune, "continuing the run (no --finetune)"
    yield ["profile_step_start", "profile_step_end", "profile_ranks"], profile, "--profile"
    yield ["wandb_entity", "wandb_exp_name", "wandb_save_dir"], wandb, "--wandb-project"


def _conditions_of_messages(config: RunConfig) -> Iterator[Condition]:
    """Yield what the options of quantised messages need."""
    planned = config.zero.zero_preset == AUTO and config.planning.loss_policy != "exact"
    yield from message_conditions(config.zero, planned)
    gradients = quantizes_gradients(config.zero) or planned
    yield ["zero_quantized_gradients_until"], gradients, "--zero-quantized-gradients"


def _conditions_of_outer_steps(config: RunConfig) -> Iterator[Condition]:
    """Yield what the options of outer steps need."""
    others = [
        name for name, opt in all_options().items() if opt.section == "outer" and name != "outer_interval"
    ]
    steps = config.outer.outer_interval > 0
    yield others, steps, "--outer-interval above 0"
    if steps:
        optimizer = not averages(config.outer)
        yield ["outer_lr", "outer_momentum"], optimizer, "--outer-optimizer nesterov or sgd"
        yield ["outer_rounding"], config.outer.outer_bits < EXACT_BITS, f"--outer-bits below {EXACT_BITS}"
        yield ["outer_fragment_pattern"], config.outer.outer_fragments > 1, "--outer-fragments above 1"


def _shard_chain(zero: ZeroConfig, shard: tuple[int, ...]) -> Iterator[str]:
    """Check the shards without a world: with d = OS and h = 1, only P | G | OS and the lifetime are left to check."""
    try:
        resolve_shards(
            shard, max(shard[-1], 1), 1, zero.zero_params_lifetime, gradients=zero.zero_gradients_lifetime
        )
    except ValueError as error:
        yield str(error)


def uneven_ranks(config: RunConfig, world: World) -> list[str]:
    """Return the error line of ranks that do not divide by the parallel sizes, or whose groups straddle nodes."""
    known = config.knows_nodes(world)
    try:
        if known:
            config.data_ranks_per_node(world)
        else:
            apart = replace(config, outer=OuterConfig())  # replicas are groups of nodes
            apart.data_ranks_per_node(World(world.world_size, world.world_size))
    except ValueError as error:
        return [str(error)]
    return []


def _layout(config: RunConfig, world: World, broken: Collection[str]) -> Iterator[str]:
    """Check the rules over the size of the world: profiled ranks, nodes, shards, batch.

    Where nodes are not known yet, only the rules that hold for any nodes are checked.
    """
    for rank in () if "profile_ranks" in broken else config.profiling.profile_ranks:
        if rank >= world.world_size:
            yield (
                f"--profile-ranks {rank} is not one of the {world.world_size} ranks; nearest: {world.world_size - 1}"
            )
    if LAYOUT & set(broken):
        return
    uneven = uneven_ranks(config, world)
    yield from uneven
    if uneven:
        return
    of_slices = {opt.name for opt in all_options().values() if opt.section in ("zero", "optimizer")}
    if config.knows_nodes(world) and not of_slices & set(broken):
        try:
            if config.wire(world).delta and config.outer_replicas(world) > 1:
                yield (
                    "--outer-interval does not take changes of weights between a replica's nodes: evaluations would "
                    "see the anchor through their rounding; nearest: --no-zero-quantized-weights-delta"
                )
        except ValueError as error:
            yield str(error)
    if not {"micro_batch_size", "global_batch_size", "rampup_batch_size"} & set(broken):
        yield from batch_multiples(config, world)
