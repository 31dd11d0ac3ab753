"""Swaps heads for sequence before attention and back after it (Jacobs et al. 2023, DeepSpeed-Ulysses), and gathers
keys and values (Llama Team 2024, section 3.3.2).

Between the two swaps a rank has the whole sequence of its share of the heads, in order, so attention is computed as
on one rank: masks, windows, documents, caps, dropout and backends are what they are. A swap is one all-to-all
of rows, one for each rank; its gradient is the same exchange.

Where there are several groups, their ranks have the queries of two chunks of the sequence, and gather the keys and
values of all: first across nodes, where each goes to one rank of every other node, then inside the node. The gradient
goes back by the same ways and is summed on each. What is packed into rows is left to autograd.

Across nodes keys and values may travel quantised. A node's own stay exact, and attention's backward uses what its
forward used. The gradient of what arrived is that of what was sent: rounding is taken for the identity, since its own
derivative is 0 almost everywhere. Gradients travel exactly: nothing has measured what rounding them would cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.cp.context import ContextParallel


def swap(parts: Sequence[Tensor], cp: ContextParallel) -> Sequence[Tensor]:
    """Return all tokens of this rank's group, with its share of the heads: each part with s x size tokens.

    Parts, such as queries, keys and values, are [s, b, heads, d] with this rank's s tokens, one dtype, and heads and
    widths of their own. Heads and ranks divide (config/model/rules.py). With fewer heads than ranks, neighbours
    receive the one that their queries share. Without other ranks nothing is done.
    """
    if cp.heads.size == 1:
        return parts
    dealt = [_dealt(x, cp.heads.size) for x in parts]
    rows = cp.heads.swap(torch.cat([x.flatten(3) for x in dealt], 3)).flatten(0, 1)
    own = rows.split([x.shape[3] * x.shape[4] for x in dealt], 2)
    return [x.unflatten(2, part.shape[3:]) for x, part in zip(own, dealt, strict=True)]


def swap_back(out: Tensor, cp: ContextParallel) -> Tensor:
    """Return all heads of this rank's tokens: ``out`` [s x size, b, heads, d] becomes [s, b, heads x size, d]."""
    if cp.heads.size == 1:
        return out
    return cp.heads.swap(out.unflatten(0, (cp.heads.size, -1))).movedim(0, 2).flatten(2, 3)


def gather(parts: Sequence[Tensor], cp: ContextParallel) -> Sequence[Tensor]:
    """Return keys and values [s, b, heads, d], which have the tokens of this rank's group, with those of all groups,
    in the order of the sequence. One group has all of them. Parts of one shape travel together.
    """
    if cp.groups == 1:
        return parts
    if any(part.shape != parts[0].shape for part in parts):
        return [each for part in parts for each in gather((part,), cp)]
    inside, across = cp.keys
    rows = inside.gather(across.gather(torch.stack(tuple(parts)), cp.codec, cp.observers))
    groups = [row for across in rows.unbind(1) for row in across.unbind(0)]
    first, second = zip(*(row.chunk(2, 1) for row in groups), strict=True)  # a group's chunks (own_spans)
    return torch.cat((*first, *reversed(second)), 1).unbind(0)


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
