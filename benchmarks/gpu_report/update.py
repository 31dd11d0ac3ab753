"""AdamW's update of a slice with what comes before and after it: torch's fused step between passes of its own, the
one pass, and NVIDIA's apex where it is built. Masters and moments are fp32, parameters bf16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_report.record import Record, Skip
from benchmarks.gpu_report.setting import Setting, quickest
from megazero.config.options.sections import TrainingConfig
from megazero.kernels.adamw import Refresh
from megazero.train.nvidia_apex import fused_adam, refuse_without_apex
from megazero.zero.elementwise import OnePassAdamW, fused_adamw

FACTOR = 0.5  # of the gradients
ONE_PASS = "one pass"
IMPLEMENTATIONS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": fused_adamw,
    ONE_PASS: OnePassAdamW,
    "apex": fused_adam,
}
# What the update leaves -> bytes per element, read and written: in one pass, and one operation after the other.
BYTES = {"nothing": (28, 36), "copy": (30, 42), "difference": (34, 58)}


def run(setting: Setting, record: Record) -> None:
    n = setting.pick(1 << 27, 1 << 12)
    for left, (one, several) in BYTES.items():
        for name, factory in IMPLEMENTATIONS.items():
            with record.attempt(implementation=name, leaves=left, elements=n) as row:
                if name == "apex":
                    _refuse(setting)
                seconds = _seconds(factory, left, n, setting)
                row |= {"ms": seconds * 1e3, "bytes per element": one if name == ONE_PASS else several}
                row["GB/s"] = n * row["bytes per element"] / seconds / 1e9


def _refuse(setting: Setting) -> None:
    try:
        refuse_without_apex(TrainingConfig(optimizer_impl="apex"), setting.device)
    except ValueError as error:
        raise Skip(str(error)) from error


def _seconds(factory: Callable[..., torch.optim.Optimizer], left: str, n: int, setting: Setting) -> float:
    weight = nn.Parameter(torch.randn(n, device=setting.device))
    grad, held = torch.randn(n, device=setting.device), weight.detach().bfloat16()
    weight.grad = grad
    optimizer: Any = factory([{"params": [weight]}], lr=1e-4, weight_decay=0.1)
    refresh = {"nothing": Refresh(), "copy": Refresh(copy=held), "difference": Refresh(held=held)}[left]
    step = partial(_in_steps, optimizer, weight.detach(), grad, held, left)
    if isinstance(optimizer, OnePassAdamW):
        step = partial(optimizer.step, scale=FACTOR, refresh={weight: refresh})
    return quickest(step, setting)


def _in_steps(
    optimizer: torch.optim.Optimizer, master: torch.Tensor, grad: torch.Tensor, held: torch.Tensor, left: str
) -> None:
    """Step as the engine does with an optimizer that is not one pass."""
    grad.mul_(FACTOR)
    optimizer.step()
    if left == "copy":
        held.copy_(master)
    if left == "difference":
        rounded = master.to(held.dtype)
        torch.empty_like(master).copy_(rounded).add_(held, alpha=-1.0)
