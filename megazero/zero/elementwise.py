"""Elementwise optimizers: AdamW in one pass over memory, and the test that any other one is elementwise.

ZeRO gives each rank its own slices, so a step must do to a slice what it does to the whole tensor. The test runs an
optimizer on a few small tensors. Saving a checkpoint before the first step requires state that starts as zeros, which
is tested, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from megazero.kernels import dispatch
from megazero.kernels.adamw import SILENCE, Rates, adamw
from megazero.kernels.noise import Noise

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

# What a moment is kept in, by Megatron's names: the master's dtype, or bf16.
KEPT = {"fp32": None, "bf16": torch.bfloat16}
MOMENTS = ("exp_avg", "exp_avg_sq")


class OnePassAdamW(torch.optim.Optimizer):
    """Steps as torch.optim.AdamW, with its arguments and state, by kernels/adamw.py.

    exp_avg_dtype, exp_avg_sq_dtype: what the moments are kept in, of KEPT, or ValueError.

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

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        scale: float = 1.0,
        noise: Mapping[torch.Tensor, Noise] = MappingProxyType({}),
    ) -> float | None:
        """Update every parameter that has a gradient. Return the closure's loss, or None without a closure.

        scale: gradients are multiplied by it. noise: by parameter, that of its moments' rounding (by default a stream
        for each step and place in a group).
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            numbers = (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"], scale)
            for at, p in ((at, p) for at, p in enumerate(group["params"]) if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())  # on the host, which reads it
                    state |= {name: torch.zeros_like(p, dtype=KEPT[kept]) for name, kept in self.kept.items()}
                count = int(state["step"]) + 1
                state["step"].fill_(count)
                tensors = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
                master, grad, exp_avg, exp_avg_sq = (x if x.ndim == 1 else x.view(-1) for x in tensors)
                drawn = noise.get(p) or (Noise(0, count, at) if self.rounds else SILENCE)
                adamw(master, grad, exp_avg, exp_avg_sq, Rates.of(count, *numbers), drawn)
        return loss


def best_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return AdamW over the groups: in one pass for fp32 on CUDA with Triton, else torch's, fused.

    On a CPU torch's fused step is the faster one, and so it is in fp64, which has no kernel. Options of torch's that
    the pass does not have (amsgrad, say) take torch's; moments in bf16 take the pass.
    """
    chosen = {f"{name}_dtype": options.get(f"{name}_dtype", "fp32") for name in MOMENTS}
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


def default_adamw(**options: Any) -> OptimizerFactory:
    """Return a factory of AdamW in the fastest implementation that there is for the weights' device and dtype."""
    return partial(best_adamw, **options)


SHAPE, CUT = (4, 6), 10  # of the tensors of the test; the cut is not at a row's end
STEPS = 12  # of it; some optimizers change their way of working after 10
LR = 0.01  # instead of the user's, which may start at 0
NEAREST = "nearest legal choices: AdamW, Adam, SGD, Adagrad, RMSprop"
# Optimizers of whole matrices, by name: what to take instead.
BY_MATRIX = {
    "Muon": "nearest legal choices: AdamW, or partial(zero.Muon, lr=...), the same step by matrix",
    **dict.fromkeys(
        ("Shampoo", "DistributedShampoo", "SOAP"),
        "its statistics of rows and columns are not built; nearest legal choices: AdamW, or zero.Muon, which steps "
        "whole matrices",
    ),
}


