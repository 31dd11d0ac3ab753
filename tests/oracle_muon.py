"""Muon on one rank without Newton-Schulz products: what its polynomials do to the singular values (tests only)."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Jordan's coefficients, five times; and the five of leloykun.github.io/ponder/muon-opt-coeffs.
POLYNOMIALS = {
    "simple": [(3.4445, -4.7750, 2.0315)] * 5,
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}


def orthogonalised(matrix: torch.Tensor, polynomials: list[tuple[float, float, float]]) -> torch.Tensor:
    """Return U p(S) V' of ``matrix`` = U S V', where p is the polynomials in turn, of S / ||S||; 0 of 0."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm() if s.any() else s
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def plain_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    *,
    lr: float,
    decay: float,
    beta: float,
    nesterov: bool,
    polynomials: list[tuple[float, float, float]],
    scale: Callable[[int, int], float],
) -> None:
    """Step one matrix and its momentum in place."""
    momentum.copy_(beta * momentum + (1 - beta) * gradient)
    u = beta * momentum + (1 - beta) * gradient if nesterov else momentum
    rows, columns = weight.shape
    update = scale(rows, columns) * orthogonalised(u, polynomials)
    weight.copy_(weight - lr * decay * weight - lr * update)
