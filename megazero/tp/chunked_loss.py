"""The loss of a column-parallel linear's outputs in chunks of tokens, so that few logits exist at once.

The backward of a chunk follows its forward, so no logits are computed twice (the gradients in the forward are those
of Liger Kernel: Hsu et al. 2024, section 3.2). This needs the weights of the tokens' losses in the forward.

torch has F.linear_cross_entropy (2.13). It returns neither log Z nor the label's logit, without which a vocabulary
that is split over ranks and the z-loss cannot be computed. benchmarks/features/loss_chunks.py has its time and
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.tp.context import TensorParallel
from megazero.tp.deferred import now_or_later
from megazero.tp.linear import start_reduction

# Of logits [tokens, rows], which it may overwrite, and labels [tokens]: the losses [tokens], in at least fp32.
TokenLosses = Callable[[Tensor, Tensor], Tensor]


class _ChunkedLoss(torch.autograd.Function):
    """Keeps the gradients of the input and of the weight for the backward, which scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        losses: TokenLosses,
        tp: TensorParallel,
        size: int,
        scale: float | None,
    ) -> Tensor:
        """``scale`` None computes no gradients."""
        product = tp.product
        full = tp.start_gather(x).wait() if tp.sharded_sequence else x
        tokens, labels, weights = full.reshape(-1, full.shape[-1]), labels.reshape(-1), weights.reshape(-1)
        needs_x, needs_weight = (scale is not None and needed for needed in ctx.needs_input_grad[:2])
        grad_x = torch.empty_like(tokens) if needs_x else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        total = torch.zeros((), dtype=wide, device=x.device)
        buffer = x.new_empty(size, weight.shape[0])  # one for all chunks: pages that are touched already
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            own = product.operand(tokens[part])
            logits = product.forward(own, weight, out=buffer[: len(labels[part])]).detach()
            with torch.set_grad_enabled(needs_x or needs_weight):
                loss = losses(logits.requires_grad_(needs_x or needs_weight), labels[part])
            total = total + (loss.detach() * weights[part]).sum()
            if scale is None or not loss.requires_grad:
                continue
            (grad,) = torch.autograd.grad(loss, logits, weights[part].to(loss.dtype) * scale)
            read = product.gradient(grad)
            if grad_x is not None:
                product.grad_x([read], [weight], out=grad_x[part])
            if grad_weight is not None:
                product.grad_weight(read, own, weight.dtype, grad_weight)
        ctx.weight, ctx.tp, ctx.scale, ctx.shape = weight, tp, scale, full.shape
        ctx.gradients = grad_x, grad_weight
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of x and of the weight, or put the weight's off."""
        if ctx.gradients is None:
            raise RuntimeError("a loss in chunks can run backward once: its gradients are scaled in place")
        (grad_x, grad_weight), ctx.gradients = ctx.gradients, None
        tp, weight, factor = ctx.tp, ctx.weight, grad / ctx.scale
        wait = None if grad_x is None else start_reduction(grad_x.mul_(factor).view(ctx.shape), tp)

        owed = None
        if grad_weight is not None:
            owed = now_or_later(tp.deferred, weight, lambda: grad_weight.mul_(factor).to(weight.dtype))
        return wait() if wait else None, owed, *(None,) * 6


@torch._disable_dynamo  # its forward runs backwards: graphs of torch 2.11 and 2.13 both refuse it
def chunked_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    losses: TokenLosses,
    tp: TensorParallel,
    *,
    size: int,
    scale: float = 1.0,
) -> Tensor:
    """Return the sum of ``losses`` of the logits x W^T, each times its weight, with the logits of ``size`` tokens at
    once. It is a scalar in at least fp32, and its backward can run once.

    x: [s, b, in], or its slice [s / size, b, in] under sequence parallel. weight: [rows, in], this rank's, a
    Parameter where gradients are put off. Its gradient is summed over chunks in at least fp32.
    labels, weights: [s, b]. No gradient goes to the weights.
    scale: the gradient that the backward will start from (a loss scale). Another one gives right gradients, too, but
    those of fp16 may have left its range in the forward.
    """
    wanted = scale if torch.is_grad_enabled() else None
    return _ChunkedLoss.apply(x, weight, labels, weights, losses, tp, min(size, labels.numel()), wanted)
