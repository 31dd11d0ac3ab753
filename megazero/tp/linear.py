"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3; sequence parallel as in
Korthikanti et al. 2022, section 4.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megazero.products.product import Operand, Product
from megazero.tp.context import TensorParallel, reduce_output


class _Linears(torch.autograd.Function):
    """Apply several linears to one input, with one gather forward and one reduction backward for all of them.

    Under sequence parallel only the operand of the input's own slice is kept. The backward gathers it again while the
    gradient of the input is computed, and reduces that gradient while those of the weights are computed. A backward
    that puts the weights' gradients off leaves the gather to them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tp: TensorParallel, product: Product, count: int, *parameters: Tensor | None
    ) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        ctx.tp, ctx.product = tp, product
        ctx.parameters = parameters  # themselves: a saved tensor may come back as another object
        operand, needs_weights = product.operand(x, tp.across), any(ctx.needs_input_grad[4 : 4 + count])
        ctx.kept = len(operand) if needs_weights else 0
        ctx.save_for_backward(*operand[: ctx.kept], *(weights if ctx.needs_input_grad[0] else ()))
        full = tp.start_whole(operand)()
        return tuple(product.forward(full, w, b) for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of x, of the weights and of the biases, or put the parameters' off."""
        tp, product, saved, needs = ctx.tp, ctx.product, ctx.saved_tensors, ctx.needs_input_grad[4:]
        x, weights = saved[: ctx.kept], saved[ctx.kept :]
        rows = [g.reshape(-1, g.shape[-1]) for g in grads]
        read = [product.gradient(g) for g in rows]
        # Detached: an entry must not keep the graph that made x.
        x = tuple(part.detach() for part in x)
        start = partial(_start_gradients, x, read, rows, needs, tp, product)
        gradients = None
        if tp.deferred is None or not tp.deferred.is_recording:
            gradients = start()
        elif any(needs):
            tp.deferred.put_off((p for p, needed in zip(ctx.parameters, needs, strict=True) if needed), start)
        wait = None
        if weights:
            wait = start_reduction(product.grad_x(read, weights).view(*grads[0].shape[:-1], -1), tp)
        parts = gradients() if gradients else None
        owed = [next(parts) if parts and needed else None for needed in needs]
        return wait() if wait else None, None, None, None, *owed


def start_reduction(partial_sum: Tensor, tp: TensorParallel) -> Callable[[], Tensor]:
    """Start to sum the ranks' partial gradients [s, b, in] of a column-parallel input. The result waits for that.

    It is whole, or this rank's [s / size, b, in] under sequence parallel. ``partial_sum`` may be overwritten.
    """
    if tp.size == 1:
        return lambda: partial_sum
    return (tp.start_scatter if tp.sequence_parallel else tp.start_sum)(partial_sum).wait


def _start_gradients(
    x: Operand,
    read: list[Operand],
    rows: list[Tensor],
    needs: Sequence[bool],
    tp: TensorParallel,
    product: Product,
) -> Callable[[], Iterator[Tensor]]:
    """Start to gather the input. The result yields the gradients that ``needs`` marks, one at a time.

    ``x`` is the operand of [s, b, in], of its slice under sequence parallel, or () where no weight needs a gradient.
    ``rows`` holds one [s * b, out_i] for each linear, and ``read`` their operands. ``needs`` is for the weights, then
    for the biases.
    """
    whole, dtype = tp.start_whole(x), rows[0].dtype
    of_biases = [g for g, needed in zip(rows, needs[len(rows) :], strict=True) if needed]

    def gradients() -> Iterator[Tensor]:
        full, owed = whole(), [g for g, needed in zip(read, needs, strict=False) if needed]
        yield from (product.grad_weight(g, full, dtype) for g in owed)
        yield from (g.sum(0) for g in of_biases)

    return gradients


def _apply(
    x: Tensor, linears: Sequence[tuple[Tensor, Tensor | None]], tp: TensorParallel, product: Product
) -> tuple[Tensor, ...]:
    """Apply several linears to one input of the ``tp`` ranks. The gradients of weights and biases can be put off."""
    weights, biases = zip(*linears, strict=True)
    if tp.size > 1 or (tp.deferred is not None and not product.plain):
        return _linears(x, tp, product, len(weights), *weights, *biases)
    if not product.plain:
        return _Linears.apply(x, tp, product, len(weights), *weights, *biases)
    # One by one, so that autograd sums the gradients of x in the same order with and without deferral.
    if tp.deferred is not None:
        return tuple(_linears(x, tp, product, 1, *each)[0] for each in linears)
    return tuple(product.forward((x,), *each) for each in linears)


@torch._disable_dynamo
def _linears(
    x: Tensor, tp: TensorParallel, product: Product, count: int, *parameters: Tensor | None
) -> tuple[Tensor, ...]:
    """Apply _Linears, which torch.compile leaves as it is: it starts collectives, or puts gradients off."""
    return _Linears.apply(x, tp, product, count, *parameters)


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
    return _apply(x, linears, tp, tp.product.chosen([weight for weight, _ in linears], tp.size, 0))


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
        self.tp, self.alone = tp, TensorParallel(deferred=tp.deferred)  # the input is this rank's own
        columns = tp.share(in_features, "input features of a row-parallel linear")
        self.weight = nn.Parameter(torch.empty(out_features, columns, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        product = self.tp.product.chosen([self.weight], self.tp.size, 1)
        if self.tp.size == 1:
            return _apply(x, [(self.weight, self.bias)], self.tp, product)[0]
        y = reduce_output(_apply(x, [(self.weight, None)], self.alone, product)[0], self.tp)
        return y if self.bias is None else y + self.bias
