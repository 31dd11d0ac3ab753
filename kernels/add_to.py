"""Adds values of a narrower dtype to a sum, without a copy of them in the sum's dtype.

If two dtypes differ, torch on a CPU first converts the whole operand into new memory. This operation converts by
chunks, in memory that is reused. CUDA converts as it loads. The bits are those of ``out.add_(x, alpha=alpha)``.
"""

from __future__ import annotations

import torch

from megazero.kernels.arena import SCRATCH
from megazero.kernels.dispatch import CHUNK


def add_to(out: torch.Tensor, x: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """Compute out += alpha * x and return ``out``. They have the same shape, and any float dtypes."""
    if x.dtype == out.dtype or x.is_cuda or x.dtype.itemsize > out.dtype.itemsize:
        return out.add_(x, alpha=alpha)
    chunked = out.is_contiguous() and x.is_contiguous()
    size = min(x.numel(), CHUNK) if chunked else x.numel()
    with SCRATCH.frame(out.device) as frame:
        buffer = frame.take(size, out.dtype)
        if not chunked:
            return out.add_(buffer.view(x.shape).copy_(x), alpha=alpha)
        for total, values in zip(out.view(-1).split(CHUNK), x.view(-1).split(CHUNK), strict=True):
            total.add_(buffer[: values.numel()].copy_(values), alpha=alpha)
    return out


def add_each(outs: list[torch.Tensor], xs: list[torch.Tensor]) -> None:
    """Compute out += x of every pair, as ``add_to`` does: in one operation where it would not convert by chunks."""
    if outs[0].is_cuda or outs[0].dtype == xs[0].dtype:
        torch._foreach_add_(outs, xs)
        return
    for out, x in zip(outs, xs, strict=True):
        add_to(out, x)
