"""A mixture of experts in the place of a layer's MLP (Shazeer et al. 2017; Fedus et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megazero.config.model.section import ModelConfig
from megazero.cp import ContextParallel, summed
from megazero.kernels.weighted_swiglu import weighted_swiglu
from megazero.models.feed_forward import FeedForward, activation
from megazero.moe import (
    Balance,
    BalanceLosses,
    Decision,
    ExpertParallel,
    LevelCounts,
    Router,
    RowCounts,
    dispatch_to,
    evened,
    route,
    weighted,
)
from megazero.tp import TensorParallel


class Linear(nn.Module):
    """Holds the matrix [out, in] of a linear without bias, or one of each expert, [experts, out, in]."""

    def __init__(self, *shape: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, **factory))


class RouterWeights(Linear):
    """Holds the router's matrix, and where experts are chosen with a bias, that, which is no parameter.

    The bias is fp32 [experts] whatever the dtype of the parameters, and zero at the start. A step moves it
    (Wang et al. 2024, arXiv 2408.15664). Its name is that of the published families that have one.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        assert config.num_experts is not None
        super().__init__(config.num_experts, config.hidden_size, **factory)
        # On the CPU: what is on the meta device has no value.
        bias = torch.zeros(config.num_experts, device="cpu") if config.moe_router_enable_expert_bias else None
        self.register_buffer("e_score_correction_bias", bias)


class Experts(nn.Module):
    """The matrices of this rank's experts, stacked: of each projection one Parameter [experts, out, in]."""

    def __init__(self, config: ModelConfig, ep: ExpertParallel, **factory: Any) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config, self.grouped = config, ep.product.grouped
        count, h, width = len(ep.own(config.num_experts)), config.hidden_size, config.expert_width
        self.gate_proj = Linear(count, width, h, **factory) if config.gated_mlp else None
        self.up_proj = Linear(count, width, h, **factory)
        self.down_proj = Linear(count, h, width, **factory)

    def forward(self, rows: Tensor, probabilities: Tensor, ends: Tensor) -> Tensor:
        """``rows`` [n, h] are ordered by expert, and end there at ``ends``. The result has the same shape.

        A row's probability multiplies its activation, which is narrower than the output.
        """
        up = self.grouped(rows, self.up_proj.weight, ends)
        if self.gate_proj is None:
            inner = weighted(activation(self.config, up), probabilities)
        else:
            gate = self.grouped(rows, self.gate_proj.weight, ends)
            if self.config.swiglu:
                inner = weighted_swiglu(gate, up, probabilities)
            else:
                inner = weighted(activation(self.config, gate) * up, probabilities)
        return self.grouped(inner, self.down_proj.weight, ends)


def router_of(config: ModelConfig) -> Router:
    """Return how the experts of a model are chosen."""
    return Router(
        topk=config.moe_router_topk,
        score_function=config.moe_router_score_function,
        pre_softmax=config.moe_router_pre_softmax,
        scaling_factor=config.moe_router_topk_scaling_factor,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        group_best=config.group_best,
    )


class MixtureOfExperts(nn.Module):
    """Computes the sum over a token's experts of p down(f(gate(x)) * up(x)), and what the shared experts add.

    A token's experts may lie on other ranks of ``ep``, to which its row goes. The shared experts are one MLP. Their
    output may be multiplied by sigmoid(w x).
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        cp: ContextParallel,
        ep: ExpertParallel,
        losses: BalanceLosses,
        **factory: Any,
    ) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config, self.tp, self.cp, self.ep = config, tp, cp, ep
        h, shared = config.hidden_size, config.moe_shared_expert_intermediate_size
        self.router, self.choice = RouterWeights(config, **factory), router_of(config)
        self.balance = Balance(losses, self.choice, config.num_experts)
        self.experts = Experts(config, ep, **factory)
        # Of the micro-batches under way: a recompute does not ask the other ranks again.
        self.row_counts = WeakKeyDictionary[Decision, RowCounts | LevelCounts | None]()
        self.shared_expert = FeedForward(config, tp, shared, **factory) if shared else None
        gated = shared and config.moe_shared_expert_gate
        self.shared_gate = Linear(1, h, **factory) if gated else None

    def forward(self, x: Tensor, decision: Decision) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape."""
        out = self._routed(x, decision)
        if self.shared_expert is None:
            return out
        beside = self.shared_expert(x)
        if self.shared_gate is not None:
            beside = beside * nn.functional.linear(x, self.shared_gate.weight).sigmoid()
        return out + beside

    @torch._disable_dynamo  # a decision is taken once and counted, and experts get other rows in every micro-batch
    def _routed(self, x: Tensor, decision: Decision) -> Tensor:
        """Return the sum of each token's experts."""
        config, tokens = self.config, x.flatten(0, 1)
        assert config.num_experts is not None
        bias, even = self.router.e_score_correction_bias, self.even(x.shape[1])
        routed = route(tokens, self.router.weight, self.choice, decision, bias, even)
        probabilities = routed.probabilities
        if self.training and torch.is_grad_enabled():
            length = x.shape[0] * (self.tp.size if self.tp.sharded_sequence else 1) * self.cp.size
            probabilities = self.balance.attach(routed, decision, x.shape[1], length, self._summed)
        dispatch = dispatch_to(routed.experts, config.num_experts, self.ep, self.row_counts.get(decision))
        self.row_counts[decision] = dispatch.counts
        rows = self.experts(*dispatch.spread(tokens, probabilities), dispatch.ends)
        return dispatch.collect(rows).view_as(x)

    def even(self, samples: int) -> Callable[[Tensor], Tensor] | None:
        """Return what ranks the experts of these samples' tokens in training, where micro-batches choose evenly."""
        losses = self.balance.losses
        if not (losses.even and self.training):
            return None
        return partial(evened, samples=samples, size=losses.samples, gathered=self._gathered)

    def _gathered(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens of the samples whose tokens here have these."""
        if self.tp.sharded_sequence:
            logits = self.tp.start_gather(logits).wait()
        for peers in (self.cp.heads, *self.cp.keys):
            logits = peers.gather(logits).flatten(0, 1)
        return logits

    def _summed(self, counts: Tensor) -> Tensor:
        """Add up counts over the ranks that share this one's samples."""
        if self.tp.sharded_sequence:
            counts = self.tp.start_sum(counts).wait()
        return summed(counts, self.cp)
