"""What a product is: the arithmetic of y = x W^T + b and of its gradients, of one linear or of stacked experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

# An input as its products read it, which is also what is kept for the gradient of the weight. Ranks that share a
# sequence each make their part's, and gather every tensor of it along dim 0.
Operand = tuple[Tensor, ...]


class Product(Protocol):
    """An arithmetic. x: [..., in]. weight: [out, in]. bias: [out]. grad: of y, its rows [n, out].

    What a weight has beside its numbers (a scale) is the object's own. One that rounds may compute small matrices as
    the plain product does.
    """

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return y, [..., out]. Differentiable; torch.compile takes it into its graph."""
        ...

    def operand(self, x: Tensor) -> Operand:
        """Return what ``forward`` and ``grad_weight`` read of ``x``."""
        ...

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return y. out: where rows [n, out] go that have no bias."""
        ...

    def grad_x(self, grads: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Return the gradient of the rows [n, in] that all these weights multiply, the terms added in order."""
        ...

    def grad_weight(self, grad: Tensor, x: Operand, sums: Tensor | None = None) -> Tensor:
        """Return the gradient of the weight, added to ``sums`` [out, in] if given, which may be wider."""
        ...

    def grouped(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return ``rows`` [n, in] times the matrices of their experts, [n, out]. Differentiable.

        weight: [experts, out, in]. ends: int32 [experts], where each expert's rows end, the first expert's first. An
        expert without rows gets a gradient of zeros.
        """
        ...
