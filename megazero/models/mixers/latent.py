"""Latent attention of a layer (config/model/mixers/latent.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megazero.config.model.mixers.latent import Latent
from megazero.config.model.section import ModelConfig
from megazero.cp import ContextParallel, gather, swap, swap_back
from megazero.models.attention import attend
from megazero.models.dropout import Key
from megazero.models.largest_scores import LargestScores
from megazero.models.layer import recomputed
from megazero.models.norm import make_norm, normed
from megazero.models.positions import LayerTables
from megazero.models.rotary import Rotate
from megazero.products.product import PLAIN
from megazero.tp import ColumnParallelLinear, RowParallelLinear, TensorParallel, column_parallel, whole


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are made of latents. Its heads are split over the tp axis.

    Ranks hold the linears that make latents whole, and exchange latents, never the keys and values made of them. Each
    of the cp ranks makes those of its own heads, and attends to whole samples with these.

        latent   [s, b, kv_lora_rank + qk_pos_emb_head_dim], the normed latent and the key's channels with positions
    """

    largest: LargestScores | None = None  # of a run that asks for them

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, cp: ContextParallel, recompute: str, **factory: Any
    ) -> None:
        super().__init__()
        tp = replace(tp, product=PLAIN)
        self.config, self.tp, self.cp, self.recompute = config, tp, cp, recompute
        # Of one rank: its linears are whole, and do not communicate.
        self.alone = TensorParallel(deferred=tp.deferred)
        mixer, h, rank = Latent(config), config.hidden_size, config.q_lora_rank
        heads, width = mixer.heads.number, mixer.heads.width

        def down(columns: int, latent: int) -> tuple[nn.Module, nn.Module | None]:
            linear = ColumnParallelLinear(h, columns, self.alone, bias=False, **factory)
            if config.qk_norm == "none":
                return linear, None
            return linear, make_norm(config, latent, config.latent_norm_epsilon, **factory)

        if rank is None:
            self.q_full_proj = ColumnParallelLinear(h, heads * width, tp, bias=False, **factory)
        else:
            self.q_down_proj, self.q_latent_norm = down(rank, rank)
            self.q_up_proj = ColumnParallelLinear(rank, heads * width, tp, bias=False, **factory)
        self.kv_down_proj, self.kv_latent_norm = down(mixer.cached, config.kv_lora_rank)
        made = heads * (config.qk_head_dim + config.v_head_dim)
        self.kv_up_proj = ColumnParallelLinear(config.kv_lora_rank, made, tp, bias=False, **factory)
        self.o_proj = RowParallelLinear(
            heads * config.v_head_dim, h, tp, bias=config.add_attention_bias, **factory
        )
        self.q_width = width

    def forward(self, x: Tensor, tables: LayerTables, key: Key | None) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        q = self._queries(x).unflatten(-1, (-1, self.q_width))
        latent, turned = self._parts(self.kv_down_proj(x))
        latent = whole(torch.cat((normed(self.kv_latent_norm, latent), turned), -1), self.tp)
        if self.recompute == "selective" and torch.is_grad_enabled():
            return self.o_proj(recomputed(self._core, q, latent, tables, key))
        return self.o_proj(self._core(q, latent, tables, key))

    def _queries(self, x: Tensor) -> Tensor:
        """Return the queries [s, b, heads * d]."""
        if self.config.q_lora_rank is None:
            return self.q_full_proj(x)
        return self.q_up_proj(normed(self.q_latent_norm, self.q_down_proj(x)))

    def _parts(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latent alone, and the key's channels with positions."""
        first, second = latent.split((self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim), -1)
        return first, second

    def _core(self, q: Tensor, latent: Tensor, tables: LayerTables, key: Key | None) -> Tensor:
        """``q`` is [s, b, heads, d]. Returns [s, b, heads * v_head_dim]."""
        latent = latent.unsqueeze(2)  # as one head, which the queries of all ranks share
        if tables.rotary is not None:
            q, latent = self._turned(q, tables.rotary), self._turned(latent, tables.rotary)
        q, latent = swap((q, latent), self.cp)
        k, v = self._keys_and_values(*gather((latent,), self.cp))
        if self.largest is not None:
            self.largest.take(q, k, tables.attention.masking)
        out = attend(q, k, v, tables.attention, self.config.attention_dropout, key)
        return swap_back(out, self.cp).flatten(2)

    def _turned(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return ``x`` [s, b, heads, n] with the last channels of each head turned."""
        last = self.config.qk_pos_emb_head_dim
        kept, turned = x.split((x.shape[-1] - last, last), -1)
        return torch.cat((kept, Rotate.apply(turned, *rotary, self.config.rotary_interleaved)), -1)

    def _keys_and_values(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [s, b, heads, d] of this rank's heads. ``latent`` has one head."""
        peers, tp = self.cp.heads, self.alone
        weight: Tensor = self.kv_up_proj.weight
        if peers.size > 1:  # a part of a parameter, whose gradient cannot be put off
            weight, tp = weight.chunk(peers.size)[peers.rank], replace(tp, deferred=None)
        latent, turned = self._parts(latent)
        (made,) = column_parallel(latent.squeeze(2), [(weight, None)], tp)
        made = made.unflatten(-1, (-1, self.config.qk_head_dim + self.config.v_head_dim))
        k, v = made.split((self.config.qk_head_dim, self.config.v_head_dim), -1)
        return torch.cat((k, turned.expand(-1, -1, k.shape[2], -1)), -1), v
