"""AdamW whose step is one pass over memory, and the choice between it and torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from megazero.kernels import dispatch
from megazero.kernels.adamw import NOTHING, Rates, Refresh, adamw


class OnePassAdamW(torch.optim.Optimizer):
    """Steps as torch.optim.AdamW, with its arguments and state, by kernels/adamw.py.

    Parameters are fp32 or fp64, and contiguous. Weights differ from torch's by rounding: its implementations do not
    agree with each other to the bit, and these have the same bits on every device.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        scale: float = 1.0,
        refresh: Mapping[torch.Tensor, Refresh] = MappingProxyType({}),
    ) -> float | None:
        """Update every parameter that has a gradient. Return the closure's loss, or None without a closure.

        scale: gradients are multiplied by it. refresh: what an update leaves beside, by parameter.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            numbers = (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], scale)
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())  # on the host, which reads it
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                flat = (x.view(-1) for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
                adamw(*flat, Rates.of(int(state["step"]), *numbers), refresh.get(p, NOTHING))
        return loss


def best_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return AdamW over the groups: in one pass for fp32 on CUDA with Triton, else torch's, fused.

    On a CPU torch's fused step is the faster one, and so it is in fp64, which has no kernel. Options of torch's that
    the pass does not have (amsgrad, say) take torch's.
    """
    params = [p for group in groups for p in group["params"]]
    known = options.keys() <= inspect.signature(OnePassAdamW).parameters.keys()
    if known and dispatch.AVAILABLE and all(p.is_cuda and p.dtype == torch.float32 for p in params):
        return OnePassAdamW(groups, **options)
    return fused_adamw(groups, **options)


def fused_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return torch's AdamW over the groups, fused: its CPU and CUDA builds have that since 2.4."""
    return torch.optim.AdamW(groups, fused=True, **options)
