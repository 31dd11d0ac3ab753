"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3; sequence parallel as in
Korthikanti et al. 2022, section 4.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megazero.products.product import Operand
from megazero.tp.context import TensorParallel, reduce_output


class _Linears(torch.autograd.Function):
    """Apply several linears to one input, with one gather forward and one reduction backward for all of them.

    Under sequence parallel only the operand of the input's own slice is kept. The backward gathers it again while the
    gradient of the input is computed, and reduces that gradient while those of the weights are computed. A backward
    that puts the weights' gradients off leaves the gather to them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, count: int, *parameters: Tensor | None) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        ctx.tp, ctx.parameters = tp, parameters  # themselves: a saved tensor may come back as another object
        operand, needs_weights = tp.product.operand(x), any(ctx.needs_input_grad[3 : 3 + count])
        ctx.kept = len(operand) if needs_weights else 0
        ctx.save_for_backward(*operand[: ctx.kept], *(weights if ctx.needs_input_grad[0] else ()))
        full = tp.start_whole(operand)()
        return tuple(tp.product.forward(full, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of x, of the weights and of the biases, or put the parameters' off."""
        tp, saved, needs = ctx.tp, ctx.saved_tensors, ctx.needs_input_grad[3:]
        x, weights = saved[: ctx.kept], saved[ctx.kept :]
        rows = [g.reshape(-1, g.shape[-1]) for g in grads]
        # Detached: an entry must not keep the graph that made x.
        start = partial(_start_gradients, tuple(part.detach() for part in x), rows, needs, tp)
        gradients = None
        if tp.deferred is None or not tp.deferred.is_recording:
            gradients = start()
        elif any(needs):
            tp.deferred.put_off((p for p, needed in zip(ctx.parameters, needs, strict=True) if needed), start)
        wait = None
        if weights:
            wait = start_reduction(tp.product.grad_x(rows, weights).view(*grads[0].shape[:-1], -1), tp)
        parts = gradients() if gradients else None
        owed = [next(parts) if parts and needed else None for needed in needs]
        return wait() if wait else None, None, None, *owed


def start_reduction(partial_sum: Tensor, tp: TensorParallel) -> Callable[[], Tensor]:
    """Start to sum the ranks' partial gradients [s, b, in] of a column-parallel input. The result waits for that.

    It is whole, or this rank's [s / size, b, in] under sequence parallel. ``partial_sum`` may be overwritten.
    """
    if tp.size == 1:
        return lambda: partial_sum
    return (tp.start_scatter if tp.sequence_parallel else tp.start_sum)(partial_sum).wait


def _start_gradients(
    x: Operand, rows: list[Tensor], needs: Sequence[bool], tp: TensorParallel
) -> Callable[[], Iterator[Tensor]]:
    """Start to gather the input. The result yields the gradients that ``needs`` marks, one at a time.

    ``x`` is the operand of [s, b, in], of its slice under sequence parallel, or () where no weight needs a gradient.
    ``rows`` holds one [s * b, out_i] for each linear. ``needs`` is for the weights, then for the biases.
    """
    whole = tp.start_whole(x)

    def gradients() -> Iterator[Tensor]:
        full = whole()
        yield from (tp.product.grad_weight(g, full) for g, needed in zip(rows, needs, strict=False) if needed)
        yield from (g.sum(0) for g, needed in zip(rows, needs[len(rows) :], strict=True) if needed)

    return gradients


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, tp: TensorParallel) -> Tensor:
    """Apply a linear on this rank alone. The gradients of weight and bias can be put off."""
    if tp.deferred is None:
        return tp.product.apply(x, weight, bias)
    return _linears(x, TensorParallel(product=tp.product, deferred=tp.deferred), 1, weight, bias)[0]


@torch._disable_dynamo
def _linears(x: Tensor, tp: TensorParallel, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
    """Apply _Linears, which torch.compile leaves as it is: it starts collectives, or puts gradients off."""
    return _Linears.apply(x, tp, count, *parameters)


class ColumnParallelLinear(nn.Module):
    """Computes y = x W^T + b. The rows of W [out, in] are split over the axis, and y is this rank's columns.

    ``weight`` is [out / size, in], and ``bias`` is [out / size] or None. The input is [s, b, in], or its slice
    [s / size, b, in] under sequence parallel. The output is [s, b, out / size] in both cases.
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

    ``x`` is [s, b, in], or [s / size, b, in] under sequence parallel. Each linear gives one [s, b, out_i / size].
    """
    if tp.size == 1:
        # One by one, so that autograd sums the gradients of x in the same order with and without deferral.
        return tuple(_linear(x, weight, bias, tp) for weight, bias in linears)
    weights, biases = zip(*linears, strict=True)
    return _linears(x, tp, len(weights), *weights, *biases)


class RowParallelLinear(nn.Module):
    """Computes y = x W^T + b. The columns of W [out, in] are split over the axis, and x is this rank's columns.

    ``weight`` is [out, in / size]. ``bias`` is [out], replicated, and is added after the reduction. The input is
    [s, b, in / size]. The output is [s, b, out], or [s / size, b, out] under sequence parallel.
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
            return _linear(x, self.weight, self.bias, self.tp)
        y = reduce_output(_linear(x, self.weight, None, self.tp), self.tp)
        return y if self.bias is None else y + self.bias
