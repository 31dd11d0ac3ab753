"""Lion, the optimizer of Chen et al. 2023 (arXiv 2302.06675, algorithm 2): the sign of a momentum is the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Steps each parameter w with its gradient g, its momentum m (of w's shape and dtype, from 0) and the rate r:

    w = (1 - r * weight_decay) * w - r * sign(beta1 * m + (1 - beta1) * g), then m = beta2 * m + (1 - beta2) * g.

    Every element of an update has the size of the rate, so rates are 3 to 10 times smaller than AdamW's, and weight
    decays as much larger.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Return the closure's loss, or None without a closure."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], float(group["lr"])
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                momentum = state["exp_avg"]
                update = momentum.mul(beta1).add_(p.grad, alpha=1 - beta1).sign_()
                p.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate)
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss
