"""Mamba-2 of a layer (config/model/mixers/mamba.py).

Each head has a state S [n, p], which a token decays and adds to, and reads:

    S_t = a_t S_(t-1) + b_t (d_t x_t)^T    a_t = exp(-exp(A_log) d_t)    y_t = S_t^T c_t + D x_t

Within a chunk that begins with S_0 let d_ij = a_(j+1) .. a_i for j <= i, d_i = a_1 .. a_i, and rows of B, C and of
V, which are the d_t x_t, be tokens (section 6 of the paper):

    Y = diag(d) C S_0 + (d_ij c_i^T b_j)_ij V    S_C = d_C S_0 + B^T diag(d_Cj) V
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config.model.mixers.mamba import KERNEL
from megazero.config.model.section import ModelConfig
from megazero.cp import ContextParallel
from megazero.models.dropout import Key
from megazero.models.layer import recomputed
from megazero.models.mixers.chunks import CausalConvolution, chunked, decays, joined, wide
from megazero.models.positions import LayerTables
from megazero.tp import ColumnParallelLinear, RowParallelLinear, TensorParallel, column_parallel


class Mamba(nn.Module):
    """A state-space layer, whose groups with their heads are split over the tp axis. Ranks that share samples would
    have to hand its state on, which is not built."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, cp: ContextParallel, recompute: str, **factory: Any
    ) -> None:
        super().__init__()
        assert cp.size == 1
        self.config, self.tp, self.recompute = config, tp, recompute
        h, inner, state, heads = (
            config.hidden_size,
            config.mamba_size,
            config.mamba_states_size,
            config.mamba_num_heads,
        )
        self.A_log, self.dt_bias, self.D = (
            nn.Parameter(torch.empty(tp.share(heads, "mamba_num_heads"), **factory)) for _ in range(3)
        )
        self.z_proj, self.x_proj, self.b_proj, self.c_proj, self.dt_proj = (
            ColumnParallelLinear(h, rows, tp, bias=False, **factory)
            for rows in (inner, inner, state, state, heads)
        )
        self.x_conv, self.b_conv, self.c_conv = (
            CausalConvolution(tp.share(size, "channels"), KERNEL, bias=True, **factory)
            for size in (inner, state, state)
        )
        groups = tp.share(config.mamba_num_groups, "mamba_num_groups")
        self.norm = GatedNorm(tp.share(inner, "channels"), groups, config.norm_epsilon, **factory)
        self.out_proj = RowParallelLinear(inner, h, tp, bias=False, **factory)

    def forward(self, x: Tensor, tables: LayerTables, key: Key | None) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        c, starts = self.config, tables.attention.made
        linears = (self.z_proj, self.x_proj, self.b_proj, self.c_proj, self.dt_proj)
        z, x, keys, queries, step = column_parallel(x, [(m.weight, None) for m in linears], self.tp)
        x, keys, queries = (
            F.silu(convolve(y, starts)).unflatten(-1, (-1, width))
            for y, convolve, width in (
                (x, self.x_conv, c.mamba_head_dim),
                (keys, self.b_conv, c.mamba_state_dim),
                (queries, self.c_conv, c.mamba_state_dim),
            )
        )
        a, bias, skip = (p.to(wide(p)) for p in (self.A_log, self.dt_bias, self.D))
        step = F.softplus(step.to(bias.dtype) + bias).clamp(min=c.mamba_min_time_step)
        mixed = (queries, keys, x, -a.exp() * step, step, skip, starts)
        again = self.recompute == "selective" and torch.is_grad_enabled()
        out = recomputed(state_space, *mixed) if again else state_space(*mixed)
        return self.out_proj(self.norm(out.flatten(2), z))


class GatedNorm(nn.Module):
    """Computes root-mean-square norms of consecutive groups of x silu(gate), times ``weight`` [size], in the dtype of
    the gate, of x in at least fp32."""

    def __init__(self, size: int, groups: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(size, **factory))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        groups = (x * F.silu(gate.to(x.dtype))).unflatten(-1, (self.groups, -1))
        out = F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2) * self.weight.to(x.dtype)
        return out.to(gate.dtype)


def state_space(
    c: Tensor, b: Tensor, x: Tensor, decay: Tensor, step: Tensor, skip: Tensor, starts: Tensor | None = None
) -> Tensor:
    """Return [s, b, heads, p] in at least fp32, of c and b [s, b, groups, n] and of x [s, b, heads, p]. Consecutive
    heads share a group's c and b.

    decay: log a, and step: d, [s, b, heads], at least fp32. skip: D, [heads]. starts: int64 [b, s], where each
    token's document begins, if the state ends with a document.
    """
    x, groups, passed = x.to(wide(x)), b.shape[2], decays(decay, starts)

    def grouped(y: Tensor) -> Tensor:
        """Return [chunks, b, groups, heads of a group, tokens, ...]."""
        return y.unflatten(2, (groups, -1))

    def beside(y: Tensor) -> Tensor:
        """Return [chunks, b, groups, tokens, heads of a group x p]: they meet the same c and b."""
        return y.transpose(3, 4).flatten(4)

    c, b = (chunked(y.to(x.dtype)) for y in (c, b))
    v = grouped(chunked(x * step.unsqueeze(-1)))
    added = b.mT @ beside(v * grouped(passed.end).unsqueeze(-1))
    kept = grouped(passed.through).repeat_interleave(v.shape[-1], 3).mT
    state, states = torch.zeros_like(added[0]), []
    for own, share in zip(added.unbind(), kept.unbind(), strict=True):
        states.append(state)
        state = state * share + own
    before = (c @ torch.stack(states)).unflatten(4, (-1, v.shape[-1])).transpose(3, 4)
    out = ((c @ b.mT).unsqueeze(3) * grouped(passed.between)) @ v
    out = out + before * grouped(passed.begin).unsqueeze(-1)
    return joined(out.flatten(2, 3), len(x)) + x * skip.unsqueeze(-1)
