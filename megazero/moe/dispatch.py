"""The way of tokens to their experts and back.

A token goes to k experts, so its row is there k times, and rows are ordered by expert, those of one expert by token.
Every index occurs once, and a token's k rows are added in the order of its experts, so bits repeat.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Dispatch:
    """The places of one micro-batch's rows in one layer.

    experts: of each token, [T, k] int64. count: how many experts there are.
    """

    def __init__(self, experts: Tensor, count: int) -> None:
        flat = experts.flatten()
        self.k = experts.shape[1]
        # Of each row, ordered by expert: which of the T x k it is. Equal experts keep the order of tokens.
        self.order = flat.argsort(stable=True)
        numbers = torch.arange(count, device=flat.device)
        self.ends = torch.searchsorted(flat[self.order], numbers, right=True).to(torch.int32)

    @cached_property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.order // self.k

    @cached_property
    def places(self) -> Tensor:
        """The row of each of the T x k, the inverse of ``order``."""
        return torch.empty_like(self.order).scatter_(
            0, self.order, torch.arange(len(self.order), device=self.order.device)
        )

    def spread(self, x: Tensor) -> Tensor:
        """Return the rows [T x k, h] of tokens [T, h], ordered by expert."""
        return _Spread.apply(x, self)

    def collect(self, rows: Tensor) -> Tensor:
        """Return for each token the sum of its rows, [T, h]."""
        return _Collect.apply(rows, self)

    def per_row(self, values: Tensor) -> Tensor:
        """Return the values [T x k] of tokens' experts, [T, k], in the order of the rows."""
        return _Permuted.apply(values.flatten(), self.order, self.places)

    def take_rows(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.tokens)

    def add_rows(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self.places).unflatten(0, (-1, self.k)).sum(1)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.take_rows(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.dispatch.add_rows(grad), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.add_rows(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.dispatch.take_rows(grad), None


class _Permuted(torch.autograd.Function):
    """Values in another order; their gradient goes back by the inverse, each once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return values.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.index_select(0, ctx.inverse), None, None
