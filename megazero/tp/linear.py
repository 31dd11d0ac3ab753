"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3; sequence parallel as in
Korthikanti et al. 2022, section 4.2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.tp.collectives import reduce_output, start_all_gather, start_all_reduce, start_reduce_scatter
from megazero.tp.context import TensorParallel


class _ColumnParallel(torch.autograd.Function):
    """Several linears on one input: one gather forward, one reduction backward for all of them.

    Under sequence parallel only the input's own slice is kept; the backward gathers it again while the
    gradient of the input is computed, and reduces that gradient while those of the weights are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, count: int, *parameters: Tensor | None) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        ctx.tp, ctx.count = tp, count
        ctx.save_for_backward(x, *weights)
        full = start_all_gather(x, tp).wait() if tp.sequence_parallel else x
        return tuple(F.linear(full, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tp, (x, *weights) = ctx.tp, ctx.saved_tensors
        gather = start_all_gather(x, tp) if tp.sequence_parallel else None
        rows = [g.reshape(-1, g.shape[-1]) for g in grads]
        grad_x = rows[0] @ weights[0]
        for g, w in zip(rows[1:], weights[1:], strict=True):
            grad_x.addmm_(g, w)
        grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        reduce = (start_reduce_scatter if tp.sequence_parallel else start_all_reduce)(grad_x, tp)
        full = (gather.wait() if gather else x).reshape(-1, x.shape[-1])
        grad_weights = [g.t() @ full for g in rows]
        needs_bias = ctx.needs_input_grad[3 + ctx.count :]
        grad_biases = [g.sum(0) if needed else None for g, needed in zip(rows, needs_bias, strict=True)]
        return reduce.wait(), None, None, *grad_weights, *grad_biases


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the rows of W [out, in] split over the axis; y is this rank's columns.

    weight: [out / size, in]; bias: [out / size] or None. The input is [s, b, in], or its slice
    [s / size, b, in] under sequence parallel; the output [s, b, out / size] in both cases.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        *,
        bias: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        rows = tp.share(out_features, "output features of a column-parallel linear")
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return column_parallel(x, [(self.weight, self.bias)], self.tp)[0]


def column_parallel(
    x: Tensor, linears: Sequence[tuple[Tensor, Tensor | None]], tp: TensorParallel
) -> tuple[Tensor, ...]:
    """Apply several column-parallel (weight, bias) to one input, communicating once for all of them.

    x: [s, b, in], or [s / size, b, in] under sequence parallel. Returns one [s, b, out_i / size] each.
    """
    if tp.size == 1:
        return tuple(F.linear(x, weight, bias) for weight, bias in linears)
    weights, biases = zip(*linears, strict=True)
    return _ColumnParallel.apply(x, tp, len(weights), *weights, *biases)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the columns of W [out, in] split over the axis; x is this rank's columns.

    weight: [out, in / size]; bias: [out], replicated, added after the reduction. The input is
    [s, b, in / size]; the output [s, b, out], or [s / size, b, out] under sequence parallel.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        *,
        bias: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        columns = tp.share(in_features, "input features of a row-parallel linear")
        self.weight = nn.Parameter(torch.empty(out_features, columns, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = reduce_output(F.linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias
