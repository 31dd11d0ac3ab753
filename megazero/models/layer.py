"""One transformer layer: attention and feed-forward, each behind a norm and added to the residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megazero.config.model.section import LAYER_NORMS, ModelConfig
from megazero.models.attention_kernels import fused
from megazero.models.dropout import Key, keyed_dropout, keyed_randomness
from megazero.models.norm import RMSNorm, split_rms_norm
from megazero.models.positions import Documents, Positions
from megazero.tp import ColumnParallelLinear, RowParallelLinear, TensorParallel, column_parallel

# Sites of dropout within a layer, part of the key.
_ATTENTION, _ATTENTION_OUTPUT, _MLP_OUTPUT = range(3)


def make_norm(config: ModelConfig, size: int | None = None, **factory: Any) -> nn.Module:
    """Return the configuration's norm over ``size`` elements, which is the hidden dim if it is not given."""
    kind = RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    return kind(config.hidden_size if size is None else size, config.norm_epsilon, **factory)


def sharded_key(key: Key | None, tp: TensorParallel, *, sharded: bool) -> Key | None:
    """Return ``key``, extended by the tp rank where the activation is this rank's own part."""
    return None if key is None else (*key, tp.rank if sharded else 0)


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call ``function`` without keeping its activations; the backward calls it again.

    Randomness is keyed, so no generator state is saved.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class Attention(nn.Module):
    """Causal self-attention. Its heads are split over the tp axis, and its key/value heads may be grouped.

    With fewer key/value heads than ranks, neighbouring ranks hold the one that their query heads share.
    """

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, positions: Positions, recompute: str, **factory: Any
    ) -> None:
        super().__init__()
        self.config, self.tp, self.positions, self.recompute = config, tp, positions, recompute
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

    def forward(self, x: Tensor, key: Key | None, documents: Documents | None = None) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        linears = [(m.weight, m.bias) for m in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = column_parallel(x, linears, self.tp)
        if self.norms_all_heads:
            assert isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
            q, k = split_rms_norm((q, k), (self.q_norm, self.k_norm), self.tp)
        q, k, v = (y.unflatten(-1, (-1, self.config.kv_channels)) for y in (q, k, v))
        if not self.norms_all_heads:
            q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
        key = sharded_key(key, self.tp, sharded=True)
        if self.recompute == "selective" and torch.is_grad_enabled():
            return self.o_proj(recomputed(self._core, q, k, v, key, documents))
        return self.o_proj(self._core(q, k, v, key, documents))

    def _core(self, q: Tensor, k: Tensor, v: Tensor, key: Key | None, documents: Documents | None) -> Tensor:
        """``q`` is [s, b, heads, d], ``k`` and ``v`` are [s, b, kv heads, d]. Returns [s, b, heads * d]."""
        if self.config.position_embedding_type == "rope":
            q, k = self.positions.rotate(q, documents), self.positions.rotate(k, documents)
        mask = self.positions.mask(q, documents)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        probability = self.config.attention_dropout if key is not None else 0.0
        repeat = q.shape[1] // k.shape[1]
        grouped = repeat > 1 and q.is_cuda and fused(q, k, v, mask, probability)
        if repeat > 1 and not grouped:
            # On a GPU so that a fused kernel runs: without copies fp32 and ALiBi mostly fall to the math kernel.
            # On the CPU copies are as fast as enable_gqa in fp32 (261 and 256 ms) and faster in bf16
            # (252 and 334 ms: 4 x 512 tokens, 16 heads over 4, width 64, one thread).
            k, v = (t.unsqueeze(2).expand(-1, -1, repeat, -1, -1).flatten(1, 2) for t in (k, v))

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=probability, is_causal=mask is None, enable_gqa=grouped
            )

        if key is None or probability == 0:
            out = attend()
        else:
            with keyed_randomness(q.device, key):
                out = attend()
        return out.permute(2, 0, 1, 3).flatten(2)


class FeedForward(nn.Module):
    """Computes SwiGLU (Shazeer 2020), down(silu(gate(x)) * up(x)), or down(f(up(x))), where f is GELU (exact or by
    tanh) or relu(x)^2 (So et al. 2021)."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, **factory: Any) -> None:
        super().__init__()
        self.tp, self.squared_relu = tp, config.squared_relu
        self.approximate = "tanh" if config.openai_gelu else "none"
        h, ffn, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.gate_proj = ColumnParallelLinear(h, ffn, tp, bias=bias, **factory) if config.swiglu else None
        self.up_proj = ColumnParallelLinear(h, ffn, tp, bias=bias, **factory)
        self.down_proj = RowParallelLinear(ffn, h, tp, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        if self.gate_proj is None:
            up = self.up_proj(x)
            return self.down_proj(
                F.relu(up).square() if self.squared_relu else F.gelu(up, approximate=self.approximate)
            )
        linears = [(m.weight, m.bias) for m in (self.gate_proj, self.up_proj)]
        gate, up = column_parallel(x, linears, self.tp)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Computes x + attention(norm(x)), then x + feed_forward(norm(x)).

    Parallel blocks (Wang and Komatsuzaki 2021) compute x + attention(norm(x)) + feed_forward(norm(x)), with one norm
    for both or with two. With norms of outputs it is x + norm(attention(x)), then x + norm(feed_forward(x)).

    ``index`` is the layer's number in the whole model (part of its dropout keys). ``recompute`` is as in Decoder.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        positions: Positions,
        index: int,
        recompute: str,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.index, self.recompute = config, tp, index, recompute

        def norm(name: str) -> nn.Module | None:
            held = name in LAYER_NORMS[config.transformer_block_type]
            return make_norm(config, **factory) if held else None

        self.input_norm = norm("input_norm")
        self.attention = Attention(config, tp, positions, recompute, **factory)
        self.attention_output_norm = norm("attention_output_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = FeedForward(config, tp, **factory)
        self.mlp_output_norm = norm("mlp_output_norm")

    def forward(
        self, x: Tensor, dropout_key: int | None = None, documents: Documents | None = None
    ) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        key = (dropout_key, self.index) if dropout_key is not None and self.training else None
        if self.recompute == "full" and torch.is_grad_enabled():
            return recomputed(self._layer, x, key, documents)
        return self._layer(x, key, documents)

    def _layer(self, x: Tensor, key: Key | None, documents: Documents | None) -> Tensor:
        normed = _normed(self.input_norm, x)
        attended = _normed(
            self.attention_output_norm, self.attention(normed, _at(key, _ATTENTION), documents)
        )
        attended = x + self._dropout(attended, key, _ATTENTION_OUTPUT)
        if not self.config.parallel_block:
            normed = _normed(self.mlp_norm, attended)
        elif self.mlp_norm is not None:
            normed = self.mlp_norm(x)
        fed = _normed(self.mlp_output_norm, self.mlp(normed))
        return attended + self._dropout(fed, key, _MLP_OUTPUT)

    def _dropout(self, x: Tensor, key: Key | None, site: int) -> Tensor:
        key = sharded_key(_at(key, site), self.tp, sharded=self.tp.sharded_sequence)
        return keyed_dropout(x, self.config.hidden_dropout, key)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _at(key: Key | None, site: int) -> Key | None:
    return None if key is None else (*key, site)
