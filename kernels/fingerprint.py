"""Hashes values, to find out whether they were written or whether ranks hold the same.

It reads 3 GB/s on one core, and takes no buffer of the values' size: 0.5 MB on a CPU, 32 MB on another device.
"""

from __future__ import annotations

from functools import cache

import torch

PIECE = 1 << 16  # values of a sum: their products stay in cache (2.2 GB/s with 2^20, 2.7 with 2^14)
PASS = 64  # sums of a pass on CUDA, where each costs a launch: 1.3B parameters take 640 launches, not 40,000


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash, a scalar int64, of ``values`` and their places: 1-D, contiguous, any dtype.

    Every device gives the same.
    """
    aligned = all(n * values.itemsize % 4 == 0 for n in (values.numel(), values.storage_offset()))
    weights = _weights(values.device)
    words = values.view(torch.int32 if aligned else torch.uint8)
    whole = len(words) // PIECE * PIECE
    passes = words[:whole].view(-1, PIECE).split(PASS if values.is_cuda else 1)
    rest = (words[whole:] * weights[: len(words) - whole]).sum(0, keepdim=True)
    sums = torch.cat([*((rows * weights).sum(1) for rows in passes), rest[: whole < len(words) or not whole]])
    return fingerprint(sums) if len(sums) > 1 else sums[0]


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers [PIECE], int64, the same on every rank: a change of one value always shows."""
    drawn = torch.randint(-(1 << 62), 1 << 62, (PIECE,), generator=torch.Generator().manual_seed(0))
    return (drawn * 2 + 1).to(device)
