"""Which experts each token goes to, and with which probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.moe.dispatch import Sizes


@dataclass
class Decision:
    """The experts of a micro-batch's tokens in one layer.

    It is taken once: by the first forward, or beforehand by whoever replays another run. A recompute reads it, since
    rounding may turn a near tie around. experts: [T, k] int32, the likeliest first; None until it is taken.
    sizes: what ranks that share the experts have told each other of it; None until they have.
    """

    experts: Tensor | None = None
    sizes: Sizes | None = None


class _Scores(torch.autograd.Function):
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
    x: Tensor, weight: Tensor, topk: int, pre_softmax: bool, decision: Decision
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, [T, topk] int64, and its probability of each, [T, topk].

    x: tokens [T, h]. weight: of the router, [experts, h]. Scores are computed in at least fp32, and so are
    probabilities. pre_softmax: of all experts' scores; else of the chosen ones', so that they add up to 1.
    """
    scores = _Scores.apply(x, weight)
    if decision.experts is None:
        decision.experts = scores.detach().topk(topk, dim=-1).indices.to(torch.int32)
    experts = decision.experts.long()
    if pre_softmax:
        return experts, scores.softmax(-1).gather(-1, experts)
    return experts, scores.gather(-1, experts).softmax(-1)
