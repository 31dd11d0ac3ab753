"""Gated delta net (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next has it: a state instead of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megazero.config.model.mixers.mixer import CHUNK, Mixer, TokenWork
from megazero.config.model.parameters import (
    DECAY,
    TIME_STEP,
    TWO_BRANCHES,
    Backbone,
    ParameterSpec,
    column,
    convolution,
    row,
)
from megazero.config.nearest import multiples_around
from megazero.config.options.fields import option
from megazero.families.layer_kinds import GATED_DELTA_NET

NEEDED = f"mixers = {GATED_DELTA_NET}: --experimental-attention-variant {GATED_DELTA_NET}"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetOptions(Backbone):
    """Its options."""

    experimental_attention_variant: str | None = option(
        None,
        "what mixes tokens instead of softmax attention, but in layers of --linear-attention-freq (by family)",
        choices=(GATED_DELTA_NET,),
        needs=TWO_BRANCHES,
    )
    linear_attention_freq: tuple[int, ...] | None = option(
        None,
        "layers with softmax attention: every N-th, or a number per layer, 0 for one with it (default: none)",
        needs=f"experimental_attention_variant = {GATED_DELTA_NET}",
    )
    linear_num_key_heads: int = option(
        16, "gated delta net: heads of queries and keys", low=1, small=4, needs=NEEDED
    )
    linear_num_value_heads: int = option(
        32, "gated delta net: heads of values, of which several share a key", low=1, small=8, needs=NEEDED
    )
    linear_key_head_dim: int = option(
        128, "gated delta net: width of a query and of a key", low=1, small=4, needs=NEEDED
    )
    linear_value_head_dim: int = option(
        128, "gated delta net: width of a value", low=1, small=8, needs=NEEDED
    )
    linear_conv_kernel_dim: int = option(
        4,
        "gated delta net: tokens that the convolution of queries, keys and values sees",
        low=1,
        needs=NEEDED,
    )

    @property
    def linear_key_size(self) -> int:
        """Return the width of all keys of a token."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_size(self) -> int:
        """Return the width of all values of a token."""
        return self.linear_num_value_heads * self.linear_value_head_dim


def _heads(c: GatedDeltaNetOptions) -> Iterator[str]:
    """Report values that do not share the keys evenly."""
    if c.linear_num_value_heads % c.linear_num_key_heads:
        yield (
            f"--linear-num-value-heads {c.linear_num_value_heads} is no multiple of --linear-num-key-heads "
            f"{c.linear_num_key_heads}; nearest: "
            f"{multiples_around(c.linear_num_value_heads, c.linear_num_key_heads)}"
        )


@dataclass(frozen=True)
class GatedDelta(Mixer):
    """Gated delta net in one model.

    Its input linears make queries, keys, values and their gates; and of each value the step and the decay. All lie by
    key head, so tensor-parallel ranks have consecutive rows. Qwen3-Next has them in two tensors, by key head, too.
    """

    c: GatedDeltaNetOptions

    module = "megazero.models.mixers.gated_delta_net:GatedDeltaNet"
    rules = (_heads,)
    names = {
        "attention": "linear_attn",
        **{f"attention.{name}": f"linear_attn.{name}" for name in ("norm", "out_proj")},
        **{
            f"attention.in_{part}": ("linear_attn.in_proj_qkvz", number) for number, part in enumerate("qkvz")
        },
        **{f"attention.in_{part}": ("linear_attn.in_proj_ba", number) for number, part in enumerate("ba")},
        **{f"attention.{part}_conv": ("linear_attn.conv1d", number) for number, part in enumerate("qkv")},
    }

    groups = dict.fromkeys(("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), "linear_num_key_heads")

    def parameters(self) -> tuple[ParameterSpec, ...]:
        c, heads = self.c, self.c.linear_num_value_heads
        key, value = c.linear_key_size, c.linear_value_size
        sizes = {"q": key, "k": key, "v": value, "z": value, "b": heads, "a": heads}
        return (
            ParameterSpec("attention.A_log", (heads,), 0, law=DECAY),
            ParameterSpec("attention.dt_bias", (heads,), 0, law=TIME_STEP),
            *(p for part, size in sizes.items() for p in column(c, f"attention.in_{part}", size, bias=False)),
            *(
                p
                for part in "qkv"
                for p in convolution(
                    f"attention.{part}_conv", sizes[part], c.linear_conv_kernel_dim, bias=False
                )
            ),
            ParameterSpec("attention.norm.weight", (c.linear_value_head_dim,), mean=1.0, own_heads=True),
            *row(c, "attention.out_proj", value, bias=False),
        )

    @property
    def heads(self) -> None:
        return None

    @property
    def work(self) -> TokenWork:
        c, heads = self.c, self.c.linear_num_value_heads
        key, value = c.linear_key_size, c.linear_value_size
        state, keys, mixed = value * c.linear_key_head_dim, heads * c.linear_key_head_dim, 2 * key + value
        # Padded and convolved q, k, v; the rule's output, its norm, the gate, its SiLU, out_proj's input.
        kept = 2 * mixed + 5 * value + 6 * heads
        # Before the norm q and k; chunked q and k, k times beta, with both decays and solved; v, solved and
        # corrected; products of queries and keys, of keys, their decays; states.
        wide = 2 * key + 6 * keys + 3 * value + 5 * CHUNK * heads + 2 * state // CHUNK
        # The state is read for the correction and for the query, decayed and added to (Megatron's accounting).
        token = 4 * state + mixed * c.linear_conv_kernel_dim
        moved = 2 * (kept + wide)
        return TokenWork(moved, kept, 0, value, taken=c.hidden_size, core=0, token=token, wide=wide)

    @property
    def words(self) -> str:
        c = self.c
        return (
            f"gated delta net of {c.linear_num_value_heads} values of {c.linear_value_head_dim}, "
            f"{c.linear_num_key_heads} keys of {c.linear_key_head_dim}"
        )

    def shared(self) -> tuple[dict[str, int], dict[str, int]]:
        return {"--linear-num-key-heads": self.c.linear_num_key_heads}, {}
