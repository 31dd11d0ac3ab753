"""The way of tokens to their experts and back.

A token goes to k experts, so its row is there k times, and rows are ordered by expert, those of one expert by token.
Every index occurs once, and a token's k rows are added in the order of its experts, so bits repeat.

Where ranks share the experts, rows go to the rank that holds theirs, together with their probabilities, and come back
the same way. There they are ordered by expert, those of one expert by source. Gradients take both ways in reverse, so
an expert's are of all ranks' tokens.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.moe.context import ExpertParallel

ALONE = ExpertParallel()


class RowCounts(NamedTuple):
    """Of each rank that shares the experts: how many rows go to each of its experts, and how many come from it for
    each of this rank's."""

    sent: list[list[int]]
    received: list[list[int]]


class Dispatch:
    """The places of one micro-batch's rows in one layer.

    experts: of each token, [T, k] int64. count: how many experts there are. ep: the ranks that share them.
    sizes: if they are known; else the ranks tell each other, which is collective over ep, and for which the host
    waits. They are None where ranks share nothing.
    """

    def __init__(
        self, experts: Tensor, count: int, ep: ExpertParallel = ALONE, sizes: RowCounts | None = None
    ) -> None:
        flat = experts.flatten()
        self.k, self.ep = experts.shape[1], ep
        # Of each row, ordered by expert: which of the T x k it is. Equal experts keep the order of tokens.
        self.order = flat.argsort(stable=True)
        numbers = torch.arange(count, device=flat.device)
        ends = torch.searchsorted(flat[self.order], numbers, right=True).to(torch.int32)
        self.sizes = sizes
        if ep.size > 1 and sizes is None:
            self.sizes = _sizes(ends.diff(prepend=ends.new_zeros(1)), ep)
        self.ends = ends if self.sizes is None else self._at_experts.sum(0).cumsum(0, dtype=torch.int32)

    @cached_property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.order // self.k

    @cached_property
    def places(self) -> Tensor:
        """The row of each of the T x k, the inverse of ``order``."""
        return _inverse(self.order)

    @cached_property
    def _at_experts(self) -> Tensor:
        """How many rows come from each rank for each of this rank's experts, [ranks, experts]."""
        assert self.sizes is not None
        return torch.tensor(self.sizes.received, device=self.order.device)

    @cached_property
    def _by_expert(self) -> Tensor:
        """The rows that come, which are ordered by source and then by expert, in the order of experts."""
        ranks, own = self._at_experts.shape
        experts = torch.arange(own, device=self.order.device).repeat(ranks)
        total = sum(map(sum, self.sizes.received)) if self.sizes else 0
        return experts.repeat_interleave(self._at_experts.flatten(), output_size=total).argsort(stable=True)

    @cached_property
    def _by_source(self) -> Tensor:
        return _inverse(self._by_expert)

    def spread(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [n, h] of this rank's experts, ordered by expert, and their values [n].

        x: tokens [T, h]. values: of tokens' experts, [T, k]. Without other ranks n is T x k. Collective over ep.
        """
        return _Spread.apply(x, values, self)

    def collect(self, rows: Tensor) -> Tensor:
        """Return for each token the sum of its rows, [T, h]. Collective over ep."""
        return _Collect.apply(rows, self)

    def take_rows(self, x: Tensor) -> Tensor:
        return self._there(x.index_select(0, self.tokens))

    def add_rows(self, rows: Tensor) -> Tensor:
        return self._back(rows).index_select(0, self.places).unflatten(0, (-1, self.k)).sum(1)

    def take_values(self, values: Tensor) -> Tensor:
        return self._there(values.flatten().index_select(0, self.order))

    def give_values(self, values: Tensor) -> Tensor:
        return self._back(values).index_select(0, self.places).unflatten(0, (-1, self.k))

    def _there(self, rows: Tensor) -> Tensor:
        """Send this rank's rows to their experts."""
        if self.sizes is None:
            return rows
        sent, received = (list(map(sum, each)) for each in self.sizes)
        return self.ep.exchange(rows, sent, received).index_select(0, self._by_expert)

    def _back(self, rows: Tensor) -> Tensor:
        """Send the rows of this rank's experts back to where they came from."""
        if self.sizes is None:
            return rows
        sent, received = (list(map(sum, each)) for each in self.sizes)
        return self.ep.exchange(rows.index_select(0, self._by_source), received, sent)


def _sizes(counts: Tensor, ep: ExpertParallel) -> RowCounts:
    """Tell the other ranks how many rows go to each of their experts. counts: of all experts, int32."""
    each = [len(counts) // ep.size] * ep.size
    received = ep.exchange(counts, each, each)
    sent, came = torch.stack([counts, received]).view(2, ep.size, -1).tolist()
    return RowCounts(sent, came)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Spread(torch.autograd.Function):
    """Rows and values take one node, so that all ranks exchange their gradients in one order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, dispatch: Dispatch) -> tuple[Tensor, Tensor]:
        ctx.dispatch = dispatch
        return dispatch.take_rows(x), dispatch.take_values(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_rows: Tensor, to_values: Tensor) -> Any:
        return ctx.dispatch.add_rows(to_rows), ctx.dispatch.give_values(to_values), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.add_rows(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.dispatch.take_rows(grad), None
