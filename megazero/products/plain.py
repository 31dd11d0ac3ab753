"""Products in the dtype of their operands, as torch computes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.products.product import Operand, Product

_ALIGNED = 16  # bytes, of which torch's kernel takes whole multiples in a row (pytorch/pytorch#172440)


class PlainProduct(Product):
    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def operand(self, x: Tensor) -> Operand:
        return (x,)

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        (rows,) = x
        return F.linear(rows, weight, bias) if out is None else torch.mm(rows, weight.t(), out=out)

    def grad_x(self, grads: Sequence[Tensor], weights: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        total = torch.mm(grads[0], weights[0], out=out)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            total.addmm_(grad, weight)
        return total

    def grad_weight(self, grad: Tensor, x: Operand, sums: Tensor | None = None) -> Tensor:
        rows = x[0].reshape(-1, x[0].shape[-1])
        if sums is None:
            return grad.t() @ rows
        if sums.dtype == grad.dtype:
            return sums.addmm_(grad.t(), rows)
        return sums.add_(grad.t() @ rows)

    def grouped(self, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        kernel = rows.dtype != torch.float64 and all(
            n * rows.dtype.itemsize % _ALIGNED == 0 for n in weight.shape[1:]
        )
        if kernel:
            return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
        stops = ends.tolist()
        groups = [rows[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
        return torch.cat([F.linear(own, matrix) for own, matrix in zip(groups, weight.unbind(), strict=True)])


PLAIN = PlainProduct()
