"""One transformer layer: attention and feed-forward, each behind a norm and added to the residual.

torch has fused attention kernels, and "math", which keeps a matrix [s, s] per head and sample. The fused ones differ
in dtypes (flash attention takes 16 bits), in masks (flash attention takes none) and in grouped key/value heads
(whether the memory-efficient kernel, which takes fp32, allows them depends on the release of torch). So torch is
asked which of them runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cuda
from torch.utils.checkpoint import checkpoint

from megazero.config.model.section import LAYER_NORMS, ModelConfig
from megazero.families.layer_kinds import layer_kinds
from megazero.models.dropout import NO_DROPOUT, Key, LayerDropout, keyed_dropout
from megazero.models.norm import LayerNorm, RMSNorm, split_rms_norm
from megazero.models.positions import Documents, LayerTables, Positions
from megazero.models.rotary import Rotate
from megazero.tp import ColumnParallelLinear, RowParallelLinear, TensorParallel, column_parallel


def make_norm(config: ModelConfig, size: int | None = None, **factory: Any) -> nn.Module:
    """Return the configuration's norm over ``size`` elements, which is the hidden dim if it is not given."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    size = config.hidden_size if size is None else size
    return kind(size, config.norm_epsilon, one_plus=config.apply_layernorm_1p, **factory)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap x tanh(x / cap), which lies between -cap and cap (Bello et al. 2017; Gemma Team 2024)."""
    return (x / cap).tanh() * cap


@contextmanager
def keyed_randomness(device: torch.device, key: Key) -> Iterator[None]:
    """Seed the device's default generator from ``key`` inside the block, and put its state back after."""
    if device.type == "cuda":
        torch.cuda.init()
        index = device.index if device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    state = generator.get_state()
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    try:
        yield
    finally:
        generator.set_state(state)


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call ``function`` without keeping its activations; the backward calls it again.

    Randomness is keyed, so no generator state is saved.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Return whether a fused CUDA kernel takes q [b, heads, s, d], k and v [b, kv heads, s, d] as they are.

    Without an additive mask, attention is causal. The answer is False for tensors that are not on CUDA. cuDNN's
    kernel is not asked: where the other two refuse, torch prefers math to it.
    """
    inputs = cuda.SDPAParams(q, k, v, mask, dropout, mask is None, q.shape[1] != k.shape[1])
    return cuda.can_use_flash_attention(inputs) or cuda.can_use_efficient_attention(inputs)


def math_note(
    config: ModelConfig, tp: TensorParallel, device: torch.device, dtype: torch.dtype, documents: bool = False
) -> str | None:
    """Return what to say at the start of a run whose attention gets no fused kernel on a GPU, or None if it gets one.

    ``documents`` says that attention stays within documents.
    """
    if device.type == "cpu":
        return None
    heads = tp.share(config.num_attention_heads, "num_attention_heads")
    if config.attn_logit_softcapping:
        return (
            "attention keeps matrices of length x length per head: no fused kernel of torch caps scores "
            f"(--attn-logit-softcapping {config.attn_logit_softcapping:g}); --recompute-granularity selective keeps "
            "those of one layer at a time"
        )
    q = torch.zeros(64, 1, heads, config.kv_channels, device=device, dtype=dtype, requires_grad=True)
    packed = Documents(starts=torch.zeros(1, 64, dtype=torch.int64, device=device)) if documents else None
    positions, kinds = Positions(config, tp), layer_kinds(config)
    windows = any(kind.window and kind.window < config.seq_length for kind in kinds)
    # One for each kind of mask; a window that is shorter than samples is shorter than these.
    of_masks = [replace(kinds[0], rotary=False, window=w) for w in ((None, 1) if windows else (None,))]
    masks = [tables.mask.dense for tables in positions.tables(of_masks, len(q), q, packed).values()]
    q = q.permute(1, 2, 0, 3)
    if all(fused(q, q, q, mask, config.attention_dropout) for mask in masks):
        return None
    biased = " with ALiBi" if config.position_embedding_type == "alibi" else ""
    biased += " within windows" if windows else ""
    biased += " within documents" if documents else ""
    return (
        "attention runs in torch's math kernel, which keeps a matrix of length x length per head: no fused one takes "
        f"{heads} heads of {config.kv_channels} in {str(dtype).removeprefix('torch.')}{biased} on this GPU; bf16 and "
        "a head size that is a multiple of 8 get one"
    )


class Attention(nn.Module):
    """Causal self-attention. Its heads are split over the tp axis, and its key/value heads may be grouped.

    With fewer key/value heads than ranks, neighbouring ranks hold the one that their query heads share.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        recompute: str,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.recompute = config, tp, recompute
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
        mask = tables.mask.dense
        cap = self.config.attn_logit_softcapping
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        probability = self.config.attention_dropout if key is not None else 0.0
        repeat = q.shape[1] // k.shape[1]
        grouped = repeat > 1 and q.is_cuda and not cap and fused(q, k, v, mask, probability)
        if repeat > 1 and not grouped:
            # On a GPU so that a fused kernel runs: without copies fp32 and ALiBi mostly fall to the math kernel.
            # On the CPU copies are as fast as enable_gqa in fp32 (261 and 256 ms) and faster in bf16
            # (252 and 334 ms: 4 x 512 tokens, 16 heads over 4, width 64, one thread).
            k, v = (t.unsqueeze(2).expand(-1, -1, repeat, -1, -1).flatten(1, 2) for t in (k, v))

        def attend() -> Tensor:
            if cap:
                assert mask is not None
                return _capped_attention(q, k, v, mask, self.config.attention_scale, cap, probability)
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=probability,
                is_causal=mask is None,
                scale=self.config.softmax_scale,
                enable_gqa=grouped,
            )

        if key is None or probability == 0:
            out = attend()
        else:
            with keyed_randomness(q.device, key):
                out = attend()
        return out.permute(2, 0, 1, 3).flatten(2)


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float, dropout: float
) -> Tensor:
    """Return attention whose scores are scaled and capped before the additive ``mask``. All are [b, heads, s, d].

    Scores are capped and normalised in at least fp32.
    """
    scores = (q * scale @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    weights = (soft_cap(scores, cap) + mask).softmax(-1).to(q.dtype)
    return F.dropout(weights, dropout) @ v


class FeedForward(nn.Module):
    """Computes down(f(gate(x)) * up(x)), where f is SiLU or GELU (SwiGLU and GEGLU, Shazeer 2020), or down(f(up(x))),
    where f is GELU or relu(x)^2 (So et al. 2021). GELU is exact or by tanh."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, **factory: Any) -> None:
        super().__init__()
        self.tp, self.config = tp, config
        h, ffn, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        self.gate_proj = ColumnParallelLinear(h, ffn, tp, bias=bias, **factory) if config.gated_mlp else None
        self.up_proj = ColumnParallelLinear(h, ffn, tp, bias=bias, **factory)
        self.down_proj = RowParallelLinear(ffn, h, tp, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        if self.gate_proj is None:
            return self.down_proj(self._activation(self.up_proj(x)))
        linears = [(m.weight, m.bias) for m in (self.gate_proj, self.up_proj)]
        gate, up = column_parallel(x, linears, self.tp)
        return self.down_proj(self._activation(gate) * up)

    def _activation(self, x: Tensor) -> Tensor:
        if self.config.swiglu:
            return F.silu(x)
        if self.config.squared_relu:
            return F.relu(x).square()
        return F.gelu(x, approximate="tanh" if self.config.openai_gelu else "none")


class DecoderLayer(nn.Module):
    """Computes x + attention(norm(x)), then x + feed_forward(norm(x)).

    Parallel blocks (Wang and Komatsuzaki 2021) compute x + attention(norm(x)) + feed_forward(norm(x)), with one norm
    for both or with two. With norms of outputs it is x + norm(attention(x)), then x + norm(feed_forward(x)); with
    norms on both sides (Ding et al. 2021), x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x))).

    ``recompute`` is as in Decoder. ``compiled`` is ``_layer`` after torch.compile (compilation.py), or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        recompute: str,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.recompute = config, tp, recompute

        def norm(name: str) -> nn.Module | None:
            held = name in LAYER_NORMS[config.transformer_block_type]
            return make_norm(config, **factory) if held else None

        self.compiled: Callable[..., Tensor] | None = None
        self.input_norm = norm("input_norm")
        self.attention = Attention(config, tp, recompute, **factory)
        self.attention_output_norm = norm("attention_output_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp = FeedForward(config, tp, **factory)
        self.mlp_output_norm = norm("mlp_output_norm")

    def forward(self, x: Tensor, tables: LayerTables, dropout: LayerDropout = NO_DROPOUT) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape.

        ``tables`` are those of the layer's kind (``Positions.tables``).
        """
        layer = self._layer if self.compiled is None else partial(self.compiled, self)
        if self.recompute == "full" and torch.is_grad_enabled():
            return recomputed(layer, x, tables, dropout)
        return layer(x, tables, dropout)

    def _layer(self, x: Tensor, tables: LayerTables, dropout: LayerDropout) -> Tensor:
        of_attention, of_mlp = (None, None) if dropout.outputs is None else dropout.outputs.unbind()
        normed = _normed(self.input_norm, x)
        attended = _normed(self.attention_output_norm, self.attention(normed, tables, dropout.attention))
        attended = self._added(x, attended, of_attention)
        if not self.config.parallel_block:
            normed = _normed(self.mlp_norm, attended)
        elif self.mlp_norm is not None:
            normed = self.mlp_norm(x)
        fed = _normed(self.mlp_output_norm, self.mlp(normed))
        return self._added(attended, fed, of_mlp)

    def _added(self, x: Tensor, output: Tensor, words: Tensor | None) -> Tensor:
        """Return the residual ``x`` and the layer's ``output`` after dropout, times its multiplier."""
        dropped = keyed_dropout(output, self.config.hidden_dropout, words)
        return torch.add(x, dropped, alpha=self.config.residual_multiplier)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
