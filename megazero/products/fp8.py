"""Products in fp8: two matrices of 8-bit floating-point numbers with scales, and sums in fp32.

y = a b^T, where a [m, k] and b [n, k] are in E4M3, or gradients in E5M2 (Micikevicius et al. 2022). Scales are powers
of two: a number is rounded alike under all of them unless it is 2^-13 of the largest or less, so layouts, which take
the largest of other numbers, agree, and what was rounded is rounded again without loss. A scale makes the largest
number fit, so nothing saturates. Where a number is not finite, its scale is NaN, and so is what is multiplied by it.

Devices without fp8 multiply the same rounded numbers in the dtype of x. All of them are numbers of bf16, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from megazero.products import BLOCK, fits_fp8
from megazero.products.product import PLAIN, Across, Operand, Product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNED = 16  # the kernels take sides that are multiples of it
WHOLE = 0  # of a side of a block: all of it
_LARGEST = {E4M3: 8, E5M2: 15}  # the exponent of the largest number, which is 1.75 times that power
_ABOVE = (1 << 21) - 1  # added to the bits of an fp32, it raises the exponent of mantissas above 1.75


class Rounded(NamedTuple):
    """Numbers [..., n, k] in fp8, fp32 scales of their blocks [..., n / rows, k / columns], and a block's sides.

    A single scale for all has no dimensions, and no block.
    """

    numbers: Tensor
    scale: Tensor
    block: tuple[int, int] | None = None

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Return what the numbers stand for."""
        numbers = self.numbers.to(dtype)
        if self.block is None:
            return numbers * self.scale.to(dtype)
        blocks = _blocks(numbers, self.block) * self.scale[..., :, None, :, None].to(dtype)
        return _whole(blocks, self.numbers.shape)

    def transposed(self) -> Rounded:
        """Return the matrix [k, n]."""
        if self.block is None:
            return Rounded(self.numbers.t(), self.scale)
        return Rounded(self.numbers.t(), self.scale.t(), self.block[::-1])

    def rows(self) -> Rounded:
        """Return the matrix of all rows."""
        scale = self.scale if self.block is None else self.scale.reshape(-1, self.scale.shape[-1])
        return Rounded(self.numbers.reshape(-1, self.numbers.shape[-1]), scale, self.block)


