"""Swaps heads for sequence before attention and back after it (Jacobs et al. 2023, DeepSpeed-Ulysses).

Between the two swaps a rank has the whole sequence of its share of the heads, in order, so attention is computed as
on one rank: masks, windows, documents, ALiBi, caps, dropout and backends are what they are. A swap is one all-to-all
of rows, one for each rank; its gradient is the same exchange. What is packed into rows is left to autograd.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.cp.context import ContextParallel
from megazero.mesh.mesh import all_gather_flat


def swap(q: Tensor, k: Tensor, v: Tensor, cp: ContextParallel) -> tuple[Tensor, ...]:
    """Return all tokens of this rank's share of the heads: q, k and v with s x size tokens.

    ``q`` is [s, b, heads, d], ``k`` and ``v`` are [s, b, kv heads, d], with this rank's s tokens and any dtype. Heads
    and ranks divide (config/model/rules.py). With fewer key/value heads than ranks, neighbours receive the one that
    their query heads share. Without other ranks nothing is done.
    """
    if cp.size == 1:
        return q, k, v
    parts = [_dealt(x, cp.size) for x in (q, k, v)]
    rows = _exchanged(torch.cat(parts, 3), cp)
    return rows.flatten(0, 1).split([part.shape[3] for part in parts], 2)


def swap_back(out: Tensor, cp: ContextParallel) -> Tensor:
    """Return all heads of this rank's tokens: ``out`` [s x size, b, heads, d] becomes [s, b, heads x size, d]."""
    if cp.size == 1:
        return out
    return _exchanged(out.unflatten(0, (cp.size, -1)), cp).movedim(0, 2).flatten(2, 3)


def _dealt(x: Tensor, ranks: int) -> Tensor:
    """Return the heads [s, b, heads, d] of ``x`` by the rank that they go to: [ranks, s, b, heads of a rank, d]."""
    copies = max(1, ranks // x.shape[2])
    if copies > 1:
        x = x.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)
    return x.unflatten(2, (ranks, -1)).movedim(2, 0)


@torch._disable_dynamo  # it waits for a collective, counts its bytes and times it
def _exchanged(rows: Tensor, cp: ContextParallel) -> Tensor:
    return _Exchange.apply(rows, cp)


class _Exchange(torch.autograd.Function):
    """Sends row i of [size, ...] to rank i. The result has the rows by source, and so has the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp = cp
        return _all_to_all(rows, cp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.cp), None


def _all_to_all(rows: Tensor, cp: ContextParallel) -> Tensor:
    assert cp.group is not None, "this ContextParallel has no process group: it cannot communicate"
    rows = rows.contiguous()
    cp.count(rows.nbytes // cp.size)
    out = torch.empty_like(rows)
    work = dist.all_to_all_single(out, rows, group=cp.group, async_op=True)
    with cp.waits(f"exposed_cp_{cp.link.removesuffix('_node')}"):
        work.wait()
    return out


def summed(counts: Tensor, cp: ContextParallel) -> Tensor:
    """Return the sum of ``counts``, integers of any shape, over the ranks."""
    if cp.size == 1:
        return counts
    cp.count(counts.nbytes)
    every = counts.new_empty(cp.size, *counts.shape)
    all_gather_flat(every.view(-1), counts.contiguous().view(-1), group=cp.group)
    return every.sum(0, dtype=counts.dtype)
