"""AdamW whose step is one pass over memory and whose moments may be small, and the choice between it and torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from megazero.kernels import dispatch, moments
from megazero.kernels.adamw import NOTHING, Rates, Refresh, adamw
from megazero.kernels.noise import Noise

# What a moment is kept in, by Megatron's names: the master's dtype, half of it, or 8 bits in blocks.
KEPT = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
POWERS = {"exp_avg": moments.EXP_AVG, "exp_avg_sq": moments.EXP_AVG_SQ}


class OnePassAdamW(torch.optim.Optimizer):
    """Steps as torch.optim.AdamW, with its arguments and state, by kernels/adamw.py.

    exp_avg_dtype, exp_avg_sq_dtype: what the moments are kept in, of KEPT (kernels/moments.py), or ValueError.

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
        exp_avg_dtype: str = "fp32",
        exp_avg_sq_dtype: str = "fp32",
    ) -> None:
        self.kept = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        for name, chosen in self.kept.items():
            if chosen not in KEPT:
                raise ValueError(f"{name}_dtype={chosen!r} is none of {', '.join(KEPT)}; nearest: 'bf16'")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @property
    def rounds(self) -> bool:
        """Whether an update rounds a moment."""
        return set(self.kept.values()) != {"fp32"}

    @property
    def coded(self) -> dict[str, int]:
        """Return the powers of the moments that are kept in 8 bits, whose state is 1-D bytes, by name."""
        return {name: POWERS[name] for name, chosen in self.kept.items() if chosen == "int8"}

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        scale: float = 1.0,
        refresh: Mapping[torch.Tensor, Refresh] = MappingProxyType({}),
        noise: Mapping[torch.Tensor, Noise] = MappingProxyType({}),
    ) -> float | None:
        """Update every parameter that has a gradient. Return the closure's loss, or None without a closure.

        scale: gradients are multiplied by it. By parameter: refresh, what an update leaves beside; noise, that of its
        moments' rounding (by default a stream for each step and place in a group).
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            numbers = (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], scale)
            for at, p in ((at, p) for at, p in enumerate(group["params"]) if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())  # on the host, which reads it
                    state |= {name: moments.room(p, KEPT[chosen]) for name, chosen in self.kept.items()}
                count = int(state["step"]) + 1
                state["step"].fill_(count)
                flat = (x.view(-1) for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
                drawn = noise.get(p) or Noise(0, count, at)
                adamw(*flat, Rates.of(count, *numbers), refresh.get(p, NOTHING), drawn)
        return loss


def best_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return AdamW over the groups: in one pass for fp32 on CUDA with Triton, else torch's, fused.

    On a CPU torch's fused step is the faster one, and so it is in fp64, which has no kernel. Options of torch's that
    the pass does not have (amsgrad, say) take torch's; moments in fewer bits take the pass.
    """
    chosen = {f"{name}_dtype": options.get(f"{name}_dtype", "fp32") for name in POWERS}
    if set(chosen.values()) != {"fp32"}:
        return OnePassAdamW(groups, **options)
    options = {name: value for name, value in options.items() if name not in chosen}
    params = [p for group in groups for p in group["params"]]
    known = options.keys() <= inspect.signature(OnePassAdamW).parameters.keys()
    if known and dispatch.AVAILABLE and all(p.is_cuda and p.dtype == torch.float32 for p in params):
        return OnePassAdamW(groups, **options)
    return fused_adamw(groups, **options)


def fused_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return torch's AdamW over the groups, fused: its CPU and CUDA builds have that since 2.4."""
    return torch.optim.AdamW(groups, fused=True, **options)
