"""Describes a configuration: the model, what was chosen, the layout, and what is active on which hop and why."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from megazero.comm.wire import Coding
from megazero.config.layout.outer import BF16_BITS, EXACT_BITS, averages, feeds_back
from megazero.config.layout.pipeline import stage_costs
from megazero.config.layout.shards import AUTO, QUANTISED, Shards
from megazero.config.layout.wire import Wire, asked_for, quantizes_gradients, quantizes_weights
from megazero.config.model.mixers import mixers_of
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import active_count, parameter_count
from megazero.config.options.fields import Option, show
from megazero.config.options.sections import OuterConfig, ZeroConfig
from megazero.config.run import RunConfig, World, all_options, section_types
from megazero.families import FAMILIES
from megazero.families.layer_kinds import layer_kinds
from megazero.mesh.grid import AxisSpec, expert_shards, make_grid
from megazero.mesh.levels import BETWEEN, INTER, INTRA, across
from megazero.pp.partition import partition_table
from megazero.pp.schedules import peak_activations
from megazero.pp.timeline import ideal_bubble


def describe(config: RunConfig, world: World | None = None) -> list[str]:
    """Describe the architecture, the options that are not the default, by section, and notes. ``world`` adds the
    layout."""
    return [decoder_line(config), *_chosen(config), *layout_lines(config, world), *note_lines(config)]


def decoder_line(config: RunConfig) -> str:
    """Describe the architecture."""
    return f"{'decoder':<11}{model_summary(config.model, config.parallel.tensor_model_parallel_size)}"


def chosen(config: RunConfig) -> Iterator[tuple[Option, Any, Any]]:
    """Yield the options that are not the default of the model's family, with their values and the default."""
    family = FAMILIES[config.model.model_family].defaults
    for opt in all_options().values():
        value, usual = config.get(opt.name), family.get(opt.name, opt.default)
        if value != usual:
            yield opt, value, usual


def _chosen(config: RunConfig) -> Iterator[str]:
    """Yield the same in words, a paragraph for each section."""
    options = list(chosen(config))
    for section in section_types():
        words = [f"{o.key}={show(v)}".replace(" ", "\0") for o, v, _ in options if o.section == section]
        text = textwrap.wrap(" ".join(words), width=120, break_long_words=False, break_on_hyphens=False)
        yield from (f"{'' if i else section:<11}{line}".replace("\0", " ") for i, line in enumerate(text))


def layout_lines(config: RunConfig, world: World | None) -> list[str]:
    """Describe the layout on ``world``, if its nodes are known."""
    layout = _layout(config, world) if world is not None and config.knows_nodes(world) else []
    return [f"{'layout' if not i else '':<11}{line}" for i, line in enumerate(layout)]


def note_lines(config: RunConfig) -> list[str]:
    return [f"note: {note}" for note in config.notes]


