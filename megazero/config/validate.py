"""One pass over a configuration reports every error at once: the value, the rule, the nearest legal choice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from megazero.config.layout import context_rules
from megazero.config.layout.context import SWAP, comm_type
from megazero.config.layout.outer_rules import outer_notes, shares_of_ranks
from megazero.config.layout.shards import QUANTISED, resolve_shards
from megazero.config.layout.wire_rules import may_quantise, message_facts
from megazero.config.model.published import is_published
from megazero.config.model.section import complete
from megazero.config.nearest import multiples_around
from megazero.config.options.data_inputs import PARTS
from megazero.config.options.fields import Unjudged, fault, guarded
from megazero.config.options.needs import without_effect
from megazero.config.rules import RULES, at_each_length, fp8_share, idle_router
from megazero.config.run import RunConfig, World, all_options, section_types
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.families.layer_kinds import mixers
from megazero.mesh.grid import context_problem, expert_problem


class Verdict(NamedTuple):
    """What is wrong with a configuration; if nothing is, what a user may not expect of it. A line each."""

    errors: list[str]
    notes: list[str]


def judge(
    config: RunConfig, world: World | None, skip: Collection[str] = (), missing: Collection[str] = ()
) -> Verdict:
    """Return all error lines, or notes on a legal configuration.

    A rule ends where it reads an option in ``skip``, which is reported already, one in ``missing``, or one with an
    illegal value. An option without an effect is an error if it is strict, else a note.
    """
    broken, errors, values = set(skip), list[str](), config.values()
    for opt in all_options().values():
        value = None if opt.name in missing else values[opt.name]
        if broken.intersection(DERIVED_FROM.get(opt.name, ())):
            broken.add(opt.name)
        if opt.name not in broken and (error := fault(opt, value)):
            errors.append(error)
            broken.add(opt.name)
    broken.update(missing)
    judged = config
    if broken:
        judged = replace(config, **{n: guarded(getattr(config, n), broken) for n in section_types()})
    for rule in RULES:
        errors += _judged(rule, judged)
    defaults = complete({name: values[name] for name in _DECIDING if name not in broken})
    idle = [*without_effect(all_options().values(), values, facts(config), defaults, broken)]
    errors += [line for opt, line in idle if opt.strict]
    if world is not None:
        errors += _judged(_profiled_ranks, judged, world)
        errors += (uneven := _judged(uneven_ranks, judged, world))
        for layout_rule in () if uneven else LAYOUT_RULES:
            errors += _judged(layout_rule, judged, world)
    if not config.knows_nodes(world):
        errors += _judged(_shard_chain, judged)
    if errors:
        return Verdict(errors, [])
    notes = [line.split("; leave it out")[0] for _, line in idle]
    return Verdict([], notes + [line for note in NOTES for line in note(config, world)])


def _judged(rule: Callable[..., Iterable[str]], *of: Any) -> list[str]:
    """Return the lines of a rule up to where it reads an option that has no legal value."""
    lines: list[str] = []
    with suppress(Unjudged):
        for line in rule(*of):
            lines.append(line)  # not extend: the lines before that count
    return lines


def facts(config: RunConfig) -> dict[str, Any]:
    """Return what options need beside the values of others (options/needs.py), by name."""
    zero, parallel = config.zero, config.parallel
    planned = may_quantise(zero.zero_preset, config.planning.loss_policy)
    return {
        "mixers": mixers(config.model),
        "loads_hugging_face": is_published(config.checkpoint.load),
        "gathers_keys": comm_type(parallel) != SWAP,
        "names_parts": any(getattr(config.data, name) for name in PARTS),
        **message_facts(zero, planned),
    }


def _lone_ranks(config: RunConfig, world: World | None) -> Iterator[str]:
    """Yield a note if a preset of a node's ranks is used on nodes of one data-parallel rank."""
    preset = config.zero.zero_preset
    if preset in QUANTISED and world and config.knows_nodes(world) and config.data_ranks_per_node(world) == 1:
        yield (
            f"preset {preset} on nodes of one data-parallel rank is zero1 with quantised messages "
            "(--zero-preset zero1 --zero-quantized-weights-delta --zero-quantized-gradients): each rank holds all "
            "parameters"
        )


def _other_lifetime(config: RunConfig, world: World | None) -> Iterator[str]:
    """Yield a note if parameter shards live for another time than is asked for."""
    asked = config.zero.zero_params_lifetime
    if world is None or not config.knows_nodes(world) or asked in (None, "gathered"):
        return
    if asked != config.shards(world).lifetime:
        yield f"--zero-params-lifetime {asked} is 'use' here: P = OS, the P copy is the optimizer's own slice"


_DECIDING = ("model_family", "hidden_size", "num_attention_heads")  # what others of the model are by default
# Options that others may decide. While one of those is not legal, the derived option is not judged.
DERIVED_FROM = {
    "ffn_hidden_size": ("hidden_size",),
    "kv_channels": ("hidden_size", "num_attention_heads"),
    "num_query_groups": ("num_attention_heads",),
    "mamba_num_heads": ("hidden_size", "mamba_head_dim"),
    "max_position_embeddings": ("seq_length",),
}


