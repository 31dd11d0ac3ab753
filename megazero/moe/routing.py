"""Which experts each token goes to, and with which probability, which multiplies its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_LEAST = 1e-20  # added to sums of scores that divide, as in Megatron and DeepSeek-V3
_LEAST_SUM = 1e-8  # and to sums of exponentials in sinkhorn, as in Megatron

# What the product of a token and an expert alone says of the expert. softmax looks at all experts of the token.
SCORES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "sigmoid": torch.sigmoid,
    }
)


@dataclass(eq=False)
class Decision:
    """The experts of a micro-batch's tokens in one layer.

    It is taken once: by the first forward, or beforehand by whoever replays another run. A recompute reads it, since
    rounding may turn a near tie around. experts: [T, k] int32, the likeliest first; None until it is taken. plain: as
    many, by scores alone, where bias or groups chose others and a loss counts these. counts: [blocks, experts],
    what the layer's balance has counted of it (balance.py), once.
    """

    experts: Tensor | None = None
    plain: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True)
class Router:
    """How experts are chosen and weighted. The words and the formulas are Megatron's (moe_utils.py, 0.16).

    topk: experts of a token. score_function: "softmax", or a name of SCORES. pre_softmax: probabilities are
    softmax's over all experts; else over the chosen ones, so that they add up to 1. SCORES of several chosen
    experts are divided by their sum. scaling_factor: of the probabilities. num_groups, group_topk: experts lie in
    groups, and a token goes to experts of ``group_topk`` of them, those whose ``group_best`` experts, by default
    topk // group_topk, have the largest sums (DeepSeek-V3, arXiv 2412.19437).
    """

    topk: int
    score_function: str = "softmax"
    pre_softmax: bool = False
    scaling_factor: float | None = None
    num_groups: int | None = None
    group_topk: int | None = None
    group_best: int | None = None

    @property
    def plain(self) -> bool:
        """Tell whether the likeliest experts of all are chosen, whatever their groups. A bias comes with SCORES."""
        return self.group_topk is None and self.score_function == "softmax"

    def shares(self, logits: Tensor) -> Tensor:
        """Return the likelihood of every expert, [T, experts]; those of a token add up to 1."""
        if self.score_function == "softmax":
            return logits.softmax(-1)
        return _shared(SCORES[self.score_function](logits))

    def ranks(
        self,
        logits: Tensor,
        bias: Tensor | None = None,
        even: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return by what experts are chosen, [T, experts]. bias: [experts], which probabilities do not have. even:
        makes it of the logits instead, for all tokens of a micro-batch together."""
        if even is not None:
            return even(logits)
        if self.score_function == "softmax":
            return logits.softmax(-1) if self.pre_softmax else logits
        scores = SCORES[self.score_function](logits)
        return scores if bias is None else scores + bias

    def best(self, ranks: Tensor) -> Tensor:
        """Return the experts that are chosen by ``ranks``, [T, topk] int64."""
        if self.group_topk is not None:
            ranks = self._within(ranks, self._group_sums(ranks).topk(self.group_topk).indices)
        return ranks.topk(self.topk).indices

    def regret(self, ranks: Tensor, chosen: Tensor) -> Tensor:
        """Return by how much each token's worst expert, or group, of ``chosen`` [T, topk] int64 is below the last one
        that ``best`` takes, [T]. Where groups are as good, it is to be 0 whichever of them were taken."""
        behind = ranks.new_zeros(len(ranks))
        if self.group_topk is not None:
            sums = self._group_sums(ranks)
            taken = chosen // (ranks.shape[-1] // sums.shape[-1])
            behind = sums.topk(self.group_topk).values[:, -1] - sums.gather(-1, taken).amin(-1)
            # Of the groups, those that were taken come first.
            ranks = self._within(ranks, sums.scatter(-1, taken, torch.inf).topk(self.group_topk).indices)
        return behind.maximum(ranks.topk(self.topk).values[:, -1] - ranks.gather(-1, chosen).amin(-1))

    def _group_sums(self, ranks: Tensor) -> Tensor:
        """Return by what groups are chosen, [T, num_groups]."""
        assert self.num_groups is not None and self.group_topk is not None
        groups = ranks.unflatten(-1, (self.num_groups, -1))
        return groups.topk(self.group_best or self.topk // self.group_topk).values.sum(-1)

    def _within(self, ranks: Tensor, groups: Tensor) -> Tensor:
        """Return ``ranks`` that are -inf outside of ``groups``, [T, group_topk]."""
        assert self.num_groups is not None
        inside = ranks.unflatten(-1, (self.num_groups, -1))
        kept = torch.zeros_like(inside[..., 0], dtype=torch.bool).scatter_(-1, groups, True)
        return inside.where(kept.unsqueeze(-1), -torch.inf).flatten(-2)

    def probabilities(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Return the probability of each of ``experts``, [T, topk]."""
        if self.score_function != "softmax":
            shares = SCORES[self.score_function](logits.gather(-1, experts))
            shares = _shared(shares) if self.topk > 1 else shares
        elif self.pre_softmax:
            shares = logits.softmax(-1).gather(-1, experts)
        else:
            shares = logits.gather(-1, experts).softmax(-1)
        return shares if self.scaling_factor is None else shares * self.scaling_factor


def _shared(scores: Tensor) -> Tensor:
    """Return the scores, which are not negative, over their sum."""
    return scores / (scores.sum(-1, keepdim=True) + _LEAST)


def evened(logits: Tensor, samples: int, size: int, gathered: Callable[[Tensor], Tensor]) -> Tensor:
    """Return logits [T, experts] by which each micro-batch's tokens go to experts about evenly.

    Tokens of ``samples`` alternate; a micro-batch is ``size`` of these. gathered: returns the logits [n, experts] of
    a micro-batch on all ranks that share it, for those on this one.
    """
    micro_batches = logits.unflatten(0, (-1, samples)).split(size, 1)
    prices = [sinkhorn(gathered(each.flatten(0, 1))) for each in micro_batches]
    return torch.cat([each + own for each, own in zip(micro_batches, prices, strict=True)], 1).flatten(0, 1)


def sinkhorn(logits: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Return what to add to the logits [T, experts] for Megatron's choice (moe_utils.py: sinkhorn), [experts].

    exp(logits) is scaled until each token and each expert has the same sum (S-BASE: Clark et al. 2022, arXiv
    2202.01169). The factor of a token changes none of its choices, so those of experts are all.
    """
    likely, tokens, experts = logits.exp(), *logits.shape
    factor, change = logits.new_ones(experts), 1e9
    while change > tolerance:
        of_token = 1 / (tokens * ((likely * factor).sum(1) + _LEAST_SUM))
        before, factor = factor, 1 / (experts * (of_token @ likely + _LEAST_SUM))
        change = float((before - factor).abs().mean())
    return factor.log()


class Routed(NamedTuple):
    """The products of tokens and the router's weight, [T, experts] in at least fp32, the experts of each token,
    [T, topk] int64, and its probability of each, [T, topk] in the same dtype."""

    logits: Tensor
    experts: Tensor
    probabilities: Tensor


class _Logits(torch.autograd.Function):
    """The product of tokens and the router's weight in at least fp32, which keeps both in their own dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), weight.to(wide))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x = (grad @ weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        to_weight = (grad.t() @ x.to(grad.dtype)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return to_x, to_weight


def route(
    x: Tensor,
    weight: Tensor,
    router: Router,
    decision: Decision,
    bias: Tensor | None = None,
    even: Callable[[Tensor], Tensor] | None = None,
) -> Routed:
    """Return where tokens go.

    x: tokens [T, h]. weight: of the router, [experts, h]. bias: fp32 [experts], added to what experts are chosen by.
    even: what experts are chosen by instead, as in ``Router.ranks``.
    """
    logits = _Logits.apply(x, weight)
    if decision.experts is None:
        decision.experts = router.best(router.ranks(logits.detach(), bias, even)).to(torch.int32)
    experts = decision.experts.long()
    return Routed(logits, experts, router.probabilities(logits, experts))


def weighted(rows: Tensor, probabilities: Tensor) -> Tensor:
    """Return ``rows`` [n, w] times their ``probabilities`` [n], in the dtype of the rows.

    The bits are those of a product in the probabilities' dtype that is rounded. Without that product's own memory:
    with it this took 8.3 of the 115 ms of a step with 64 experts on an H100, by its profile.
    """
    return _Weighted.apply(rows, probabilities)


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, probabilities: Tensor) -> Tensor:
        ctx.save_for_backward(rows, probabilities)
        out = torch.empty_like(rows)
        torch.mul(rows, probabilities.unsqueeze(-1), out=out.view_as(out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, probabilities = ctx.saved_tensors
        to_rows = torch.mul(grad, probabilities.unsqueeze(-1), out=torch.empty_like(rows))
        return to_rows, (grad.to(probabilities.dtype) * rows).sum(-1)