def rounded(
    x: Tensor, dtype: torch.dtype, block: tuple[int, int] | None = None, across: Across | None = None
) -> Rounded:
    """Round ``x`` with a scale for each block of its last two dims, or one for all, to nearest, ties to even.

    across: as ``Product.operand``'s, where there is one scale.
    """
    if block is None:
        largest = x.abs().amax().float()
        # NCCL's maximum may pass over NaN.
        scale = _scale(largest if across is None else across(largest.nan_to_num(nan=torch.inf)), dtype)
        return Rounded((x * scale.reciprocal()).to(dtype), scale)
    blocks = _blocks(x, block)
    scale = _scale(blocks.abs().amax((-3, -1), keepdim=True).float(), dtype)
    numbers = (blocks * scale.reciprocal()).to(dtype)
    return Rounded(_whole(numbers, x.shape), scale.squeeze(-1).squeeze(-2), block)


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the least power of two by which numbers up to ``largest``, fp32, fit the dtype; at least 2^-126."""
    exponent = ((largest.view(torch.int32) + _ABOVE) >> 23) - _LARGEST[dtype]
    scale = (exponent.clamp(min=1) << 23).view(torch.float32)
    return torch.where(largest < torch.inf, scale, torch.nan)


def _blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return [..., n, k] as [..., n / rows, rows, k / columns, columns], the last ones filled up with zeros."""
    rows, columns = (side or n for side, n in zip(block, x.shape[-2:], strict=True))
    lacking = -x.shape[-2] % rows, -x.shape[-1] % columns
    x = F.pad(x, (0, lacking[1], 0, lacking[0])) if any(lacking) else x
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _whole(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten(-4, -3).flatten(-2, -1)[..., : shape[-2], : shape[-1]].contiguous()


def multiply(
    a: Rounded, b: Rounded, dtype: torch.dtype, *, fast: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return a b^T, [m, n]. fast: on CUDA with sums that lose some bits, which is enough for a forward."""
    if a.numbers.is_cuda:
        y = _multiply_scaled(a, b, dtype, fast)
        return y if out is None else out.copy_(y)
    return torch.mm(a.wide(dtype), b.wide(dtype).t(), out=out)


def _multiply_scaled(a: Rounded, b: Rounded, dtype: torch.dtype, fast: bool) -> Tensor:
    """Multiply by the kernels of torch, whose scales lie as aten/src/ATen/native/cuda/ScaledBlas.cpp says."""
    n, lacking = len(b.numbers), -a.numbers.shape[1] % ALIGNED
    a, b = _filled(a, 0, lacking), _filled(b, -n % ALIGNED, lacking)
    left, right = a.numbers.contiguous(), b.numbers.contiguous().t()
    if a.block is None:
        y = torch._scaled_mm(left, right, a.scale, b.scale, out_dtype=dtype, use_fast_accum=fast)
    elif a.block == (1, WHOLE):
        scales = a.scale.contiguous(), b.scale.expand(len(b.numbers), 1).t().contiguous()
        y = torch._scaled_mm(left, right, *scales, out_dtype=dtype, use_fast_accum=fast)
    else:
        (one, of_a), (other, of_b) = map(_laid_out, (a, b))
        y = F.scaled_mm(left, right, of_a, one, of_b, other, output_dtype=dtype)
    return y[:, :n].contiguous()


def _filled(x: Rounded, rows: int, columns: int) -> Rounded:
    """Return the matrix with so many more rows and columns of zeros."""
    if not rows and not columns:
        return x
    numbers = F.pad(x.numbers, (0, columns, 0, rows))
    scale = F.pad(x.scale, (0, 0, 0, rows)) if x.block and x.block[0] == 1 else x.scale
    return Rounded(numbers, scale, x.block)


def _laid_out(x: Rounded) -> tuple[ScalingType, Tensor]:
    if x.block == (1, BLOCK):
        return ScalingType.BlockWise1x128, x.scale.t().contiguous().t()
    return ScalingType.BlockWise128x128, F.pad(x.scale, (0, -x.scale.shape[1] % 4)).contiguous().t()


class TensorScales(Product):
    """One scale for each tensor. What is kept of an input, and gathered, has a byte an element.

    gradients: torch's name of the format of gradients. least: as ``fits_fp8``'s; smaller ones are multiplied plainly.
    """

    plain = False
    recipe, capabilities = "tensorwise", ((8, 9), (99, 9))  # of CUDA devices, from and to
    of_rows: tuple[int, int] | None = None  # blocks of inputs and of gradients
    of_weights: tuple[int, int] | None = None

    def __init__(self, gradients: str = "float8_e4m3fn", least: int = 1) -> None:
        self.gradients, self.least = getattr(torch, gradients), least

    def require(self, device: torch.device) -> None:
        if device.type != "cuda":
            return
        first, last = self.capabilities
        if torch.version.hip is not None or not first <= torch.cuda.get_device_capability(device) <= last:
            low, high = (".".join(map(str, each)) for each in (first, last))
            raise ValueError(
                f"--fp8-recipe {self.recipe} on {torch.cuda.get_device_name(device)}: torch has it for CUDA devices "
                f"of capabilities {low} to {high}; nearest: another recipe, or no --fp8-format, which is bf16"
            )

    def chosen(self, weights: Sequence[Tensor], tp: int, cut: int) -> Product:
        whole = ([n * (tp if dim == cut else 1) for dim, n in enumerate(w.shape)] for w in weights)
        return self if fits_fp8(map(tuple, whole), self.least) else PLAIN

    def operand(self, x: Tensor, across: Across | None = None) -> Operand:
        return rounded(x, E4M3, self.of_rows, across)[:2]

    def gradient(self, grad: Tensor) -> Operand:
        return rounded(grad, self.gradients, self.of_rows)[:2]

    def forward(
        self, x: Operand, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        rows = multiply(self._rows(x, E4M3), self._weight(weight), weight.dtype, fast=True, out=out)
        # No view for autograd: what a Function returns may be written in place then.
        y = torch.ops.aten._unsafe_view(rows, [*x[0].shape[:-1], len(weight)])
        return y if bias is None else y + bias

    def grad_x(
        self, grads: Sequence[Operand], weights: Sequence[Tensor], out: Tensor | None = None
    ) -> Tensor:
        terms = (
            multiply(self._rows(grad, self.gradients), self._turned(weight), weight.dtype)
            for grad, weight in zip(grads, weights, strict=True)
        )
        total = next(terms)
        for term in terms:
            total = total.add_(term)
        return total if out is None else out.copy_(total)

    def grad_weight(
        self, grad: Operand, x: Operand, dtype: torch.dtype, sums: Tensor | None = None
    ) -> Tensor:
        y = multiply(self._columns(grad, self.gradients, dtype), self._columns(x, E4M3, dtype), dtype)
        return y if sums is None else sums.add_(y)

    def _rows(self, operand: Operand, dtype: torch.dtype) -> Rounded:
        """Return the rows of an input or of a gradient."""
        numbers, scale = operand
        return Rounded(numbers, scale, self.of_rows).rows()

    def _columns(self, operand: Operand, dtype: torch.dtype, wide: torch.dtype) -> Rounded:
        """Return the rows' transpose."""
        return self._rows(operand, dtype).transposed()

    def _weight(self, weight: Tensor) -> Rounded:
        return rounded(weight, E4M3, self.of_weights)

    def _turned(self, weight: Tensor) -> Rounded:
        """Return the weight's transpose."""
        return self._weight(weight).transposed()


class BlockScales(TensorScales):
    """One for 128 numbers of a token, and for 128 x 128 of a weight (DeepSeek-V3, arXiv 2412.19437, section 3.3).

    A weight's gradient takes blocks of 128 tokens, to which what was rounded is rounded again.
    """

    recipe, capabilities = "blockwise", ((9, 0), (9, 9))
    of_rows, of_weights = (1, BLOCK), (BLOCK, BLOCK)

    def _columns(self, operand: Operand, dtype: torch.dtype, wide: torch.dtype) -> Rounded:
        return rounded(self._rows(operand, dtype).wide(wide).t(), dtype, self.of_rows)


class RowScales(TensorScales):
    """One for each token, and for each row of a weight. Gradients of weights are computed as they are, so inputs are
    kept so, too. For the gradient of the input a weight has one scale (torchao's rowwise_with_gw_hp).
    """

    recipe, capabilities = "rowwise", ((9, 0), (99, 9))
    of_rows = of_weights = (1, WHOLE)
    operand, gradient, grad_weight = Product.operand, Product.gradient, Product.grad_weight

    def _rows(self, operand: Operand, dtype: torch.dtype) -> Rounded:
        return rounded(operand[0].reshape(-1, operand[0].shape[-1]), dtype, self.of_rows)

    def _turned(self, weight: Tensor) -> Rounded:
        return rounded(weight, E4M3).transposed()
