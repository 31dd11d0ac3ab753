"""Softmax attention (Vaswani et al. 2017), whose key/value heads may be grouped (Ainslie et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, ClassVar

from megazero.config.model.mixers.mixer import Heads, Mixer, TokenWork
from megazero.config.model.parameters import ATTENTION, Backbone, ParameterSpec, column, norm, row
from megazero.config.nearest import around, common_divisors, multiples_around
from megazero.config.options.fields import option
from megazero.families.family import qkv


@dataclass(frozen=True, kw_only=True)
class SoftmaxOptions(Backbone):
    """Its options."""

    NEEDS: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        **dict.fromkeys(
            ("num_query_groups", "kv_channels", "add_qkv_bias", "attention_output_gate"),
            ("not multi_latent_attention: --no-multi-latent-attention", ATTENTION),
        ),
        **dict.fromkeys(("qk_norm", "softmax_"), ATTENTION),
    }

    num_query_groups: int = option(
        MISSING, "key/value heads of grouped-query attention (default: as many as heads)", low=1, small=4
    )
    kv_channels: int = option(MISSING, "width of one head (default: hidden / heads)", low=1, small=4)
    qk_norm: str = option(
        "none",
        "norm of queries and keys before positions turn them: of each head, or of all heads together (by family)",
        choices=("none", "head", "all-heads"),
        consts={"qk-layernorm": "head"},
    )
    add_attention_bias: bool = option(
        MISSING, "biases in attention's four linears (default: as --add-bias-linear, which is then the MLP's)"
    )
    add_qkv_bias: bool = option(
        False, "biases in the query, key and value linears, whatever the other linears have (by family)"
    )
    attention_output_gate: bool = option(
        False,
        "attention's output is multiplied by the sigmoid of a gate, which the query linear makes (by family)",
    )
    softmax_scale: float | None = option(
        None, "factor of attention's scores before softmax (default: 1 / sqrt(width of a head))", above=0
    )

    softmax_type: str = option(
        "vanilla",
        "what stands in each sum of softmax beside the keys: nothing, exp(0), or exp of a learned sink of each head "
        "(by family)",
        choices=("vanilla", "off-by-one", "learnable"),
    )

    @property
    def qkv_bias(self) -> bool:
        """Tell whether the query, key and value linears have biases."""
        return self.add_attention_bias or self.add_qkv_bias

    @property
    def query_projection_size(self) -> int:
        """Return the width of all queries, which is the input width of the attention's output linear."""
        return self.num_attention_heads * self.kv_channels

    @property
    def attention_scale(self) -> float:
        """Return the factor of scores: softmax_scale, or 1 / sqrt(width of a head)."""
        return self.kv_channels**-0.5 if self.softmax_scale is None else self.softmax_scale


