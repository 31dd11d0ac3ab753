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

import torch
from torch import Tensor

from megazero.cp.context import ContextParallel


def swap(q: Tensor, k: Tensor, v: Tensor, cp: ContextParallel) -> tuple[Tensor, ...]:
    """Return all tokens of this rank's group, with its share of the heads: q, k and v with s x size tokens.

    ``q`` is [s, b, heads, d], ``k`` and ``v`` are [s, b, kv heads, d], with this rank's s tokens and any dtype. Heads
    and ranks divide (config/model/rules.py). With fewer key/value heads than ranks, neighbours receive the one that
    their query heads share. Without other ranks nothing is done.
    """
    if cp.heads.size == 1:
        return q, k, v
    parts = [_dealt(x, cp.heads.size) for x in (q, k, v)]
    rows = cp.heads.swap(torch.cat(parts, 3))
    return rows.flatten(0, 1).split([part.shape[3] for part in parts], 2)


def swap_back(out: Tensor, cp: ContextParallel) -> Tensor:
    """Return all heads of this rank's tokens: ``out`` [s x size, b, heads, d] becomes [s, b, heads x size, d]."""
    if cp.heads.size == 1:
        return out
    return cp.heads.swap(out.unflatten(0, (cp.heads.size, -1))).movedim(0, 2).flatten(2, 3)


def gather(k: Tensor, v: Tensor, cp: ContextParallel) -> tuple[Tensor, Tensor]:
    """Return ``k`` and ``v`` [s, b, kv heads, d], which have the tokens of this rank's group, with those of all
    groups, in the order of the sequence. One group has all of them.
    """
    if cp.groups == 1:
        return k, v
    inside, across = cp.keys
    rows = inside.gather(across.gather(torch.stack((k, v)), cp.codec, cp.observers))
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


def summed(counts: Tensor, cp: ContextParallel) -> Tensor:
    """Return the sum of ``counts``, integers of any shape, over all ranks that share samples."""
    for peers in (cp.heads, *cp.keys):
        counts = peers.gather(counts).sum(0, dtype=counts.dtype)
    return counts