@dataclass(frozen=True)
class Probe:
    """Steps a few small tensors to find out what an optimizer does. The random generators stay unchanged.

    groups: the options of each parameter group, one at least. dtype, device: those of the master weights.
    """

    factory: OptimizerFactory
    groups: Sequence[tuple[tuple[str, Any], ...]]
    dtype: torch.dtype
    device: torch.device

    def refuse_unless_elementwise(self) -> None:
        """Raise ValueError unless steps on a matrix equal steps on its parts, each in an optimizer of its own.

        Optimizers that draw random numbers are refused too: ranks that hold the same slice would draw different
        ones.
        """
        whole, name = self._run()
        try:
            joined = torch.cat([self._run(part)[0] for part in (slice(0, CUT), slice(CUT, None))], 1)
        except Exception as error:
            raise ValueError(
                f"{name} is not elementwise: it steps a matrix, and not a slice of it, which is what ZeRO gives it "
                f"({error}); {BY_MATRIX.get(name, NEAREST)}"
            ) from error
        if torch.allclose(whole.flatten(1), joined, rtol=1e-4, atol=1e-6, equal_nan=True):
            return
        if not torch.equal(whole, self._run(seed=1)[0]):
            raise ValueError(
                f"{name} draws random numbers in its step: ranks that hold the same slice would draw different ones "
                f"and drift apart; {NEAREST}"
            )
        raise ValueError(
            f"{name} is not elementwise: it steps a matrix otherwise than the two parts of it, so ZeRO's slices "
            "would train something else (it uses norms, rows or sums of what it is given); "
            f"{BY_MATRIX.get(name, NEAREST)}"
        )

    def refuse_unless_from_zeros(self) -> None:
        """Raise ValueError unless steps after ``make_state`` equal steps without it."""
        fresh, name = self._run()
        if not torch.equal(fresh, self._run(before=make_state)[0]):
            raise ValueError(
                f"{name} has no state before its first step, and its state does not start as zeros: save or load "
                f"after a step; {NEAREST}"
            )

    def _run(
        self,
        part: slice | None = None,
        seed: int = 0,
        before: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> tuple[torch.Tensor, str]:
        """Return the matrix after the steps, or a part of its elements, by group, and the optimizer's name.

        The two parts differ in scale, and one gradient in five is large, to reveal whether something is scaled
        or clipped by a norm. before: is called with the optimizer before its first step.
        """
        at = torch.arange(1, SHAPE[0] * SHAPE[1] + 1, dtype=torch.float64).view(SHAPE)
        size = torch.where(at <= CUT, 3.0, 0.05)
        steps = [at.mul(step).sin() * size * (100 if step % 5 == 3 else 1) for step in range(1, STEPS + 1)]
        values, *gradients = (
            (x if part is None else x.flatten()[part]).to(self.device, self.dtype)
            for x in (at.cos() * size, *steps)
        )
        params = [nn.Parameter(values.clone()) for _ in self.groups]
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            optimizer = self._make(params)
            if before is not None:
                before(optimizer)
            for gradient in gradients:
                for param in params:
                    param.grad = gradient.clone()
                try:
                    optimizer.step()
                except Exception as error:
                    raise ValueError(
                        f"{type(optimizer).__name__}.step() does not work on a dense tensor and without arguments, "
                        f"which is how it will be called ({error}); {NEAREST}"
                    ) from error
        return torch.stack([p.detach() for p in params]), type(optimizer).__name__

    def _make(self, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of one parameter in each group, at the rate of the test."""
        groups = zip(params, self.groups, strict=True)
        optimizer = self.factory([{"params": [p], **dict(own)} for p, own in groups])
        if hasattr(optimizer, "train"):  # schedule-free optimizers refuse to step without
            optimizer.train()
        if isinstance(optimizer, OnePassAdamW):
            optimizer.kept = dict.fromkeys(optimizer.kept, "fp32")  # blocks of small moments end with a part
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is not None:
                group["lr"] = torch.full_like(rate, LR) if isinstance(rate, torch.Tensor) else LR
        return optimizer


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of every parameter, as zeros, by a step at rate 0 with gradients of zeros."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for group, rate in rates:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for group, rate in rates:
        group["lr"] = rate
    for group in optimizer.param_groups:
        if "step" in group:  # apex counts there
            group["step"] = 0
    for param in params:
        param.grad = None
        for name, value in optimizer.state[param].items():
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, (int, float)):
                optimizer.state[param][name] = 0
