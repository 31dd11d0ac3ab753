"""One transformer layer: attention and feed-forward, each behind a norm and added to the residual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megazero.config.model.section import LAYER_NORMS, ModelConfig
from megazero.cp import ContextParallel, gather, swap, swap_back
from megazero.models.attention import attend
from megazero.models.dropout import NO_DROPOUT, Key, LayerDropout, keyed_dropout
from megazero.models.experts import MixtureOfExperts
from megazero.models.feed_forward import FeedForward
from megazero.models.norm import LayerNorm, RMSNorm, split_rms_norm
from megazero.models.positions import LayerTables
from megazero.models.rotary import Rotate
from megazero.moe import BalanceLosses, Decision, ExpertParallel
from megazero.tp import ColumnParallelLinear, RowParallelLinear, TensorParallel, column_parallel


def make_norm(config: ModelConfig, size: int | None = None, **factory: Any) -> nn.Module:
    """Return the configuration's norm over ``size`` elements, which is the hidden dim if it is not given."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    size = config.hidden_size if size is None else size
    return kind(size, config.norm_epsilon, one_plus=config.apply_layernorm_1p, **factory)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap x tanh(x / cap), which lies between -cap and cap (Bello et al. 2017; Gemma Team 2024)."""
    return (x / cap).tanh() * cap


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call ``function`` without keeping its activations; the backward calls it again.

    Randomness is keyed, so no generator state is saved.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class Attention(nn.Module):
    """Causal self-attention. Its heads are split over the tp axis, and its key/value heads may be grouped.

    With fewer key/value heads than ranks, neighbouring ranks hold the one that their query heads share. Each of the
    cp ranks attends to whole samples with its share of these heads, and of the queries.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        cp: ContextParallel,
        recompute: str,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.cp, self.recompute = config, tp, cp, recompute
        h, bias = config.hidden_size, config.qkv_bias
        self.q_proj = ColumnParallelLinear(h, config.query_projection_size, tp, bias=bias, **factory)
        keys = max(config.num_query_groups, tp.size) * config.kv_channels  # of all ranks, copies counted
        self.k_proj = ColumnParallelLinear(h, keys, tp, bias=bias, **factory)
        self.v_proj = ColumnParallelLinear(h, keys, tp, bias=bias, **factory)
        self.o_proj = RowParallelLinear(
            config.query_projection_size, h, tp, bias=config.add_attention_bias, **factory
        )
        self.norms_all_heads = config.qk_norm == "all-heads"
        self.q_norm, self.k_norm = (
            make_norm(
                config, config.kv_channels if config.qk_norm == "head" else m.weight.shape[0], **factory
            )
            if config.qk_norm != "none"
            else None
            for m in (self.q_proj, self.k_proj)
        )

    def forward(self, x: Tensor, tables: LayerTables, key: Key | None) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        linears = [(m.weight, m.bias) for m in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = column_parallel(x, linears, self.tp)
        if self.norms_all_heads:
            assert isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
            q, k = split_rms_norm((q, k), (self.q_norm, self.k_norm), self.tp)
        q, k, v = (y.unflatten(-1, (-1, self.config.kv_channels)) for y in (q, k, v))
        if not self.norms_all_heads:
            q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
        if self.recompute == "selective" and torch.is_grad_enabled():
            return self.o_proj(recomputed(self._core, q, k, v, tables, key))
        return self.o_proj(self._core(q, k, v, tables, key))

    def _core(self, q: Tensor, k: Tensor, v: Tensor, tables: LayerTables, key: Key | None) -> Tensor:
        """``q`` is [s, b, heads, d], ``k`` and ``v`` are [s, b, kv heads, d]. Returns [s, b, heads * d]."""
        if tables.rotary is not None:
            q, k = (Rotate.apply(x, *tables.rotary, self.config.rotary_interleaved) for x in (q, k))
        q, k, v = swap(q, k, v, self.cp)
        k, v = gather(k, v, self.cp)
        out = attend(q, k, v, tables.attention, self.config.attention_dropout, key)
        return swap_back(out, self.cp).flatten(2)


class DecoderLayer(nn.Module):
    """Computes x + attention(norm(x)), then x + feed_forward(norm(x)).

    Parallel blocks (Wang and Komatsuzaki 2021) compute x + attention(norm(x)) + feed_forward(norm(x)), with one norm
    for both or with two. With norms of outputs it is x + norm(attention(x)), then x + norm(feed_forward(x)); with
    norms on both sides (Ding et al. 2021), x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x))).

    ``experts``: the losses of a mixture of experts, which is in the place of feed_forward.
    ``recompute`` is as in Decoder. ``compiled`` is ``_layer`` after torch.compile (compilation.py), or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        cp: ContextParallel,
        ep: ExpertParallel,
        recompute: str,
        experts: BalanceLosses | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.recompute = config, tp, recompute

        def norm(name: str) -> nn.Module | None:
            held = name in LAYER_NORMS[config.transformer_block_type]
            return make_norm(config, **factory) if held else None

        self.compiled: Callable[..., Tensor] | None = None
        self.input_norm = norm("input_norm")
        self.attention = Attention(config, tp, cp, recompute, **factory)
        self.attention_output_norm = norm("attention_output_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp: FeedForward | MixtureOfExperts = (
            FeedForward(config, tp, **factory)
            if experts is None
            else MixtureOfExperts(config, tp, cp, ep, experts, **factory)
        )
        self.mlp_output_norm = norm("mlp_output_norm")

    def forward(
        self,
        x: Tensor,
        tables: LayerTables,
        dropout: LayerDropout = NO_DROPOUT,
        decision: Decision | None = None,
    ) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape.

        ``tables`` are those of the layer's kind (``Positions.tables``). ``decision``: which experts the tokens go to,
        of a layer that has some.
        """
        layer = self._layer if self.compiled is None else partial(self.compiled, self)
        if self.recompute == "full" and torch.is_grad_enabled():
            return recomputed(layer, x, tables, dropout, decision)
        return layer(x, tables, dropout, decision)

    def _layer(
        self, x: Tensor, tables: LayerTables, dropout: LayerDropout, decision: Decision | None
    ) -> Tensor:
        of_attention, of_mlp = (None, None) if dropout.outputs is None else dropout.outputs.unbind()
        normed = _normed(self.input_norm, x)
        attended = _normed(self.attention_output_norm, self.attention(normed, tables, dropout.attention))
        attended = self._added(x, attended, of_attention)
        if not self.config.parallel_block:
            normed = _normed(self.mlp_norm, attended)
        elif self.mlp_norm is not None:
            normed = self.mlp_norm(x)
        fed = self.mlp(normed) if decision is None else self.mlp(normed, decision)
        fed = _normed(self.mlp_output_norm, fed)
        return self._added(attended, fed, of_mlp)

    def _added(self, x: Tensor, output: Tensor, words: Tensor | None) -> Tensor:
        """Return the residual ``x`` and the layer's ``output`` after dropout, times its multiplier."""
        dropped = keyed_dropout(output, self.config.hidden_dropout, words)
        return torch.add(x, dropped, alpha=self.config.residual_multiplier)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
