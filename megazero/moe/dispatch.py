"""The way of tokens to their experts and back.

A token goes to k experts, so its row is there k times, and rows are ordered by expert, those of one expert by token.
Every index occurs once, and a token's k rows are added in the order of its experts, so bits repeat.

Where ranks share the experts, rows go to the rank that holds theirs, together with their probabilities, and come back
the same way. There they are ordered by expert, those of one expert by source. Gradients take both ways in reverse, so
an expert's are of all ranks' tokens.

Where these ranks are of several nodes, there are two levels. A token's row goes once to each node that has some of
its experts, to the rank with the same place there, and from there to the ranks of its experts as above. On the way
back the rows of a token are added at that node, and one sum comes from each.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.comm.codec import Blockwise
from megazero.comm.peers import Peers
from megazero.mesh.waiting import waiting
from megazero.moe.context import ALONE, ExpertParallel

NOWHERE = -1  # in the place of an expert


class RowCounts(NamedTuple):
    """Of each rank that shares the experts: how many rows go to each of its experts, and how many come from it for
    each of this rank's."""

    sent: list[list[int]]
    received: list[list[int]]


class LevelCounts(NamedTuple):
    """The same of two levels: the rows that go to nodes, the experts of those that came here, [T', k] int32, and the
    rows that go on inside the node."""

    across: RowCounts | None
    experts: Tensor
    inside: RowCounts | None


