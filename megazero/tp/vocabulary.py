"""The vocabulary over the tp axis: padding, and the embedding of it (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.tp.collectives import reduce_output
from megazero.tp.context import TensorParallel


def padded_vocab_size(vocab_size: int, divisible_by: int, tp_size: int) -> int:
    """The smallest multiple of lcm(divisible_by, tp_size) that holds the vocabulary."""
    unit = math.lcm(divisible_by, tp_size)
    return -(-vocab_size // unit) * unit


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of the padded vocabulary: ``rows`` of them from ``start``, ``valid`` of them true.

    The padding is at the end of the padded vocabulary, so a rank's true rows come first; a rank may
    have none.
    """

    start: int
    rows: int
    valid: int

    @staticmethod
    def of(vocab_size: int, divisible_by: int, tp: TensorParallel) -> VocabShard:
        """The shard of rank ``tp.rank``."""
        rows = padded_vocab_size(vocab_size, divisible_by, tp.size) // tp.size
        start = tp.rank * rows
        return VocabShard(start, rows, min(max(vocab_size - start, 0), rows))

    def localise(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Row indices within this shard (0 for tokens elsewhere) and a bool mask of the tokens elsewhere."""
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.valid)
        return local.masked_fill(elsewhere, 0), elsewhere


class VocabParallelEmbedding(nn.Module):
    """Token embedding whose rows are split over the axis. weight: [shard.rows, h]."""

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
        """tokens: int [s, b]. Returns [s, b, h], or [s / size, b, h] under sequence parallel."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        local, elsewhere = self.shard.localise(tokens)
        partial = F.embedding(local, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_output(partial, self.tp)