def _heads(c: SoftmaxOptions) -> Iterator[str]:
    """Report heads that do not share the key/value heads evenly, or that do not divide the residual stream."""
    hidden, count, groups = c.hidden_size, c.num_attention_heads, c.num_query_groups
    if count % groups:
        yield (
            f"--num-attention-heads {count} do not divide into --num-query-groups {groups}; nearest groups: "
            f"{around(common_divisors(count), groups)}"
        )
    if hidden % count and c.kv_channels == max(1, hidden // count):
        yield (
            f"--hidden-size {hidden} does not divide by --num-attention-heads {count} (and --kv-channels does not "
            f"say otherwise); nearest hidden size: {multiples_around(hidden, count)}"
        )


def _query_key_norm(c: SoftmaxOptions) -> Iterator[str]:
    """Report a norm over all heads together that is not RMSNorm."""
    if c.qk_norm == "all-heads" and c.normalization != "RMSNorm":
        yield (
            f"--qk-norm all-heads needs --normalization RMSNorm, not {c.normalization}; nearest: "
            "--qk-layernorm, which is of each head"
        )


@dataclass(frozen=True)
class Softmax(Mixer):
    """Softmax attention in one model."""

    c: SoftmaxOptions

    module = "megazero.models.mixers.softmax:SoftmaxAttention"
    rules = (_heads, _query_key_norm)
    names = {
        f"attention.{name}": f"self_attn.{name}"
        for name in ("sinks", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    megatron = {
        **qkv("self_attention.linear_qkv"),
        "attention.q_norm": "self_attention.q_layernorm",
        "attention.k_norm": "self_attention.k_layernorm",
        "attention.o_proj": "self_attention.linear_proj",
        "attention.sinks": "self_attention.core_attention.softmax_offset",
    }

    @classmethod
    def derived(cls, done: Mapping[str, Any]) -> dict[str, Any]:
        hidden, heads = done.get("hidden_size"), done.get("num_attention_heads")
        found = {"num_query_groups": heads, "add_attention_bias": done.get("add_bias_linear")}
        return found | ({"kv_channels": max(1, hidden // heads)} if hidden and heads and heads > 0 else {})

    def parameters(self) -> tuple[ParameterSpec, ...]:
        c, (heads, groups, width, *_) = self.c, self.heads
        q, kv, bias = heads * width, groups * width, c.qkv_bias
        sinks = ParameterSpec("attention.sinks", (heads,), 0, heads, std=c.init_method_std)
        parameters = [
            *((sinks,) if c.softmax_type == "learnable" else ()),
            *column(c, "attention.q_proj", q * (1 + c.attention_output_gate), bias, heads),
            *column(c, "attention.k_proj", kv, bias, groups),
            *column(c, "attention.v_proj", kv, bias, groups),
            *row(c, "attention.o_proj", q, c.add_attention_bias),
        ]
        for name, rows, count in (("attention.q_norm", q, heads), ("attention.k_norm", kv, groups)):
            if c.qk_norm == "head":
                parameters += norm(c, name, width, own_heads=True)
            elif c.qk_norm == "all-heads":
                parameters += norm(c, name, rows, 0, count)
        return tuple(parameters)

    def score_rows(self, alpha: float) -> Mapping[str, tuple[tuple[int, float], ...]]:
        width = self.c.kv_channels
        gate = ((width, 0.0),) if self.c.attention_output_gate else ()
        return {"attention.q_proj": ((width, alpha), *gate), "attention.k_proj": ((width, 1 - alpha),)}

    @property
    def heads(self) -> Heads:
        c, width = self.c, self.c.kv_channels
        return Heads(c.num_attention_heads, c.num_query_groups, width, width, c.attention_scale)

    @property
    def work(self) -> TokenWork:
        q, kv = self.c.query_projection_size, self.c.num_query_groups * self.c.kv_channels
        gate = q if self.c.attention_output_gate else 0
        # Rotated q, k, v; attention's output and, laid out anew, o_proj's input; what norms of q and k begin with, of
        # which the gate is a part; its sigmoid, and what that multiplies.
        kept = 3 * q + 2 * kv + 2 * gate + (q + kv + gate if self.c.qk_norm != "none" else 0)
        sums, moved = 2 * (self.c.qk_norm == "all-heads"), 4 * (q + kv) + 5 * gate
        return TokenWork(moved, kept, 2 * q, out=q, taken=self.c.hidden_size, core=q, norm_sums=sums)

    @property
    def words(self) -> str:
        c = self.c
        sinks = "" if c.softmax_type == "vanilla" else f", {c.softmax_type} sinks"
        return f"{c.num_attention_heads} heads of {c.kv_channels}, {c.num_query_groups} of keys and values{sinks}"

    def shared(self) -> tuple[dict[str, int], dict[str, int]]:
        heads, groups = self.c.num_attention_heads, self.c.num_query_groups
        copied = {"--num-query-groups": groups} if groups != heads else {}
        return {"--num-attention-heads": heads}, copied