def _layout(config: RunConfig, world: World) -> list[str]:
    d, micro_batches = config.shard_ranks(world), config.num_micro_batches(world)
    (h, *_), shards, wire = config.data_ranks(world), config.shards(world), config.wire(world)
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    replicas = config.outer_replicas(world)
    apart = f"{replicas} outer replicas x " if replicas > 1 else ""
    data = f"{d} data-parallel, {h} of them on one node"
    if pp > 1:
        data, pipeline = f"{d} data-parallel ({h} of them on one node)", f"{pp} pipeline"
        inner, outer = (pipeline, data) if config.parallel.use_tp_pp_dp_mapping else (data, pipeline)
        data = f"{inner} x {outer}, innermost first"
    cp = config.parallel.context_parallel_size
    ranks, batches = ("s" * (count != 1) for count in (world.world_size, micro_batches))
    samples = "s" * (config.batch.micro_batch_size != 1)
    held = zip(BETWEEN, config.parallel.level_sizes, strict=False)
    node = [
        f"{config.ranks_per_node(world)} per node",
        *(f"{nodes} nodes per {name}" for name, nodes in held),
    ]
    lines = [f"{world.world_size} rank{ranks}, {', '.join(node)}: {apart}{tp} tensor-parallel x {data}"]
    if cp > 1:
        heads, keys = config.context_levels(world)
        ways = [f"{heads} swap heads for sequence"] * (heads > 1)
        ways += [f"{keys} {'groups of these' if ways else 'of them'} gather keys and values"] * (keys > 1)
        own = f"{cp} data-parallel ranks share samples, with {config.own_length} tokens of each"
        ways += [gathered_summary(coding)] if (coding := config.gathered_keys(world)) else []
        lines.append(f"{own}: {', '.join(ways)}")
    if (ep := config.parallel.expert_model_parallel_size) > 1:
        p, g, os = expert_shards(shards.factors, max(1, ep // tp))
        nodes, way = config.expert_nodes(world), config.parallel.moe_dispatch_across_nodes
        where = "a node" if nodes == 1 else f"{nodes} nodes"
        rows = "" if nodes == 1 else f"; rows go to other nodes {'in INT8' if way == 'int8' else 'exactly'}"
        lines.append(f"{ep} ranks of {where} share the experts, whose P,G,OS are {p},{g},{os}{rows}")
    if config.outer.outer_interval:
        lines.append(outer_summary(config.outer, replicas, world.world_size // replicas))
    auto = config.zero.zero_preset == AUTO
    lines.append(
        AUTO_SUMMARY if auto else zero_summary(config.zero, shards, wire, d, config.data_ranks(world))
    )
    size = f"{config.batch.micro_batch_size} sample{samples}"
    lines.append(f"{micro_batches} micro-batch{'e' * bool(batches)}{batches} of {size} on each rank")
    return lines + (_pipeline(config, pp, micro_batches) if pp > 1 else [])


def _pipeline(config: RunConfig, pp: int, micro_batches: int) -> list[str]:
    """Describe schedule and stages. The stages need a known vocabulary, because the head's cost depends on it."""
    lines = [_schedule(config.pipeline_schedule, pp, config.virtual_stages, micro_batches)]
    if config.model.vocab_size:
        costs = stage_costs(config.model, config.training.recompute_granularity)
        lines += partition_table(config.stages(), costs).splitlines()
    return lines


def _schedule(name: str, pp: int, virtual: int, micro_batches: int) -> str:
    """Describe a schedule, its ideal bubble and its peak activations in one line.

    Each half of a backward counts as much as a forward.
    """
    bubble = ideal_bubble(name, pp, virtual, micro_batches)
    peaks = ",".join(map(str, peak_activations(name, pp, virtual, micro_batches)))
    stages = "1 stage" if virtual == 1 else f"{virtual} stages"
    return (
        f"pipeline: {stages} per rank, schedule {name}: idle {bubble:.1%} with equal stages, activations of up to "
        f"{peaks} forwards on ranks 0 to {pp - 1}"
    )


def outer_summary(outer: OuterConfig, replicas: int, ranks: int) -> str:
    """Describe the outer steps of ``replicas`` of so many ranks each."""
    if replicas == 1:
        return "outer steps: none, one replica (--outer-replicas, by default the number of nodes, is 1)"
    rule = outer.outer_optimizer
    if not averages(outer):
        rule += f" (learning rate {outer.outer_lr:g}, momentum {outer.outer_momentum:g})"
    form = {EXACT_BITS: "exact", BF16_BITS: "bf16"}.get(outer.outer_bits, f"INT{outer.outer_bits}")
    form += ", error feedback" if feeds_back(outer) else ""
    every = f"every {outer.outer_interval} steps" if outer.outer_interval > 1 else "every step"
    if outer.outer_delay:
        form += f", {outer.outer_delay} step{'s' if outer.outer_delay > 1 else ''} on its way"
    if outer.outer_evaluation == "replica":
        form += "; evaluations are of the first replica"
    return f"outer steps: {replicas} replicas of {ranks} ranks meet {every}: {rule}, differences {form}"


def model_summary(model: ModelConfig, tp: int) -> str:
    """Describe the architecture and its size over ``tp`` tensor-parallel ranks. The vocabulary may be unknown."""
    m, kinds = model, layer_kinds(model)
    pattern = f" {m.hybrid_layer_pattern}" if m.hybrid_layer_pattern else ""

    def count(choice: str) -> str:
        """Return how many layers have a choice, in words."""
        having = sum(bool(getattr(kind, choice)) for kind in kinds)
        return "all" if having == len(kinds) else f"{having} of {len(kinds)}"

    positions = {
        "learned_absolute": f"learned positions ({m.max_position_embeddings})",
        "rope": f"rotary positions (base {m.rotary_base:g}, {m.rotary_percent:g} of each head"
        f"{f', scaling {m.rotary_scaling}' if m.rotary_scaling != 'none' else ''}) in {count('rotary')} layers",
    }
    biases = "biases" if m.add_bias_linear else "biases of q, k, v only" if m.add_qkv_bias else "no biases"
    gelu = f"GELU ({'tanh form' if m.openai_gelu else 'exact'})"
    gelu = "x sigmoid(1.702 x)" if m.quick_geglu else gelu
    activation = f"{'gate of ' * (m.geglu or m.quick_geglu)}{gelu}"
    plain = {"SwiGLU": m.swiglu, "relu(x)^2": m.squared_relu, "xIELU": m.xielu}
    activation = next((words for words, chosen in plain.items() if chosen), activation)
    if m.activation_func_clamp_value is not None:
        activation += f" clamped at {m.activation_func_clamp_value:g}"
    shared = m.moe_shared_expert_intermediate_size
    experts = f"{m.num_experts} experts of {m.expert_width}, {m.moe_router_topk} for each token"
    experts += f" and shared ones of {shared}" if shared else ""
    parts = [
        f"{m.model_family}: {m.num_layers} layers{pattern}, hidden {m.hidden_size}, MLP {m.ffn_hidden_size}, "
        f"{', '.join(mixer.words for mixer in mixers_of(m))}",
        f"{positions[m.position_embedding_type]}, {m.normalization} ({m.norm_epsilon:g}), {activation}, {biases}, "
        f"{'untied' if m.untie_embeddings_and_output_weights else 'tied'} embeddings",
        *([f"{experts}, in {count('experts')} layers"] if m.num_experts else []),
        *([f"window of {m.sliding_window} tokens in {count('window')} layers"] if m.sliding_window else []),
        *([f"predicts {m.mtp_num_layers + 1} tokens ahead in training"] if m.mtp_num_layers else []),
        f"dropout: hidden {m.hidden_dropout:g}, attention {m.attention_dropout:g}",
    ]
    if m.vocab_size is None:
        return " | ".join([*parts, "vocabulary and parameters: as the tokenizer says"])
    padded = m.padded_vocab_size(tp)
    more = f" ({parameter_count(m, padded):,} with the padding)" if padded != m.vocab_size else ""
    parts.append(f"vocabulary {m.vocab_size:,}, padded to {padded:,}")
    active = f", {active_count(m):,} for a token" if m.num_experts else ""
    return " | ".join([*parts, f"{parameter_count(m):,} parameters{more}{active}"])


AUTO_SUMMARY = "ZeRO: preset auto, chosen by the planner when the ranks have met"


def zero_summary(zero: ZeroConfig, shards: Shards, wire: Wire, d: int, near: Sequence[int]) -> str:
    """Describe the ZeRO policy hop by hop, on d data-parallel ranks, of which so many share each lower level."""
    axes, h = _data_axes(shards, d, near), near[0]
    name = f"preset {zero.zero_preset}" if zero.zero_preset else "--zero-shard"
    nodes, ranks = "1 node" if d == h else f"{d // h} nodes", f"{d} data-parallel rank{'s' * (d != 1)}"
    parts = [
        f"ZeRO: {name}, P,G,OS = {','.join(map(str, shards.factors))} on {ranks} of {nodes}, "
        f"parameter shards live for: {shards.lifetime}"
        f"{', full parameters to the end of the step' if shards.keep_gathered else ''}"
    ]
    if axes:
        parts += [_weights(zero, wire, axes), _gradients(zero, wire, axes, shards.whole_gradients)]
    else:
        parts.append("one data-parallel rank: nothing is sent or quantised")
    if wire.codings:
        parts.append(f"always exact: parameters of up to {wire.exact_numel:,} elements")
    return " | ".join(parts)


def _data_axes(shards: Shards, d: int, near: Sequence[int]) -> tuple[AxisSpec, ...]:
    h, *above = near
    return make_grid(d, h, shards=shards.factors, level_sizes=tuple(ranks // h for ranks in above)).data_axes


def gathered_summary(coding: Coding) -> str:
    """Describe the format of keys and values that are gathered across nodes."""
    return f"across nodes as {_name(coding)} after a Hadamard transform (blocks of {coding.block}), gradients exact"


def _weights(zero: ZeroConfig, wire: Wire, axes: Collection[AxisSpec]) -> str:
    coding = wire.weights
    refresh, gathers = _links(axes, ("g", "os")), _links(axes, ("p",))
    details = f" (blocks of {coding.block})" if coding else ""
    hops = []
    if refresh:
        what = "changes as " if wire.delta else ""
        hops.append(f"refresh {_where(refresh)} {what}{_name(coding)} once per step{details}")
    if gathers:
        first = f"{_name(coding)}{details}"
        later = "exact, of the resident copy" if wire.delta else "as received"
        hops.append(f"gathers {_where(gathers)} {later if refresh and coding else first}")
    why = _why(zero, "weights", asked_for(zero).weights, coding)
    return f"weights{why}: {', '.join(hops) or 'never sent'}"


def _gradients(zero: ZeroConfig, wire: Wire, axes: Collection[AxisSpec], whole: bool) -> str:
    hops = []
    frequent: tuple[str, ...] = () if whole else ("p", "g")
    final = tuple(role for role in ("p", "g", "os", "replica") if role not in frequent)
    for link in dict.fromkeys(axis.link for axis in axes):
        coding = wire.gradients.get(link)
        often, once = (link in _links(axes, roles) for roles in (frequent, final))
        if often or once:
            when = " and ".join(["with every micro-batch"] * often + ["once per step"] * once)
            details = ""
            if coding:
                mixed = f"Hadamard transform of {coding.hadamard}" if coding.hadamard else "no transform"
                details = f" (blocks of {coding.block}, {mixed})"
            hops.append(f"{across(link)} {_name(coding)} {when}{details}")
    sent = next((coding for link, coding in wire.gradients.items() if link != INTRA), None)
    why = _why(zero, "gradients", asked_for(zero).gradients.get(INTER), sent)
    return f"gradients{why}: {', '.join(hops)}"


def _why(zero: ZeroConfig, what: str, asked: Coding | None, sent: Coding | None) -> str:
    """Say in brackets who asked for quantised messages, and why they are not sent if they are not."""
    on = quantizes_weights(zero) if what == "weights" else quantizes_gradients(zero)
    if not on:
        return f" (--no-zero-quantized-{what})" if zero.zero_preset in QUANTISED else ""
    flag = zero.zero_quantized_weights if what == "weights" else zero.zero_quantized_gradients
    by = f"--zero-quantized-{what}" if flag else f"preset {zero.zero_preset}"
    if what == "weights" and zero.zero_quantized_weights_delta:
        by = "--zero-quantized-weights-delta"
    if sent:
        return f" ({by})"
    return f" ({by} asks for {_name(asked)} across nodes, but no {what} cross nodes here)"


def _name(coding: Coding | None) -> str:
    return f"INT{coding.bits}" if coding else "exact"


def _links(axes: Collection[AxisSpec], roles: Collection[str]) -> list[str]:
    """Return the link classes of the sub-axes with these roles. Those inside nodes come first."""
    return list(dict.fromkeys(axis.link for axis in axes if axis.role in roles))


def _where(links: Collection[str]) -> str:
    return " and ".join(map(across, links)).replace(
        "inside nodes and across nodes", "inside and across nodes"
    )
