"""Gated delta net of a layer (config/model/mixers/gated_delta_net.py).

Each head of values has a state S [dk, dv], which a token decays, corrects at its key, and reads by its query:

    S_t = a_t S_(t-1) + k_t u_t^T    u_t = b_t (v_t - a_t S_(t-1)^T k_t)    o_t = S_t^T q_t

Within a chunk that begins with S_0 let d_ij = a_(j+1) .. a_i for j <= i, d_i = a_1 .. a_i, and rows of Q, K, V be
tokens. The u_t are the rows of U, which solves a triangular system; all else are products of matrices:

    (I + L) U = diag(b) V - diag(b d) K S_0    L_ij = b_i d_ij k_i^T k_j for j < i
    O = diag(d) Q S_0 + (d_ij q_i^T k_j)_ij U    S_C = d_C S_0 + K^T diag(d_Cj) U
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.config.model.section import ModelConfig
from megazero.cp import ContextParallel
from megazero.models.dropout import Key
from megazero.models.layer import recomputed
from megazero.models.mixers.chunks import CausalConvolution, chunked, decays, joined, wide
from megazero.models.norm import RMSNorm
from megazero.models.positions import LayerTables
from megazero.tp import ColumnParallelLinear, RowParallelLinear, TensorParallel, column_parallel

LENGTH_EPSILON = 1e-6  # beside the squared length of a query or key, as published models have it


class GatedDeltaNet(nn.Module):
    """Linear attention, whose key heads with their values are split over the tp axis. Ranks that share samples would
    have to hand its state on, which is not built."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, cp: ContextParallel, recompute: str, **factory: Any
    ) -> None:
        super().__init__()
        assert cp.size == 1
        self.config, self.tp, self.recompute = config, tp, recompute
        h, key, value = config.hidden_size, config.linear_key_size, config.linear_value_size
        heads, kernel = config.linear_num_value_heads, config.linear_conv_kernel_dim
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.empty(tp.share(heads, "linear_num_value_heads"), **factory)) for _ in range(2)
        )
        self.in_q, self.in_k, self.in_v, self.in_z, self.in_b, self.in_a = (
            ColumnParallelLinear(h, rows, tp, bias=False, **factory)
            for rows in (key, key, value, value, heads, heads)
        )
        self.q_conv, self.k_conv, self.v_conv = (
            CausalConvolution(tp.share(size, "channels"), kernel, **factory) for size in (key, key, value)
        )
        self.norm = RMSNorm(config.linear_value_head_dim, config.norm_epsilon, **factory)
        self.out_proj = RowParallelLinear(value, h, tp, bias=False, **factory)

    def forward(self, x: Tensor, tables: LayerTables, key: Key | None) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        c, starts = self.config, tables.attention.made
        width, values = c.linear_key_head_dim, c.linear_value_head_dim
        linears = (self.in_q, self.in_k, self.in_v, self.in_z, self.in_b, self.in_a)
        q, k, v, z, b, a = column_parallel(x, [(m.weight, None) for m in linears], self.tp)
        b, a = (y.to(wide(y)) for y in (b, a))
        q, k, v = (
            F.silu(convolve(y, starts)).unflatten(-1, (-1, each))
            for y, convolve, each in (
                (q, self.q_conv, width),
                (k, self.k_conv, width),
                (v, self.v_conv, values),
            )
        )
        decay = -self.A_log.to(a.dtype).exp() * F.softplus(a + self.dt_bias.to(a.dtype))
        mixed = (q, k, v, decay, b.sigmoid(), starts)
        again = self.recompute == "selective" and torch.is_grad_enabled()
        out = recomputed(gated_delta_rule, *mixed) if again else gated_delta_rule(*mixed)
        z = z.unflatten(-1, (-1, values))
        return self.out_proj((self.norm(out) * F.silu(z)).flatten(2))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None = None
) -> Tensor:
    """Return [s, b, heads, dv] in the dtype of v, of q and k [s, b, key heads, dk], which are made as long as 1 and,
    of q, divided by sqrt(dk), and of v [s, b, heads, dv]. In between all is at least fp32. Consecutive heads share a
    key.

    decay: log a, [s, b, heads], at least fp32. beta: b, as that. starts: int64 [b, s], where each token's document
    begins, if the state ends with a document.
    """
    length, repeat, dtype, passed = len(q), v.shape[2] // q.shape[2], v.dtype, decays(decay, starts)
    q, k = (chunked(unit(x).repeat_interleave(repeat, 2)) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    v, beta = (chunked(x.to(wide(x))) for x in (v, beta))
    weighted, begin = k * beta.unsqueeze(-1), passed.begin.unsqueeze(-1)
    right = torch.cat((v * beta.unsqueeze(-1), weighted * begin), -1)
    system = (weighted @ k.mT) * passed.between  # the diagonal is not read
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, of_state = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores, ends = (q @ k.mT) * passed.between, k * passed.end.unsqueeze(-1)
    parts = (q * begin, scores, u, of_state, ends.mT, passed.through.unsqueeze(-1))
    state, out = v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1]), []
    for reads, scores, own, of_before, keys, kept in zip(*(part.unbind() for part in parts), strict=True):
        own = own - of_before @ state
        out.append(reads @ state + scores @ own)
        state = state * kept + keys @ own
    return joined(torch.stack(out), length).to(dtype)


def unit(x: Tensor) -> Tensor:
    """Return vectors along the last dim with the length 1, in at least fp32."""
    x = x.to(wide(x))
    return x * (x.square().sum(-1, keepdim=True) + LENGTH_EPSILON).rsqrt()
