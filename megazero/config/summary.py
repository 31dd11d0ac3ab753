"""Writes two lines: what the model is; and what is active on which hop, and why."""

from __future__ import annotations

from collections.abc import Collection

from megazero.config.layout.shards import QUANTISED, Shards
from megazero.config.layout.wire import Coding, Wire, asked_for, quantizes_gradients, quantizes_weights
from megazero.config.model.parameters import parameter_count
from megazero.config.model.section import ModelConfig
from megazero.config.options.sections import ZeroConfig
from megazero.families.layer_kinds import layer_kinds
from megazero.mesh.grid import INTER, INTRA, AxisSpec, make_grid

WHERE = {INTRA: "inside nodes", INTER: "across nodes"}


def model_summary(model: ModelConfig, tp: int) -> str:
    """Describe the architecture and its size over ``tp`` tensor-parallel ranks. The vocabulary may be unknown."""
    m, kinds = model, layer_kinds(model)

    def count(choice: str) -> str:
        """Return how many layers have a choice, in words."""
        having = sum(bool(getattr(kind, choice)) for kind in kinds)
        return "all" if having == len(kinds) else f"{having} of {len(kinds)}"

    positions = {
        "learned_absolute": f"learned positions ({m.max_position_embeddings})",
        "rope": f"rotary positions (base {m.rotary_base:g}, {m.rotary_percent:g} of each head"
        f"{f', scaling {m.rotary_scaling}' if m.rotary_scaling != 'none' else ''}) in {count('rotary')} layers",
        "alibi": "ALiBi",
    }
    biases = "biases" if m.add_bias_linear else "biases of q, k, v only" if m.add_qkv_bias else "no biases"
    gelu = f"GELU ({'tanh form' if m.openai_gelu else 'exact'})"
    activation = "SwiGLU" if m.swiglu else "relu(x)^2" if m.squared_relu else f"{'gate of ' * m.geglu}{gelu}"
    norm = f"{m.normalization} ({m.norm_epsilon:g}{', after the embedding too' if m.embed_layernorm else ''})"
    parts = [
        f"{m.model_family}: {m.num_layers} layers, hidden {m.hidden_size}, MLP {m.ffn_hidden_size}, "
        f"{m.num_attention_heads} heads of {m.kv_channels}, {m.num_query_groups} of keys and values",
        f"{positions[m.position_embedding_type]}, {norm}, {activation}, {biases}, "
        f"{'untied' if m.untie_embeddings_and_output_weights else 'tied'} embeddings",
        *([f"window of {m.sliding_window} tokens in {count('window')} layers"] if m.sliding_window else []),
        f"dropout: hidden {m.hidden_dropout:g}, attention {m.attention_dropout:g}",
    ]
    if m.vocab_size is None:
        return " | ".join([*parts, "vocabulary and parameters: as the tokenizer says"])
    padded = m.padded_vocab_size(tp)
    more = f" ({parameter_count(m, padded):,} with the padding)" if padded != m.vocab_size else ""
    parts.append(f"vocabulary {m.vocab_size:,}, padded to {padded:,}")
    return " | ".join([*parts, f"{parameter_count(m):,} parameters{more}"])


AUTO_SUMMARY = "ZeRO: preset auto, chosen by the planner when the ranks have met"


def zero_summary(zero: ZeroConfig, shards: Shards, wire: Wire, d: int, h: int) -> str:
    """Describe the ZeRO policy hop by hop, on d data-parallel ranks of which h share a node."""
    axes = make_grid(d, h, shards=shards.factors).data_axes
    name = f"preset {zero.zero_preset}" if zero.zero_preset else "--zero-shard"
    nodes = "1 node" if d == h else f"{d // h} nodes"
    parts = [
        f"ZeRO: {name}, P,G,OS = {','.join(map(str, shards.factors))} on {d} data-parallel ranks of {nodes}, "
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


def _weights(zero: ZeroConfig, wire: Wire, axes: Collection[AxisSpec]) -> str:
    coding = wire.weights
    refresh, gathers = _links(axes, ("g", "os")), _links(axes, ("p",))
    details = _details(coding) if coding else ""
    hops = []
    if refresh:
        what = "changes as " if wire.delta else ""
        hops.append(f"refresh {_where(refresh)} {what}{_name(coding)} once per step{details}")
    if gathers:
        first = f"{_name(coding)}{details}"
        later = "exact, of the resident copy" if wire.delta else "as received"
        hops.append(f"gathers {_where(gathers)} {later if refresh and coding else first}")
    if coding and zero.zero_weight_error_bound:
        hops.append(f"exact once a module's error passes {zero.zero_weight_error_bound:g}")
    why = _why(zero, "weights", asked_for(zero).weights, coding)
    return f"weights{why}: {', '.join(hops) or 'never sent'}"


def _gradients(zero: ZeroConfig, wire: Wire, axes: Collection[AxisSpec], whole: bool) -> str:
    hops = []
    frequent: tuple[str, ...] = () if whole else ("p", "g")
    final = tuple(role for role in ("p", "g", "os", "replica") if role not in frequent)
    for link, coding in ((INTRA, wire.gradients_intra), (INTER, wire.gradients_inter)):
        often, once = (link in _links(axes, roles) for roles in (frequent, final))
        if often or once:
            when = " and ".join(["with every micro-batch"] * often + ["once per step"] * once)
            rounding = f"nearest, {_feedback(wire)}" if wire.feedback and link == INTER else "nearest"
            details = _details(coding, "stochastic" if coding.stochastic else rounding) if coding else ""
            hops.append(f"{WHERE[link]} {_name(coding)} {when}{details}")
    if wire.gradients_inter or wire.gradients_intra:
        if zero.zero_quantized_gradients_until:
            hops.append(f"exact after {zero.zero_quantized_gradients_until:.3g} of the training")
        if zero.zero_gradient_error_bound:
            hops.append(f"exact once a module's error passes {zero.zero_gradient_error_bound:g}")
    why = _why(zero, "gradients", asked_for(zero).gradients_inter, wire.gradients_inter)
    return f"gradients{why}: {', '.join(hops)}"


def _feedback(wire: Wire) -> str:
    average = f" averaged with beta {wire.feedback_beta:g}" if wire.feedback_beta else ""
    reset = f" and dropped every {wire.feedback_reset} updates" if wire.feedback_reset else ""
    return f"error feedback{average}{reset}"


def _details(coding: Coding, rounding: str = "nearest") -> str:
    scales = f", best of {coding.clip} scales" if coding.clip else ""
    mixed = f", Hadamard transform of {coding.hadamard}" if coding.hadamard else ""
    return f" (blocks of {coding.block}, {rounding}{scales}{mixed})"


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
    return [link for link in WHERE if any(a.link == link and a.role in roles for a in axes)]


def _where(links: Collection[str]) -> str:
    return "inside and across nodes" if len(links) == 2 else WHERE[next(iter(links))]
