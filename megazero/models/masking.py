"""What attention computes, as a description without kernels.

A query sees the keys from the first token of its window or document, whichever is later, up to itself. So without
documents and windows torch's kernels need no mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Masking(NamedTuple):
    """What attention computes beside that a query sees no later keys. Nothing here has s * s elements.

    scale: factor of scores. cap: scores s become cap * tanh(s / cap); 0 for none.
    window: tokens that a query sees, its own included, if they are fewer than the sample's.
    starts: int64 [b, queries], where in the sample each query's document begins, if attention stays within documents;
        on the host, so that nobody waits for a device to know where they end.
    queries: where in the sample the queries are, in ascending order; None: they are all that there are keys of.
    sinks: whether softmax's sums have a term beside the keys', exp(sink), of a sink of each head.
    """

    scale: float
    cap: float = 0.0
    window: int | None = None
    starts: Tensor | None = None
    queries: tuple[range, ...] | None = None
    sinks: bool = False

    @property
    def plain(self) -> bool:
        """Tell whether torch's causal attention is all."""
        described = self.window, self.starts, self.queries
        return not (self.cap or self.sinks) and all(each is None for each in described)

    def chunks(self, length: int) -> tuple[range, ...]:
        """Return where in samples of ``length`` tokens the queries are."""
        return self.queries or (range(length),)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the same one by one, int64 [queries], on ``device``."""
        return torch.cat([torch.arange(c.start, c.stop, device=device) for c in self.chunks(length)])

    def dense(self, length: int, like: Tensor) -> Tensor:
        """Return all but scale and cap as one additive mask [b or 1, 1, queries, s], like ``like``."""
        bias = torch.cat([self.bias(chunk, range(length), like) for chunk in self.chunks(length)])[None, None]
        if self.starts is None:
            return bias
        starts = self.starts.to(like.device, non_blocking=True)
        hidden = torch.arange(length, device=like.device) < starts.unsqueeze(-1)
        return bias.masked_fill(hidden.unsqueeze(1), -torch.inf)

    def bias(self, queries: range, keys: range, like: Tensor) -> Tensor:
        """Return [queries, keys], -inf where a key is not seen, documents aside, like ``like``."""
        # No matrix of distances: int64 ones would take more than all else.
        at = torch.arange(queries.start, queries.stop, device=like.device)[:, None]
        of_key = torch.arange(keys.start, keys.stop, device=like.device)
        hidden = of_key > at
        if self.window is not None:
            hidden |= of_key <= at - self.window
        return like.new_zeros(1, 1).masked_fill(hidden, -torch.inf)


class AttentionTables(NamedTuple):
    """What the layers of one kind are given for one micro-batch: ``masking``, the backend that computes it, and what
    that backend made of documents and positions. sinks: [heads], of the layer that attends, where masking has some.
    """

    masking: Masking
    backend: str
    made: Any = None
    sinks: Tensor | None = None
