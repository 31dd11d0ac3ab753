"""The largest scores of a layer's attention in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from megazero.config.model.attention import BAND
from megazero.models.masking import Masking


class LargestScores:
    """Keeps the largest score of each head that this rank attends with, fp32 [heads], over the forwards of a step.

    value: None before the first. What a backward computes again changes nothing.
    """

    value: Tensor | None = None

    def take(self, q: Tensor, k: Tensor, masking: Masking) -> None:
        """Take those of a forward that trains. q, k: as ``attend`` takes them."""
        if torch.is_grad_enabled():
            found = largest_scores(q.detach(), k.detach(), masking)
            self.value = found if self.value is None else torch.maximum(self.value, found)

    def clear(self) -> None:
        """Begin a step."""
        self.value = None


@torch.no_grad()
def largest_scores(q: Tensor, k: Tensor, masking: Masking) -> Tensor:
    """Return the largest score of each head with a key that is seen, before any cap, fp32 [heads].

    q [queries, b, heads, d], k [s, b, kv heads, d]. Products are in their dtype, by bands of queries, whatever the
    backend of attention: as many multiply-adds as it spends on its own scores, and a band's scores at a time.
    """
    groups, before = k.shape[2], 0
    most = torch.full((groups, q.shape[2] // groups), -torch.inf, dtype=torch.float32, device=q.device)
    for chunk in masking.chunks(k.shape[0]):
        for first in range(chunk.start, chunk.stop, BAND):
            band = range(first, min(first + BAND, chunk.stop))
            keys = range(max(0, first - masking.window + 1) if masking.window else 0, band.stop)
            own = slice(before + first - chunk.start, before + band.stop - chunk.start)
            of_group = (q[own] * masking.scale).unflatten(2, (groups, -1)).permute(1, 2, 3, 0, 4)
            scores = of_group.flatten(2, 3) @ k[keys.start : keys.stop].permute(1, 2, 3, 0)
            scores = scores.unflatten(2, (-1, len(band))) + masking.bias(band, keys, q)
            if masking.starts is not None:
                begins = masking.starts[:, own].to(q.device, non_blocking=True)[:, None, None, :, None]
                at = torch.arange(keys.start, keys.stop, device=q.device)
                scores = scores.masked_fill(at < begins, -torch.inf)
            most = torch.maximum(most, scores.amax((0, 3, 4)))
        before += len(chunk)
    return most.flatten()
