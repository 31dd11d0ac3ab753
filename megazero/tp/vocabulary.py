"""The vocabulary over the tp axis: its padding, and its embedding (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megazero.tp.context import TensorParallel, reduce_output
from megazero.tp.deferred import DeferredGradients, now_or_later


@dataclass(frozen=True)
class VocabShard:
    """This rank's ``rows`` rows of the padded vocabulary begin at ``start``. The first ``valid`` of them are true.

    The padding is at the end of the padded vocabulary, so a rank's true rows come first. A rank may have none.
    """

    start: int
    rows: int
    valid: int

    @staticmethod
    def of(vocab_size: int, padded: int, tp: TensorParallel) -> VocabShard:
        """Return the shard of rank ``tp.rank``. ``padded`` counts the rows of all ranks."""
        rows = tp.share(padded, "padded vocabulary")
        start = tp.rank * rows
        return VocabShard(start, rows, min(max(vocab_size - start, 0), rows))

    def localise(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return, in the shape of ``tokens`` (int), the row indices within this shard (0 for tokens elsewhere) and a
        bool mask of the tokens elsewhere.
        """
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.valid)
        return local.masked_fill(elsewhere, 0), elsewhere


class _Embedding(torch.autograd.Function):
    """F.embedding, but the gradient of its weight can be put off."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, deferred: DeferredGradients) -> Tensor:
        ctx.weight, ctx.deferred = weight, deferred
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (tokens,), rows = ctx.saved_tensors, ctx.weight.shape[0]
        owed = now_or_later(
            ctx.deferred,
            ctx.weight,
            lambda: torch.ops.aten.embedding_dense_backward(grad, tokens, rows, -1, False),
        )
        return owed, None, None


def _embedding(tokens: Tensor, weight: Tensor, deferred: DeferredGradients | None) -> Tensor:
    if deferred is None:
        return F.embedding(tokens, weight)
    return _Embedding.apply(weight, tokens, deferred)


class VocabParallelEmbedding(nn.Module):
    """Token embedding whose rows are split over the axis. ``weight`` is [shard.rows, h]."""

    def __init__(
        self,
        shard: VocabShard,
        hidden_size: int,
        tp: TensorParallel,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shard, self.tp = shard, tp
        self.weight = nn.Parameter(torch.empty(shard.rows, hidden_size, device=device, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed int [s, b] as [s, b, h], or [s / size, b, h] under sequence parallel, in the weight's dtype."""
        if self.tp.size == 1:
            return _embedding(tokens, self.weight, self.tp.deferred)
        local, elsewhere = self.shard.localise(tokens)
        partial = _embedding(local, self.weight, self.tp.deferred).masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_output(partial, self.tp)


def vocab_parallel_argmax(logits: Tensor, shard: VocabShard, tp: TensorParallel) -> Tensor:
    """Return the word of the largest of all ranks' logits [..., rows], int64 [...], the first of equal ones' ranks.

    It is the same on every rank of the axis.
    """
    most, own = logits[..., : max(shard.valid, 1)].max(-1)
    if tp.size == 1:
        return own
    most = most if shard.valid else torch.full_like(most, -torch.inf)
    parts = tp.start_gather(torch.stack((most.double(), (own + shard.start).double())).unsqueeze(0)).wait()
    largest = parts[:, 0] == parts[:, 0].amax(0)
    return parts[:, 1].masked_fill(~largest, torch.inf).amin(0).long()
