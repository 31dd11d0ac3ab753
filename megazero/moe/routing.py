"""Which experts each token goes to, and with which probability."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Decision:
    """The experts of a micro-batch's tokens in one layer.

    It is taken once: by the first forward, or beforehand by whoever replays another run. A recompute reads it, since
    rounding may turn a near tie around. experts: [T, k] int32, the likeliest first; None until it is taken.
    """

    experts: Tensor | None = None


def route(
    x: Tensor, weight: Tensor, topk: int, pre_softmax: bool, decision: Decision
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, [T, topk] int64, and its probability of each, [T, topk].

    x: tokens [T, h]. weight: of the router, [experts, h]. Scores are computed in at least fp32, and so are
    probabilities. pre_softmax: of all experts' scores; else of the chosen ones', so that they add up to 1.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = F.linear(x.to(wide), weight.to(wide))
    if decision.experts is None:
        decision.experts = scores.detach().topk(topk, dim=-1).indices.to(torch.int32)
    experts = decision.experts.long()
    if pre_softmax:
        return experts, scores.softmax(-1).gather(-1, experts)
    return experts, scores.gather(-1, experts).softmax(-1)
