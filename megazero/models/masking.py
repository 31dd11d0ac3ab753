"""What attention computes, as a description without kernels.

A query sees the keys from the first token of its window or document, whichever is later, up to itself. So without
documents, windows and ALiBi torch's kernels need no mask.
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
    slopes: ALiBi's [heads of this rank], at least fp32; slope * (key - query) is added to capped scores.
    steps: scaled ALiBi's [heads of this rank, s] instead; steps[key] - steps[query] is added.
    queries: where in the sample the queries are, in ascending order; None: they are all that there are keys of.
    """

    scale: float
    cap: float = 0.0
    window: int | None = None
    starts: Tensor | None = None
    slopes: Tensor | None = None
    steps: Tensor | None = None
    queries: tuple[range, ...] | None = None

    @property
    def plain(self) -> bool:
        """Tell whether torch's causal attention is all."""
        described = self.window, self.starts, self.queries
        return not self.cap and not self.biased and all(each is None for each in described)

    @property
    def biased(self) -> bool:
        return self.slopes is not None or self.steps is not None

    def chunks(self, length: int) -> tuple[range, ...]:
        """Return where in samples of ``length`` tokens the queries are."""
        return self.queries or (range(length),)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the same one by one, int64 [queries], on ``device``."""
        return torch.cat([torch.arange(c.start, c.stop, device=device) for c in self.chunks(length)])

    def dense(self, length: int, like: Tensor) -> Tensor:
        """Return all but scale and cap as one additive mask [b or 1, heads or 1, queries, s], like ``like``."""
        bias = torch.cat([self.bias(chunk, range(length), like) for chunk in self.chunks(length)], 1)
        if self.starts is None:
            return bias[None]
        starts = self.starts.to(like.device, non_blocking=True)
        hidden = torch.arange(length, device=like.device) < starts.unsqueeze(-1)
        return bias.masked_fill(hidden.unsqueeze(1), -torch.inf)

    def bias(self, queries: range, keys: range, like: Tensor) -> Tensor:
        """Return the bias of these positions, documents aside, like ``like``."""
        # No matrix of distances: int64 ones would take more than all else.
        at = torch.arange(queries.start, queries.stop, device=like.device)[:, None]
        of_key = torch.arange(keys.start, keys.stop, device=like.device)
        hidden = of_key > at
        if self.window is not None:
            hidden |= of_key <= at - self.window
        if self.steps is not None:
            rows, columns = self.steps[:, queries.start : queries.stop], self.steps[:, keys.start : keys.stop]
            added = columns[:, None] - rows[:, :, None]
        elif self.slopes is not None:
            added = self.slopes[:, None, None] * (of_key.to(self.slopes) - at.to(self.slopes))
        else:
            added = like.new_zeros(1, 1, 1)
        return added.masked_fill(hidden, -torch.inf).to(like.dtype)


class AttentionTables(NamedTuple):
    """What the layers of one kind are given for one micro-batch: ``masking``, the backend that computes it, and what
    that backend made of documents and positions.
    """

    masking: Masking
    backend: str
    made: Any = None
