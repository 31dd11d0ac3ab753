"""AdEMAMix, the optimizer of Pagliardini et al. 2024 (arXiv 2409.03137): AdamW with a second, slow momentum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


class AdEMAMix(torch.optim.Optimizer):
    """Steps each parameter w with its gradient g and the rate r, at its step t. Averages m1 and m2 of g and v of g^2
    have w's shape and dtype, begin at 0, and have the decays beta1, beta3 and beta2:

    w = (1 - r * weight_decay) * w - r * (m1 / (1 - beta1^t) + alpha * m2) / (sqrt(v / (1 - beta2^t)) + eps).

    warmups: steps in which alpha grows from 0, linearly, and in which beta3 grows from beta1, its half-life linearly.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        warmups: tuple[int, int] = (0, 0),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        self.betas, self.alpha, self.warmups = betas, alpha, warmups

    def at(self, step: int) -> tuple[float, float]:
        """Return alpha and beta3 of a step, counted from 1."""
        (first, _, slow), (grown, slowed) = self.betas, (min(1.0, step / max(n, 1)) for n in self.warmups)
        if slowed < 1:  # of a decay b the half-life is log(1/2) / log(b)
            slow = math.exp(1 / ((1 - slowed) / math.log(max(first, 1e-99)) + slowed / math.log(slow)))
        return grown * self.alpha, slow

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Return the closure's loss, or None without a closure."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        beta1, beta2, _ = self.betas
        for group in self.param_groups:
            rate = float(group["lr"])
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())  # on the host, which reads it
                    for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq"):
                        state[name] = torch.zeros_like(p)
                state["step"] += 1
                step = int(state["step"])
                alpha, beta3 = self.at(step)
                fast, slow, squares = state["exp_avg"], state["exp_avg_slow"], state["exp_avg_sq"]
                fast.lerp_(p.grad, 1 - beta1)
                slow.lerp_(p.grad, 1 - beta3)
                squares.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = squares.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
                p.mul_(1 - rate * group["weight_decay"]).addcdiv_(fast, root, value=-rate / (1 - beta1**step))
                p.addcdiv_(slow, root, value=-rate * alpha)
        return loss
