"""A product: the arithmetic of y = x W^T + b and of its gradients. Here as torch computes it; others override it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# An input, or the gradient of an output, as its products read it. An input's is also what is kept for the gradient of
# the weight. Ranks that share a sequence each make their part's, and gather every tensor of it along dim 0, but for
# numbers without dimensions, which are the same on all of them.
Operand = tuple[Tensor, ...]
Across = Callable[[Tensor], Tensor]  # the largest of a number that ranks which share a sequence have
_ALIGNED = 16  # bytes, of which torch's kernel takes whole multiples in a row (pytorch/pytorch#172440)


class Product:
    """Multiplies in the dtype of x [..., in], weight [out, in], bias [out], and grad, which are rows [n, out] of y's.

    What a weight has beside its numbers (a scale) is the object's own. plain: autograd makes the gradients of its
    linears one by one; others make one operand for all linears of an input.
    """

    plain = True

    def require(self, device: torch.device) -> None:
        """Raise ValueError if the device does not multiply so."""

    def chosen(self, weights: Sequence[Tensor], tp: int, cut: int) -> Product:
        """Return what multiplies these weights [out, in] of one input, whose dim ``cut`` so many ranks share."""
        return self

    def operand(self, x: Tensor, across: Across | None = None) -> Operand:
        """Return what ``forward`` and ``grad_weight`` read of ``x``. across: where ``x`` is a part of a sequence."""
        return (x,)

    def gradient(self, grad: Tensor) -> Operand:
        """Return what ``grad_x`` and ``grad_weight`` read of ``grad``."""
        return (grad,)

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return y. out: where rows [n, out] go that have no bias."""
        (rows,) = x
        return F.linear(rows, weight, bias) if out is None else torch.mm(rows, weight.t(), out=out)

    def grad_x(
        self, grads: Sequence[Operand], weights: Sequence[Tensor], out: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of the rows [n, in] that all these weights multiply, the terms added in order."""
        total = torch.mm(grads[0][0], weights[0], out=out)
        for (grad,), weight in zip(grads[1:], weights[1:], strict=True):
            total.addmm_(grad, weight)
        return total

    def grad_weight(
        self, grad: Operand, x: Operand, dtype: torch.dtype, sums: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of the weight, which has this dtype, added to ``sums`` [out, in] if given, which may be
        wider."""
        turned, rows = grad[0].t(), x[0].reshape(-1, x[0].shape[-1])
        if sums is None:
            return turned @ rows
        if sums.dtype == dtype:
            return sums.addmm_(turned, rows)
        return sums.add_(turned @ rows)

    def grouped(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Return ``rows`` [n, in] times the matrices of their experts, [n, out]. Differentiable.

        weight: [experts, out, in]. ends: int32 [experts], where each expert's rows end, the first expert's first. An
        expert without rows gets a gradient of zeros.
        """
        kernel = rows.dtype != torch.float64 and all(
            n * rows.dtype.itemsize % _ALIGNED == 0 for n in weight.shape[1:]
        )
        if kernel:
            return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
        stops = ends.tolist()
        groups = [rows[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        return torch.cat([F.linear(own, matrix) for own, matrix in zip(groups, weight.unbind(), strict=True)])


PLAIN = Product()