def batch_multiples(config: RunConfig, world: World) -> Iterator[str]:
    """Report global batches that are not whole micro-batches on every data-parallel rank.

    Of a ramp-up only the batch in use must be whole (train/schedule/run_length.py). Here it is known if nothing is
    loaded.
    """
    sizes = config.batch
    micro, batch = sizes.micro_batch_size, sizes.global_batch_size
    if batch is None:
        return
    d, group = config.data_parallel_size(world), config.micro_batch_multiple
    quantum = micro * d * group
    grouped = f" x {group} pipeline ranks (schedule interleaved)" if group > 1 else ""
    rule = f"micro-batch size {micro} x data-parallel size {d}{grouped} = {quantum}"
    if batch % quantum:
        yield f"--global-batch-size {batch} is not a multiple of {rule}; nearest: {multiples_around(batch, quantum)}"
    evaluated = sizes.eval_global_batch_size
    if evaluated and evaluated % quantum:
        near = multiples_around(evaluated, quantum)
        yield f"--eval-global-batch-size {evaluated} is not a multiple of {rule}; nearest: {near}"
    with suppress(ValueError):  # reported elsewhere
        first = BatchSizes.of(config, d).batch_size(0)
        if first != batch and first % quantum and config.checkpoint.load is None:
            near, flag = multiples_around(first, quantum), sizes.resized_by or "--data-stages"
            yield f"{flag} starts at {first}, which is not a multiple of {rule}; nearest: {near}"


def _shard_chain(config: RunConfig) -> Iterator[str]:
    """Check the shards without nodes: with d = OS and h = 1, only P | G | OS and the lifetime are left to check."""
    zero = config.zero
    if not (shard := zero.zero_shard):
        return
    try:
        resolve_shards(
            shard, max(shard[-1], 1), (1,), zero.zero_params_lifetime, gradients=zero.zero_gradients_lifetime
        )
    except ValueError as error:
        yield str(error)


def _with_nodes(config: RunConfig, world: World) -> tuple[RunConfig, World]:
    """Return a configuration and a world with nodes: where they are not known, one node."""
    return config, world if config.knows_nodes(world) else World(world.world_size, world.world_size)


def uneven_ranks(config: RunConfig, world: World) -> list[str]:
    """Return the error line of ranks that do not divide by the parallel sizes, or whose groups straddle nodes."""
    config, world = _with_nodes(config, world)
    try:
        d, near = config.shard_ranks(world), config.data_ranks(world)
    except ValueError as error:
        return [f"{error}"]
    problem = context_problem(config.parallel.context_parallel_size, d, near)
    return [problem] if problem else []


def uneven_experts(config: RunConfig, world: World) -> Iterator[str]:
    """Report expert-parallel ranks that cannot share the experts evenly, or whose shards do not divide.

    Without known nodes the world counts as one. Shards that are illegal are reported elsewhere.
    """
    parallel, experts = config.parallel, config.model.num_experts
    ep, tp = parallel.expert_model_parallel_size, parallel.tensor_model_parallel_size
    way = parallel.moe_dispatch_across_nodes
    if ep == 1 or experts is None:
        return
    known = config.knows_nodes(world)
    config, world = _with_nodes(config, world)
    with suppress(ValueError):
        near = config.data_ranks(world)
        problem = expert_problem(
            ep,
            experts,
            tp,
            config.shards(world).factors,
            config.shard_ranks(world),
            near,
            parallel.use_tp_pp_dp_mapping,
            across=way != "no",
        )
        if problem:
            yield problem
        elif way != "no" and known and ep <= near[0] * tp:
            yield (
                f"--moe-dispatch-across-nodes {way} is for rows that go to other nodes, and the {ep} ranks that "
                "share the experts lie on one; nearest: no"
            )


def _profiled_ranks(config: RunConfig, world: World) -> Iterator[str]:
    for rank in config.profiling.profile_ranks:
        if rank >= world.world_size:
            yield (
                f"--profile-ranks {rank} is not one of the {world.world_size} ranks; nearest: {world.world_size - 1}"
            )


def _messages(config: RunConfig, world: World) -> Iterator[str]:
    """Report shards that are illegal on these nodes, and formats that have no effect there or do not go together."""
    if not config.knows_nodes(world):
        return
    try:
        if config.wire(world).delta and config.outer.outer_meet:
            yield (
                "--outer-meet does not take changes of weights between a replica's nodes: evaluations would see "
                "the anchor through their rounding; nearest: --no-zero-quantized-weights-delta"
            )
    except ValueError as error:
        yield str(error)


def _over_nodes(config: RunConfig, world: World) -> Iterator[str]:
    if config.knows_nodes(world):
        yield from context_rules.over_nodes(config, world)


# Rules over the size of the world, where ranks divide evenly. Before nodes are known, those judge that hold for any.
LAYOUT_RULES = (uneven_experts, _messages, batch_multiples, at_each_length(_over_nodes), shares_of_ranks)
# What is not as one may expect of a legal configuration.
NOTES: tuple[Callable[[RunConfig, World | None], Iterable[str]], ...] = (
    lambda config, _: idle_router(config),
    lambda config, _: fp8_share(config),
    lambda config, _: outer_notes(config),
    context_rules.context_notes,
    _other_lifetime,
    _lone_ranks,
)
