"""Root-mean-square norm (Zhang and Sennrich 2019), and torch's LayerNorm with weights around 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megazero.config.model.section import ModelConfig
from megazero.tp import TensorParallel


class _RMSNorm(torch.autograd.Function):
    """Compute forward and backward in few passes, in at least fp32.

    Forward and backward of [2048, 1024] on one CPU thread take 9.2 ms in fp32 and 14.2 ms in bf16. F.rms_norm takes
    17.6 and 20.3 ms, and the norm written out with autograd 18.0 and 18.8 ms.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out = wide * scale
        # Through a view: in a graph of torch 2.11 there is no gradient of an output that two operations returned, as
        # those in place and a .to that copies nothing do. A new tensor of [2048, 1024] takes 8 ms more.
        out.view_as(out).mul_(weight)
        return out if out.dtype == x.dtype else out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        h, wide = x.shape[-1], scale.dtype
        normed, grad, weight_wide = x.to(wide) * scale, grad.to(wide), weight.to(wide)
        product = (grad * normed).reshape(-1, h)  # of attention's gradient as its kernel lays it out: a copy
        mean = torch.mv(product, weight_wide).div_(-h).view_as(scale)
        grad_weight = product.sum(0).to(weight.dtype)
        grad_x = (grad * weight_wide).addcmul_(normed, mean).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dim. The result has the shape and dtype of x.

    one_plus: 1 + weight instead of weight, added in at least fp32 (Gemma Team 2024).
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        one_plus: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.one_plus = eps, one_plus
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    @property
    def factor(self) -> Tensor:
        """Return the factor of the normed values, [size]."""
        return one_plus(self.weight) if self.one_plus else self.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.one_plus or x.device.type == "cpu":  # F.rms_norm would round 1 + weight to the dtype of x
            return _RMSNorm.apply(x, self.factor, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """torch's norm (Ba et al. 2016), that multiplies by 1 + weight with ``one_plus``."""

    def __init__(self, size: int, eps: float, *, one_plus: bool = False, **factory: Any) -> None:
        super().__init__(size, eps, **factory)
        self.one_plus = one_plus

    def forward(self, x: Tensor) -> Tensor:
        if not self.one_plus:
            return super().forward(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = self.bias.to(wide)
        out = F.layer_norm(x.to(wide), self.normalized_shape, one_plus(self.weight), bias, self.eps)
        return out.to(x.dtype)


def one_plus(weight: Tensor) -> Tensor:
    """Return 1 + weight in at least fp32."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1


class _SplitRMSNorm(torch.autograd.Function):
    """Norms over a dim that is split over the tp axis: one all-reduce forward and one backward for all inputs.

    Elements that several ranks hold count as often in the sum as in the size, and their gradients are partial sums
    on each rank, so copies need no correction.
    """

    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, eps: float, count: int, *tensors: Tensor) -> Any:
        inputs, weights = tensors[:count], tensors[count:]
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        squares = torch.stack([x.square().sum(-1, keepdim=True) for x in wide])
        sums = tp.start_sum(squares).wait()
        scales = [(s / (tp.size * x.shape[-1]) + eps).rsqrt() for s, x in zip(sums, wide, strict=True)]
        ctx.tp = tp
        ctx.save_for_backward(*tensors, *scales)
        parts = zip(wide, scales, weights, inputs, strict=True)
        return tuple((x * scale * w).to(given.dtype) for x, scale, w, given in parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return gradients of inputs and weights. The weights' are computed while the dots are summed over ranks."""
        count, saved = len(grads), ctx.saved_tensors
        inputs, weights, scales = saved[:count], saved[count : 2 * count], saved[2 * count :]
        normed = [x.to(scale.dtype) * scale for x, scale in zip(inputs, scales, strict=True)]
        wide = [g.to(n.dtype) for g, n in zip(grads, normed, strict=True)]
        weighted = [g * w.to(g.dtype) for g, w in zip(wide, weights, strict=True)]
        dots = torch.stack([(g * n).sum(-1, keepdim=True) for g, n in zip(weighted, normed, strict=True)])
        pending = ctx.tp.start_sum(dots)
        of_weights = [
            (g * n).flatten(0, -2).sum(0).to(w.dtype) for g, n, w in zip(wide, normed, weights, strict=True)
        ]
        parts = zip(weighted, normed, pending.wait(), scales, inputs, strict=True)
        of_inputs = [
            ((g - n * (dot / (ctx.tp.size * n.shape[-1]))) * scale).to(x.dtype)
            for g, n, dot, scale, x in parts
        ]
        return None, None, None, *of_inputs, *of_weights


def split_rms_norm(
    inputs: Sequence[Tensor], norms: Sequence[RMSNorm], tp: TensorParallel
) -> tuple[Tensor, ...]:
    """Apply norms over the last dim of inputs [..., n / size], which is split over the tp axis as their weights are.

    Dims before it agree between the inputs. They communicate once for all. The results have their inputs' shapes.
    """
    if tp.size == 1:
        return tuple(norm(x) for norm, x in zip(norms, inputs, strict=True))
    return _split_rms_norm(tp, norms[0].eps, len(inputs), *inputs, *(norm.factor for norm in norms))


@torch._disable_dynamo
def _split_rms_norm(tp: TensorParallel, eps: float, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    return _SplitRMSNorm.apply(tp, eps, count, *tensors)


def make_norm(
    config: ModelConfig, size: int | None = None, eps: float | None = None, **factory: Any
) -> nn.Module:
    """Return the configuration's norm over ``size`` elements (the hidden dim) with ``eps`` (norm_epsilon)."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    size = config.hidden_size if size is None else size
    eps = config.norm_epsilon if eps is None else eps
    return kind(size, eps, one_plus=config.apply_layernorm_1p, **factory)


def normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Return the norm of ``x``, or ``x`` without one."""
    return x if norm is None else norm(x)
