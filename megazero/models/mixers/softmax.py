"""Softmax attention of a layer (config/model/mixers/softmax.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megazero.config.model.section import ModelConfig
from megazero.cp import ContextParallel, gather, swap, swap_back
from megazero.models.attention import attend
from megazero.models.dropout import Key
from megazero.models.largest_scores import LargestScores
from megazero.models.layer import recomputed
from megazero.models.norm import RMSNorm, make_norm, normed, split_rms_norm
from megazero.models.positions import LayerTables
from megazero.models.rotary import Rotate
from megazero.tp import ColumnParallelLinear, RowParallelLinear, TensorParallel, column_parallel


class SoftmaxAttention(nn.Module):
    """Causal self-attention. Its heads are split over the tp axis, and its key/value heads may be grouped.

    With fewer key/value heads than ranks, neighbouring ranks hold the one that their query heads share. Each of the
    cp ranks attends to whole samples with its share of these heads, and of the queries.
    """

    largest: LargestScores | None = None  # of a run that asks for them

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, cp: ContextParallel, recompute: str, **factory: Any
    ) -> None:
        super().__init__()
        self.config, self.tp, self.cp, self.recompute = config, tp, cp, recompute
        h, bias = config.hidden_size, config.qkv_bias
        queries = config.query_projection_size
        gates = 1 + config.attention_output_gate
        self.q_proj = ColumnParallelLinear(h, gates * queries, tp, bias=bias, **factory)
        keys = max(config.num_query_groups, tp.size) * config.kv_channels  # of all ranks, copies counted
        self.k_proj = ColumnParallelLinear(h, keys, tp, bias=bias, **factory)
        self.v_proj = ColumnParallelLinear(h, keys, tp, bias=bias, **factory)
        self.o_proj = RowParallelLinear(queries, h, tp, bias=config.add_attention_bias, **factory)
        heads = tp.share(config.num_attention_heads, "num_attention_heads")
        learnt = config.softmax_type == "learnable"
        self.sinks = nn.Parameter(torch.empty(heads, **factory)) if learnt else None
        self.norms_all_heads = config.qk_norm == "all-heads"
        self.q_norm, self.k_norm = (
            make_norm(config, config.kv_channels if config.qk_norm == "head" else rows, **factory)
            if config.qk_norm != "none"
            else None
            for rows in (tp.share(queries, "queries"), self.k_proj.weight.shape[0])
        )

    def forward(self, x: Tensor, tables: LayerTables, key: Key | None) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        linears = [(m.weight, m.bias) for m in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = column_parallel(x, linears, self.tp)
        gate = None
        if self.config.attention_output_gate:  # rows of a head: its query, its gate
            q, gate = (y.flatten(2) for y in q.unflatten(-1, (-1, 2, self.config.kv_channels)).unbind(-2))
        if self.norms_all_heads:
            assert isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)
            q, k = split_rms_norm((q, k), (self.q_norm, self.k_norm), self.tp)
        q, k, v = (y.unflatten(-1, (-1, self.config.kv_channels)) for y in (q, k, v))
        if not self.norms_all_heads:
            q, k = normed(self.q_norm, q), normed(self.k_norm, k)
        if self.recompute == "selective" and torch.is_grad_enabled():
            out = recomputed(self._core, q, k, v, tables, key)
        else:
            out = self._core(q, k, v, tables, key)
        return self.o_proj(out if gate is None else out * gate.sigmoid())

    def _core(self, q: Tensor, k: Tensor, v: Tensor, tables: LayerTables, key: Key | None) -> Tensor:
        """``q`` is [s, b, heads, d], ``k`` and ``v`` are [s, b, kv heads, d]. Returns [s, b, heads * d]."""
        if tables.rotary is not None:
            q, k = (Rotate.apply(x, *tables.rotary, self.config.rotary_interleaved) for x in (q, k))
        q, k, v = swap((q, k, v), self.cp)
        k, v = gather((k, v), self.cp)
        if self.largest is not None:
            self.largest.take(q, k, tables.attention.masking)
        out = attend(
            q, k, v, tables.attention, self.config.attention_dropout, key, self._own_sinks(q.shape[2])
        )
        return swap_back(out, self.cp).flatten(2)

    def _own_sinks(self, heads: int) -> Tensor | None:
        """Return the sinks of the ``heads`` that this rank has between the swaps, [heads]: learned ones, or zeros."""
        if self.config.softmax_type == "off-by-one":
            return self.o_proj.weight.new_zeros(heads)
        return None if self.sinks is None else self.sinks.narrow(0, self.cp.heads.rank * heads, heads)
