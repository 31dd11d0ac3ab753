"""Latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1): keys and values of all heads are made of one
narrow vector of each token, the latent, and of one key of rotary positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megazero.config.model.mixers.mixer import Exchanged, Heads, Mixer, TokenWork
from megazero.config.model.mixers.softmax import SoftmaxOptions
from megazero.config.model.parameters import ParameterSpec, column, norm, row
from megazero.config.options.fields import option


@dataclass(frozen=True, kw_only=True)
class LatentOptions(SoftmaxOptions):
    """Its options, beside those of softmax attention."""

    NEEDS: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        **SoftmaxOptions.NEEDS,
        **dict.fromkeys(
            ("q_lora_", "kv_lora_", "qk_head_", "qk_pos_", "v_head_", "latent_"), "multi_latent_attention"
        ),
    }

    multi_latent_attention: bool = option(
        False, "keys and values of all heads are made of one latent vector of each token (by family)"
    )
    q_lora_rank: int | None = option(
        None, "width of the latent of queries (default: queries have none)", low=1, small=8
    )
    kv_lora_rank: int = option(32, "width of the latent of keys and values", low=1, small=8)
    qk_head_dim: int = option(128, "channels of a query and a key without positions", low=1, small=8)
    qk_pos_emb_head_dim: int = option(
        64, "channels that rotary positions turn, of a key one for all heads", low=2, small=4
    )
    v_head_dim: int = option(128, "channels of a value", low=1, small=8)
    latent_norm_epsilon: float | None = option(
        None, "epsilon inside norms of latents (default: --norm-epsilon; by family)", above=0
    )


def _built(c: Any) -> Iterator[str]:
    """Report choices that latent attention does not have."""
    if c.position_embedding_type != "rope":
        yield (
            f"--multi-latent-attention needs --position-embedding-type rope, not {c.position_embedding_type}: a key "
            "has channels for it"
        )
    if c.softmax_type != "vanilla":
        yield f"--softmax-type {c.softmax_type}: latent attention has no sinks; nearest: vanilla"
    if c.use_mup:
        yield "--use-mup with --multi-latent-attention: its scores' scale is not built; nearest: no --use-mup"
    if c.qk_norm == "all-heads":
        yield "--qk-norm all-heads: of latent attention the latents have norms; nearest: --qk-layernorm"
    if c.v_head_dim > c.qk_head_dim + c.qk_pos_emb_head_dim:
        yield (
            f"--v-head-dim {c.v_head_dim} exceeds a key's {c.qk_head_dim + c.qk_pos_emb_head_dim} channels "
            f"(--qk-head-dim and --qk-pos-emb-head-dim); nearest: {c.qk_head_dim + c.qk_pos_emb_head_dim}"
        )


@dataclass(frozen=True)
class Latent(Mixer):
    """Latent attention in one model."""

    module = "megazero.models.mixers.latent:LatentAttention"
    rules = (_built,)
    rotated_by = "--qk-pos-emb-head-dim"
    in_fp8 = False  # latents are narrow, and ranks gather them as they are
    names = {
        "attention.q_full_proj": "self_attn.q_proj",
        "attention.q_down_proj": "self_attn.q_a_proj",
        "attention.q_latent_norm": "self_attn.q_a_layernorm",
        "attention.q_up_proj": "self_attn.q_b_proj",
        "attention.kv_down_proj": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
        "attention.kv_up_proj": "self_attn.kv_b_proj",
    }
    megatron = {
        "attention.q_full_proj": "self_attention.linear_q_proj",
        "attention.q_down_proj": "self_attention.linear_q_down_proj",
        "attention.q_latent_norm": "self_attention.q_layernorm",
        "attention.q_up_proj": "self_attention.linear_q_up_proj",
        "attention.kv_down_proj": "self_attention.linear_kv_down_proj",
        "attention.kv_latent_norm": "self_attention.kv_layernorm",
        "attention.kv_up_proj": "self_attention.linear_kv_up_proj",
    }

    @classmethod
    def derived(cls, done: Mapping[str, Any]) -> dict[str, Any]:
        if not done.get("multi_latent_attention"):
            return {}
        # As Megatron's: neighbouring channels turn, and a factor is yarn's.
        stretched = done.get("rotary_scaling_factor", 1) != 1
        return {"rotary_interleaved": True} | ({"rotary_scaling": "yarn"} if stretched else {})

    @property
    def cached(self) -> int:
        """The elements of a token that keys and values of all heads are made of."""
        return self.c.kv_lora_rank + self.c.qk_pos_emb_head_dim

    def parameters(self) -> tuple[ParameterSpec, ...]:
        c, heads, rank = self.c, self.heads, self.c.q_lora_rank
        queries, made = heads.number * heads.width, heads.number * (c.qk_head_dim + c.v_head_dim)
        parameters = [
            *(
                column(c, "attention.q_full_proj", queries, False)
                if rank is None
                else self._down("q", rank, rank)
            ),
            *(column(c, "attention.q_up_proj", queries, False, columns=rank) if rank else ()),
            *self._down("kv", self.cached, c.kv_lora_rank),
            *column(c, "attention.kv_up_proj", made, False, columns=c.kv_lora_rank),
            *row(c, "attention.o_proj", self.work.out, c.add_attention_bias),
        ]
        return tuple(parameters)

    def _down(self, name: str, rows: int, rank: int) -> Iterator[ParameterSpec]:
        """Yield the linear that makes a latent, which every tensor-parallel rank holds, and the latent's norm."""
        yield from column(self.c, f"attention.{name}_down_proj", rows, False, cut=None)
        if self.c.qk_norm != "none":
            yield from norm(self.c, f"attention.{name}_latent_norm", rank)

    def score_rows(self, alpha: float) -> Mapping[str, tuple[tuple[int, float], ...]]:
        """All heads share the key's channels with positions, which stay; their factor is the query's."""
        c = self.c
        return {
            f"attention.q_{'full' if c.q_lora_rank is None else 'up'}_proj": (
                (c.qk_head_dim, alpha),
                (c.qk_pos_emb_head_dim, 1.0),
            ),
            "attention.kv_up_proj": ((c.qk_head_dim, 1 - alpha), (c.v_head_dim, 0.0)),
        }

    @property
    def heads(self) -> Heads:
        c, width = self.c, self.c.qk_head_dim + self.c.qk_pos_emb_head_dim
        scale = c.softmax_scale
        if scale is None:
            stretched = c.yarn_mscale_all_dim * (c.rotary_scaling == "yarn" and c.rotary_scaling_factor > 1)
            scale = (0.1 * stretched * math.log(c.rotary_scaling_factor) + 1) ** 2 / math.sqrt(width)
        return Heads(c.num_attention_heads, c.num_attention_heads, width, c.qk_pos_emb_head_dim, scale)

    @property
    def work(self) -> TokenWork:
        c, heads = self.c, self.heads
        q, v, made = (
            heads.number * width for width in (heads.width, c.v_head_dim, c.qk_head_dim + c.v_head_dim)
        )
        rank = c.q_lora_rank or 0
        # q, k, and v and attention's output, both as wide; o_proj's input.
        return TokenWork(
            moved=8 * q + 2 * (made + v) + 6 * (rank + self.cached),
            kept=4 * q + v,
            pair=q + v,
            out=v,
            taken=rank or c.hidden_size,
            shared=self.cached,
            latents=rank if c.qk_norm == "none" else 2 * rank + self.cached,  # norms keep their inputs
            core=3 * q,
            expanded=2 * q,
            expansion=made * c.kv_lora_rank,
        )

    @property
    def words(self) -> str:
        c, heads = self.c, self.heads
        return f"{heads.number} heads of {heads.width}, keys and values of a latent of {c.kv_lora_rank}"

    def shared(self) -> tuple[dict[str, int], dict[str, int]]:
        return {"--num-attention-heads": self.c.num_attention_heads}, {}

    def exchanged(self, tp: int, ranks: int) -> Exchanged:
        """Every rank that swaps heads receives the latents, and groups gather them: heads are made behind."""
        queries, gathered = self.heads.number * self.heads.width // tp, (ranks * self.cached,)
        return Exchanged(queries + sum(gathered), self.work.out // tp, gathered)
