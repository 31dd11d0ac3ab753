"""Optimizers that step whole matrices: their contract, and Muon.

ZeRO gives every rank a slice of each weight. So a step has three parts: ``fold`` and ``apply`` are elementwise and
run on slices, ``direction`` runs on a whole matrix, wherever that is put together (matrix_updates.py).

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) takes the orthogonalised momentum as the update.
Names and defaults are Megatron's. torch.optim.Muon is coefficients "simple", Nesterov and scale "shape_scaling"; its
"match_rms_adamw" is scale "spectral" with an extra factor of 0.2 (Liu et al. 2025, arXiv 2502.16982).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from megazero.zero.elementwise import OnePassAdamW, best_adamw, fused_adamw

MATRIX = "matrix"  # marks a group whose parameters are stepped as matrices

Coefficients = tuple[tuple[float, float, float], ...]
# (a, b, c) of each iteration in turn, then again from the first: aX + b(XX')X + c(XX')(XX')X.
COEFFICIENTS: Mapping[str, Coefficients] = MappingProxyType(
    {
        "simple": ((3.4445, -4.7750, 2.0315),),
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    }
)
# What an orthogonalised [rows, columns] is multiplied by.
SCALES: Mapping[str, Callable[[int, int], float]] = MappingProxyType(
    {
        "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
        "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
        "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    }
)
EPSILON = 1e-7  # the least norm that a matrix is divided by


class ByMatrix(torch.optim.Optimizer):
    """The contract. Groups marked ``MATRIX`` are stepped by matrix, the others by ``rest``, an elementwise optimizer.

    ``rest`` has the same group objects and the same ``state``. A parameter of a marked group is 2-D, or a stack of
    matrices along dim 0, or in the engine a flat slice. State tensors have its shape and start as zeros.
    """

    rest: torch.optim.Optimizer

    @abstractmethod
    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that ``direction`` takes and returns, for weights of this dtype."""

    @abstractmethod
    def open_state(self, param: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's state, which is made if there is none."""

    def make_state(self) -> None:
        """Make the state of every parameter of the marked groups before the first step."""
        for group in self.param_groups:
            for param in group["params"] if group.get(MATRIX) else ():
                self.open_state(param)

    @abstractmethod
    def fold(self, param: torch.Tensor) -> torch.Tensor:
        """Take ``param.grad`` into the state. Returns, in the parameter's shape, what ``direction`` needs."""

    @abstractmethod
    def direction(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the update of a whole matrix [rows, columns], in the same shape and dtype."""

    @abstractmethod
    def apply(
        self, weights: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], group: Mapping[str, Any]
    ) -> None:
        """Take the update into weights, elementwise. shape: the whole matrix's. group: with rate and weight decay."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step whole parameters, on one rank."""
        assert closure is None
        for group in self.param_groups:
            for p in group["params"] if group.get(MATRIX) else ():
                if p.grad is not None:
                    given = self.fold(p).to(self.message_dtype(p.dtype))
                    *_, rows, columns = p.shape
                    each = [self.direction(matrix) for matrix in given.view(-1, rows, columns)]
                    self.apply(p, torch.stack(each).view(p.shape), (rows, columns), group)
        self.rest.step()


def newton_schulz(matrix: torch.Tensor, steps: int, coefficients: Coefficients) -> torch.Tensor:
    """Return about U V' of a matrix U S V' [rows, columns], in its dtype, by ``steps`` iterations.

    Singular values come near 1, not to it: with these coefficients they lie between 0.7 and 1.2. The matrix is kept.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for step in range(steps):
        a, b, c = coefficients[step % len(coefficients)]
        square = x @ x.T
        mixed = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, mixed, x, beta=a)
    return x.T if tall else x


class Muon(ByMatrix):
    """Steps the matrices W [rows, columns] of the groups marked ``MATRIX``, and every other parameter by AdamW.

    With the gradient g, the momentum m (of W's shape and dtype, from 0) and the rate r:
    m = momentum * m + (1 - momentum) * g; u = m, or with Nesterov momentum * m + (1 - momentum) * g of the new m;
    W = (1 - r * weight_decay) * W - r * extra_scale * s * newton_schulz(u), s of ``SCALES`` by rows and columns.

    precision: "medium" iterates in bfloat16, as torch.optim.Muon; "high" in the parameters' dtype. lr, betas, eps,
    weight_decay: of AdamW, the first and the last of both. adamw: makes it, given groups and these options.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        coefficients: str = "quintic",
        steps: int = 5,
        scale: str = "spectral",
        extra_scale: float = 1.0,
        precision: str = "medium",
        adamw: Callable[..., torch.optim.Optimizer] = best_adamw,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.momentum, self.nesterov, self.steps = momentum, nesterov, steps
        self.coefficients, self.scale = COEFFICIENTS[coefficients], SCALES[scale]
        self.extra_scale, self.precision = extra_scale, precision
        others = [group for group in self.param_groups if not group.get(MATRIX)]  # the same objects: one rate
        self.rest = adamw(others or [{"params": []}], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.rest.state = self.state

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what matrices of this dtype are moved and iterated in: nothing more is lost on the way."""
        return torch.bfloat16 if self.precision == "medium" else dtype

    def open_state(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros(())  # as AdamW's: a rank may hold nothing but matrices
            state["momentum_buffer"] = torch.zeros_like(param)
        return state

    def fold(self, param: torch.Tensor) -> torch.Tensor:
        """Take the gradient into the momentum, elementwise. Returns u; the gradient may be overwritten."""
        assert param.grad is not None
        state = self.open_state(param)
        state["step"] += 1
        held: torch.Tensor = state["momentum_buffer"].lerp_(param.grad, 1 - self.momentum)
        return param.grad.lerp_(held, self.momentum) if self.nesterov else held

    def direction(self, matrix: torch.Tensor) -> torch.Tensor:
        return newton_schulz(matrix, self.steps, self.coefficients)

    def apply(
        self, weights: torch.Tensor, direction: torch.Tensor, shape: tuple[int, int], group: Mapping[str, Any]
    ) -> None:
        rate = float(group["lr"])
        weights.mul_(1 - rate * group["weight_decay"])
        weights.add_(direction, alpha=-rate * self.extra_scale * self.scale(*shape))


torch_muon, triton_muon = partial(Muon, adamw=fused_adamw), partial(Muon, adamw=OnePassAdamW)
