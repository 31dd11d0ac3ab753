"""Swaps heads for sequence before attention and back after it (Jacobs et al. 2023, DeepSpeed-Ulysses), and gathers
keys and values (Llama Team 2024, section 3.3.2).

Between the two swaps a rank has the whole sequence of its share of the heads, in order, so attention is computed as
on one rank: masks, windows, documents, ALiBi, caps, dropout and backends are what they are. A swap is one all-to-all
of rows, one for each rank; its gradient is the same exchange.

Where there are several groups, their ranks have the queries of two chunks of the sequence, and gather the keys and
values of all: first across nodes, where each goes to one rank of every other node, then inside the node. The gradient
goes back by the same ways and is summed on each. What is packed into rows is left to autograd.

Across nodes keys and values may travel quantised. A node's own stay exact, and attention's backward uses what its
forward used. The gradient of what arrived is that of what was sent: rounding is taken for the identity, since its own
derivative is 0 almost everywhere. Gradients travel exactly: nothing has measured what rounding them would cost.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megazero.cp.context import ContextParallel, Peers
from megazero.kernels.sum_rows import sum_rows
from megazero.mesh.mesh import all_gather_flat


def swap(q: Tensor, k: Tensor, v: Tensor, cp: ContextParallel) -> tuple[Tensor, ...]:
    """Return all tokens of this rank's group, with its share of the heads: q, k and v with s x size tokens.

    ``q`` is [s, b, heads, d], ``k`` and ``v`` are [s, b, kv heads, d], with this rank's s tokens and any dtype. Heads
    and ranks divide (config/model/rules.py). With fewer key/value heads than ranks, neighbours receive the one that
    their query heads share. Without other ranks nothing is done.
    """
    if cp.heads.size == 1:
        return q, k, v
    parts = [_dealt(x, cp.heads.size) for x in (q, k, v)]
    rows = _exchanged(torch.cat(parts, 3), cp)
    return rows.flatten(0, 1).split([part.shape[3] for part in parts], 2)


def swap_back(out: Tensor, cp: ContextParallel) -> Tensor:
    """Return all heads of this rank's tokens: ``out`` [s x size, b, heads, d] becomes [s, b, heads x size, d]."""
    if cp.heads.size == 1:
        return out
    return _exchanged(out.unflatten(0, (cp.heads.size, -1)), cp).movedim(0, 2).flatten(2, 3)


def gather(k: Tensor, v: Tensor, cp: ContextParallel) -> tuple[Tensor, Tensor]:
    """Return ``k`` and ``v`` [s, b, kv heads, d], which have the tokens of this rank's group, with those of all
    groups, in the order of the sequence. One group has all of them.
    """
    if cp.groups == 1:
        return k, v
    rows = _gathered(torch.stack((k, v)), cp)
    groups = [row for across in rows.unbind(1) for row in across.unbind(0)]
    first, second = zip(*(row.chunk(2, 1) for row in groups), strict=True)  # a group's chunks (own_spans)
    k, v = torch.cat((*first, *reversed(second)), 1).unbind(0)
    return k, v


def _dealt(x: Tensor, ranks: int) -> Tensor:
    """Return the heads [s, b, heads, d] of ``x`` by the rank that they go to: [ranks, s, b, heads of a rank, d]."""
    copies = max(1, ranks // x.shape[2])
    if copies > 1:
        x = x.unsqueeze(3).expand(-1, -1, -1, copies, -1).flatten(2, 3)
    return x.unflatten(2, (ranks, -1)).movedim(2, 0)


@torch._disable_dynamo  # it waits for a collective, counts its bytes and times it
def _exchanged(rows: Tensor, cp: ContextParallel) -> Tensor:
    return _Exchange.apply(rows, cp)


@torch._disable_dynamo
def _gathered(own: Tensor, cp: ContextParallel) -> Tensor:
    return _Gather.apply(own, cp)


class _Exchange(torch.autograd.Function):
    """Sends row i of [size, ...] to rank i. The result has the rows by source, and so has the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp = cp
        return _all_to_all(rows, cp, cp.heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.cp, ctx.cp.heads), None


class _Gather(torch.autograd.Function):
    """Returns the tensors of all groups [groups inside a node, nodes, ...]."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp, (inside, across) = cp, cp.keys
        gathered = _all_gather if cp.codec is None or across.size == 1 else _all_gather_coded
        return _all_gather(gathered(own, cp, across), cp, inside)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        inside, across = ctx.cp.keys
        return _sum_of_own(_sum_of_own(grad, ctx.cp, inside), ctx.cp, across), None


def _all_gather(own: Tensor, cp: ContextParallel, peers: Peers) -> Tensor:
    """Return what the ranks have, [size, ...], by rank."""
    if peers.size == 1:
        return own.unsqueeze(0)
    assert peers.group is not None, NO_GROUP
    own = own.contiguous()
    cp.count(peers, own.nbytes)
    out = own.new_empty(peers.size, *own.shape)
    work = all_gather_flat(out.view(-1), own.view(-1), group=peers.group, async_op=True)
    with cp.waits(f"exposed_cp_{peers.link.removesuffix('_node')}"):
        work.wait()
    return out


def _all_gather_coded(own: Tensor, cp: ContextParallel, peers: Peers) -> Tensor:
    """Return what ``_all_gather`` does of ``own`` [k, ...], from messages: one of each of the k tensors, which is
    filled up with zeros to whole blocks. This rank's own are not rounded.
    """
    assert cp.codec is not None
    rows = own.flatten(1)
    n = rows.shape[1]
    rows = pad(rows, (0, -n % cp.codec.block))
    received = _all_gather(cp.codec.encode(rows), cp, peers)
    out = own.new_empty(peers.size, *rows.shape)
    for rank, (messages, decoded) in enumerate(zip(received, out, strict=True)):
        if rank == peers.rank:
            decoded.copy_(rows)
        else:
            cp.codec.decode(messages, decoded)
    for told in cp.observers:
        told(cp.codec, rows, out, peers)
    return out[..., :n].reshape(peers.size, *own.shape)


def summed(counts: Tensor, cp: ContextParallel) -> Tensor:
    """Return the sum of ``counts``, integers of any shape, over all ranks that share samples."""
    for peers in (cp.heads, *cp.keys):
        counts = _all_gather(counts, cp, peers).sum(0, dtype=counts.dtype)
    return counts


def _sum_of_own(rows: Tensor, cp: ContextParallel, peers: Peers) -> Tensor:
    """Return the sum of the ranks' rows [size, ...] for this rank, in the order of the ranks, as ``rows``. It is
    rounded once.
    """
    if peers.size == 1:
        return rows.squeeze(0)
    received = _all_to_all(rows, cp, peers)
    total = received.new_empty(received[0].numel(), dtype=torch.promote_types(rows.dtype, torch.float32))
    sum_rows(received.flatten(1), total, accumulate=False)
    return total.to(rows.dtype).view(received.shape[1:])


def _all_to_all(rows: Tensor, cp: ContextParallel, peers: Peers) -> Tensor:
    assert peers.group is not None, NO_GROUP
    rows = rows.contiguous()
    cp.count(peers, rows.nbytes // peers.size)
    out = torch.empty_like(rows)
    work = dist.all_to_all_single(out, rows, group=peers.group, async_op=True)
    with cp.waits(f"exposed_cp_{peers.link.removesuffix('_node')}"):
        work.wait()
    return out


NO_GROUP = "this ContextParallel has no process group: it cannot communicate"