class Dispatch:
    """The permutation that takes one layer's tokens of a micro-batch to their experts, and back.

    experts: of each token, [T, k] int64, or NOWHERE, where it goes to fewer. count: how many experts there are.
    peers: the ranks that share them. counts: those of an earlier dispatch of the same tokens; else ranks tell each
    other, which is collective over the peers, and for which the host waits. They are None where ranks share nothing
    and every token goes to k experts. sparse: some tokens go to fewer.
    """

    def __init__(
        self,
        experts: Tensor,
        count: int,
        peers: Peers = ALONE,
        counts: RowCounts | None = None,
        sparse: bool = False,
    ) -> None:
        flat = experts.flatten()
        self.k, self.slots, self.peers = experts.shape[1], len(flat), peers
        # Of each row, ordered by expert: which of the T x k it is. Equal experts keep the order of tokens.
        self.order = flat.argsort(stable=True)
        numbers = torch.arange(NOWHERE, count, device=flat.device)
        ends = torch.searchsorted(flat[self.order], numbers, right=True).to(torch.int32)
        self.counts, self.ends = counts, ends[1:]
        if counts is None and (peers.size > 1 or sparse):
            self.counts = _row_counts(ends.diff(), peers)
        if self.counts is not None:
            self.order = self.order[self.slots - sum(map(sum, self.counts.sent)) :]
            self.ends = self._at_experts.sum(0).cumsum(0, dtype=torch.int32)

    @cached_property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.order // self.k

    @cached_property
    def places(self) -> Tensor:
        """The row of each of the T x k, the inverse of ``order``; behind all rows, if it goes nowhere."""
        return _inverse(self.order, self.slots)

    @cached_property
    def _at_experts(self) -> Tensor:
        """How many rows come from each rank for each of this rank's experts, [ranks, experts]."""
        assert self.counts is not None
        return torch.tensor(self.counts.received, device=self.order.device)

    @cached_property
    def _by_expert(self) -> Tensor:
        """The rows that come, which are ordered by source and then by expert, in the order of experts."""
        ranks, own = self._at_experts.shape
        experts = torch.arange(own, device=self.order.device).repeat(ranks)
        total = sum(map(sum, self.counts.received)) if self.counts else 0
        return experts.repeat_interleave(self._at_experts.flatten(), output_size=total).argsort(stable=True)

    @cached_property
    def _by_source(self) -> Tensor:
        return _inverse(self._by_expert, len(self._by_expert))

    def spread(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows [n, h] of this rank's experts, ordered by expert, and their values [n].

        x: tokens [T, h]. values: of tokens' experts, [T, k]. Without other ranks n is T x k. Collective.
        """
        return _Spread.apply(x, values, self)

    def collect(self, rows: Tensor) -> Tensor:
        """Return for each token the sum of its rows, [T, h]. Collective over the peers."""
        return _Collect.apply(rows, self)

    def rows_to_experts(self, x: Tensor) -> Tensor:
        """Send each token's row to its experts. Collective, as the next three."""
        return self._there(x.index_select(0, self.tokens))

    def rows_from_experts(self, rows: Tensor) -> Tensor:
        return self._placed(rows).sum(1)

    def values_to_experts(self, values: Tensor) -> Tensor:
        return self._there(values.flatten().index_select(0, self.order))

    def values_from_experts(self, values: Tensor) -> Tensor:
        return self._placed(values)

    def _placed(self, rows: Tensor) -> Tensor:
        """Return the rows of each token, [T, k, ...], zero where it goes nowhere."""
        back = self._back(rows)
        if len(back) < self.slots:
            back = torch.cat([back, back.new_zeros(1, *back.shape[1:])])
        return back.index_select(0, self.places).unflatten(0, (-1, self.k))

    def _there(self, rows: Tensor, codec: Blockwise | None = None) -> Tensor:
        """Send this rank's rows to their experts, across nodes in the codec's format if there is one."""
        if self.counts is None or self.peers.size == 1:
            return rows
        sent, received = (list(map(sum, each)) for each in self.counts)
        return self.peers.route(rows, sent, received, codec).index_select(0, self._by_expert)

    def _back(self, rows: Tensor) -> Tensor:
        """Send the rows of this rank's experts back to where they came from."""
        if self.counts is None or self.peers.size == 1:
            return rows
        sent, received = (list(map(sum, each)) for each in self.counts)
        return self.peers.route(rows.index_select(0, self._by_source), received, sent)


class _ToNodes(Dispatch):
    """Of nodes in the place of experts. Each row has the values of all experts of its token, [T, k]."""

    def __init__(self, nodes: Tensor, ep: ExpertParallel, counts: RowCounts | None) -> None:
        super().__init__(nodes, ep.across.size, ep.across, counts, sparse=True)
        self.codec = ep.codec

    def rows_to_experts(self, x: Tensor) -> Tensor:
        return self._there(x.index_select(0, self.tokens), self.codec)

    def values_to_experts(self, values: Tensor) -> Tensor:
        return self._there(values.index_select(0, self.tokens))

    def values_from_experts(self, values: Tensor) -> Tensor:
        return self.rows_from_experts(values)


class TwoLevels:
    """The same as ``Dispatch`` where ranks of several nodes share the experts.

    Tokens go in two hops: across nodes, then inside one. Collective over ep.
    """

    def __init__(
        self, experts: Tensor, count: int, ep: ExpertParallel, counts: LevelCounts | None = None
    ) -> None:
        nodes, share = ep.across.size, count // ep.across.size
        number = torch.arange(nodes, device=experts.device)
        wanted = torch.zeros(len(experts), nodes, dtype=torch.bool, device=experts.device)
        wanted.scatter_(1, experts // share, True)
        to = number.where(wanted, NOWHERE)
        self.across = _ToNodes(to, ep, counts.across if counts else None)
        came = counts.experts if counts else self.across.values_to_experts(experts.to(torch.int32))
        own = came.long() - ep.across.rank * share
        own = own.where((own >= 0) & (own < share), NOWHERE)
        self.inside = Dispatch(own, share, ep.inside, counts.inside if counts else None, sparse=True)
        self.counts, self.ends = LevelCounts(self.across.counts, came, self.inside.counts), self.inside.ends

    def spread(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.inside.spread(*self.across.spread(x, values))

    def collect(self, rows: Tensor) -> Tensor:
        return self.across.collect(self.inside.collect(rows))


def dispatch_to(
    experts: Tensor, count: int, ep: ExpertParallel, counts: RowCounts | LevelCounts | None = None
) -> Dispatch | TwoLevels:
    """Return the places of tokens' rows at their experts, [T, k] int64 of ``count``. counts: those of an earlier
    dispatch of the same tokens."""
    if ep.across.size > 1:
        assert counts is None or isinstance(counts, LevelCounts)
        return TwoLevels(experts, count, ep, counts)
    assert counts is None or isinstance(counts, RowCounts)
    return Dispatch(experts, count, ep.inside, counts)


def _row_counts(counts: Tensor, peers: Peers) -> RowCounts:
    """Tell the other ranks how many rows go to each of their experts. counts: of all experts, int32."""
    received = counts
    if peers.size > 1:
        each = [len(counts) // peers.size] * peers.size
        received = peers.route(counts, each, each)
    with waiting:  # on CUDA the host waits where it reads
        sent, came = torch.stack([counts, received]).view(2, peers.size, -1).tolist()
    return RowCounts(sent, came)


def _inverse(order: Tensor, size: int) -> Tensor:
    """Return where each of ``size`` numbers lies in ``order``; behind it, if it is not there."""
    places = torch.full((size,), len(order), device=order.device)
    return places.scatter_(0, order, torch.arange(len(order), device=order.device))


class _Spread(torch.autograd.Function):
    """Rows and values take one node, so that all ranks exchange their gradients in one order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, dispatch: Dispatch) -> tuple[Tensor, Tensor]:
        ctx.dispatch = dispatch
        return dispatch.rows_to_experts(x), dispatch.values_to_experts(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_rows: Tensor, to_values: Tensor) -> Any:
        return ctx.dispatch.rows_from_experts(to_rows), ctx.dispatch.values_from_experts(to_values), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.rows_from_experts(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.dispatch.rows_to_experts(grad), None
