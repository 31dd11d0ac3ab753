"""A mixture of experts in the place of a layer's MLP (Shazeer et al. 2017; Fedus et al. 2022)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megazero.config.model.section import ModelConfig
from megazero.models.feed_forward import FeedForward, activation
from megazero.moe import Decision, Dispatch, ExpertParallel, grouped_linear, route
from megazero.tp import TensorParallel


class Linear(nn.Module):
    """Holds the matrix [out, in] of a linear without bias, or one of each expert, [experts, out, in]."""

    def __init__(self, *shape: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, **factory))


class Experts(nn.Module):
    """The matrices of this rank's experts, stacked: of each projection one Parameter [experts, out, in]."""

    def __init__(self, config: ModelConfig, ep: ExpertParallel, **factory: Any) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config = config
        count, h, width = len(ep.own(config.num_experts)), config.hidden_size, config.expert_width
        self.gate_proj = Linear(count, width, h, **factory) if config.gated_mlp else None
        self.up_proj = Linear(count, width, h, **factory)
        self.down_proj = Linear(count, h, width, **factory)

    def forward(self, rows: Tensor, probabilities: Tensor, ends: Tensor) -> Tensor:
        """``rows`` [n, h] are ordered by expert, and end there at ``ends``. The result has the same shape.

        A row's probability multiplies its activation, which is narrower than the output.
        """
        up = grouped_linear(rows, self.up_proj.weight, ends)
        if self.gate_proj is None:
            inner = activation(self.config, up)
        else:
            inner = activation(self.config, grouped_linear(rows, self.gate_proj.weight, ends)) * up
        inner = (inner * probabilities.unsqueeze(-1)).to(rows.dtype)
        return grouped_linear(inner, self.down_proj.weight, ends)


class MixtureOfExperts(nn.Module):
    """Computes the sum over a token's experts of p down(f(gate(x)) * up(x)), and what the shared experts add.

    A token's experts may lie on other ranks of ``ep``, to which its row goes. The shared experts are one MLP. Their
    output may be multiplied by sigmoid(w x).
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, ep: ExpertParallel, **factory: Any) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config, self.ep = config, ep
        h, shared = config.hidden_size, config.moe_shared_expert_intermediate_size
        self.router = Linear(config.num_experts, h, **factory)
        self.experts = Experts(config, ep, **factory)
        self.shared_expert = FeedForward(config, tp, shared, **factory) if shared else None
        gated = shared and config.moe_shared_expert_gate
        self.shared_gate = Linear(1, h, **factory) if gated else None

    def forward(self, x: Tensor, decision: Decision) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        config, tokens = self.config, x.flatten(0, 1)
        assert config.num_experts is not None
        chosen, probabilities = route(
            tokens, self.router.weight, config.moe_router_topk, config.moe_router_pre_softmax, decision
        )
        dispatch = Dispatch(chosen, config.num_experts, self.ep, decision.sizes)
        decision.sizes = dispatch.sizes
        rows = self.experts(*dispatch.spread(tokens, probabilities), dispatch.ends)
        out = dispatch.collect(rows).view_as(x)
        if self.shared_expert is None:
            return out
        beside = self.shared_expert(x)
        if self.shared_gate is not None:
            beside = beside * nn.functional.linear(x, self.shared_gate.weight).sigmoid()
        return out + beside
