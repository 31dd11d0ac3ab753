"""Encodes values to payload and scales (kernels/format.py has their layout).

Each block has an absmax a and a scale s, which is a / qmax rounded up to bf16. Its digits are rint(clamp(x / s)).
x / s is computed as x times the reciprocal of s.

For each element, the one pass reads 4 bytes (fp32) or 2 (bf16, fp16) and writes bits / 8 + 2 / block. A program
keeps its blocks in registers between absmax and digits. Accesses are 16 bytes wide (the compiled code is checked), 8
for the payload of 2 bits, and less where a block's payload is less.

``error_bound`` bounds how far a decoded value may be from the value that was encoded. With y = x / s, computed in
fp32 and clamped to -qmax .. qmax, and q = rint(y), the decoded value is q * s, which is exact. Then:

    |x - q s| <= s / 2 + max(0, |x| - qmax s) + slack

The second term is what a scale at the format's upper limit cuts off. slack is s * qmax * 2 ** -21. It covers the
conversion of x to fp32 (2 ** -24, for fp64), and the reciprocal and the product (2 ** -24 each), all relative to at
most qmax.

Under a transform of T elements (hadamard.py) that holds for the transformed values, and an element is T times that
from what was encoded at most: D H adds up T errors. Rounding in the transform adds log2(T) * 2 ** -24 of absmax and
T * 2 ** -150 (x / T below 2 ** -126) to each, and nothing on the way back.

The bounds of hops add up. The sum of k decoded messages is within the sum of their bounds (and fp32's own rounding,
which is (k - 1) * 2 ** -24 of the sum of absolute values). If that sum is encoded again for the second hop, the
bound of the sum is added once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megazero.kernels.add_to import add_to
from megazero.kernels.arena import SCRATCH, Take
from megazero.kernels.dispatch import CHUNK, TILE, jit, tl, use_kernel
from megazero.kernels.format import NAN_SCALE, SMALLEST_SCALE, Format
from megazero.kernels.hadamard import Mixing, forward_tile, mixed, transform_arguments
from megazero.kernels.noise import drawing_jit
from megazero.kernels.values import (
    load_values,
    rounded_as,
    scales_at,
    seen_as,
    small_integers,
    tile_of,
)


def quantize(x: torch.Tensor, messages: torch.Tensor, form: Format, base: torch.Tensor | None = None) -> None:
    """Encode x, which is [k, n] of any float dtype and contiguous, into the coded part of ``messages``.

    ``messages`` is uint8 [k, m] and contiguous, and m is a multiple of 16. base: [k, n] of any float dtype and
    contiguous; then what is encoded is the difference of x, rounded to its dtype, to it.
    """
    if not x.numel():
        return
    if use_kernel(messages, x):
        _launch(x, messages, form, base)
        return
    values = x.view(-1)

    def load(low: int, high: int, out: torch.Tensor) -> torch.Tensor:
        piece = values[low:high]
        if base is None:
            return piece if x.dtype == torch.float32 else out.copy_(piece)
        with SCRATCH.frame(x.device) as frame:
            rounded = frame.take(high - low, base.dtype).copy_(piece)
            difference = frame.take(high - low, x.dtype) if x.dtype == torch.float64 else out
            return out.copy_(add_to(difference.copy_(rounded), base.view(-1)[low:high], alpha=-1.0))

    encode_rows(load, messages, x.shape[1], form)


def encode_rows(
    load: Callable[[int, int, torch.Tensor], torch.Tensor],
    messages: torch.Tensor,
    n: int,
    form: Format,
) -> None:
    """Encode every row of ``messages``, uint8 [k, m], in chunks: of a part of a row, or of many short rows.

    load(low, high, out) returns the fp32 values [high - low] of these elements, of rows of n that follow each other,
    in ``out`` or elsewhere.
    """
    payload, scales = form.payload(messages, n), form.scales(messages, n).view(torch.int16)
    size = min(n, CHUNK)
    together = rows_together(len(messages), n)
    with SCRATCH.frame(messages.device) as frame:
        take = frame.take
        most = size * together
        buffer, work = take(most, torch.float32), Work.of(take, most, form)
        mixing = Mixing.of(frame, form.transform, most) if form.transform is not None else None
        for row in range(0, len(messages), together):
            for low in range(0, n, size):
                first, last = low // form.block, min(n, low + size) // form.block
                coded, own = (
                    payload[row : row + together, first:last],
                    scales[row : row + together, first:last],
                )
                start, count = row * n + low, own.numel() * form.block
                values = load(start, start + count, buffer[:count])
                if mixing is not None:
                    values = mixing.forward(values)
                found = encode_blocks(values.view(-1, form.block), work.of_blocks(own.numel()), form, coded)
                own.copy_(found.view(own.shape))  # bits: a NaN's would not survive a conversion


def rows_together(rows: int, n: int) -> int:
    """Return how many rows of n elements are coded at once. A token's row has some thousand: 20 operations for each
    take longer than their values."""
    return max(1, min(rows, CHUNK // n))


class Work(NamedTuple):
    """What encoding b blocks writes on its way: fp32 [b, block], three times fp32 [b], and bool [b]."""

    digits: torch.Tensor
    absmax: torch.Tensor
    scale: torch.Tensor
    inverse: torch.Tensor
    mask: torch.Tensor

    @staticmethod
    def of(take: Take, n: int, form: Format) -> Work:
        """Take it for n elements."""
        b = n // form.block
        digits = take(n, torch.float32).view(b, form.block)
        absmax, scale, inverse = (take(b, torch.float32) for _ in range(3))
        return Work(digits, absmax, scale, inverse, take(b, torch.bool))

    def of_blocks(self, b: int) -> Work:
        return self if b == len(self.mask) else Work(*(x[:b] for x in self))


def encode_blocks(values: torch.Tensor, work: Work, form: Format, payload: torch.Tensor) -> torch.Tensor:
    """Encode ``values``, fp32 [b, block], into ``payload``, int8 [b, part] or, of k rows, [k, b / k, part].

    Returns the bf16 bits of the scales as int32 [b], which lie in ``work``.
    """
    scale = _scaled(values, work, form)
    # The inverse is 0 where the scale is 0 or NaN. So NaN comes of blocks with NaN or Inf alone. The device is not
    # asked whether there are any.
    inverse = torch.reciprocal(scale, out=work.inverse).nan_to_num_(0.0, posinf=0.0)
    digits = (
        torch.mul(values, inverse[:, None], out=work.digits).nan_to_num_(0.0).clamp_(-form.qmax, form.qmax)
    )
    parts = digits.round_().unflatten(1, (form.pack, form.part))
    for p in range(form.pack - 1, 0, -1):
        parts[:, p - 1].add_(parts[:, p], alpha=1 << form.bits)
    payload.copy_(parts[:, 0].view(payload.shape))
    return scale.view(torch.int32).bitwise_right_shift_(16)


def scales_of(values: torch.Tensor, form: Format) -> torch.Tensor:
    """Return the scales, fp32 [b], of ``values``, fp32 [b, block]."""
    if not len(values):
        return values.new_empty(0)
    with SCRATCH.frame(values.device) as frame:
        return _scaled(values, Work.of(frame.take, values.numel(), form), form).clone()


def error_bound(x: torch.Tensor, form: Format) -> torch.Tensor:
    """Return the largest difference between an element of x and its decoded fp32 value, per block.

    x is [k, n] of any float dtype; the result is fp32 [k, n / block]. It is NaN for blocks that have NaN or Inf. A
    16-bit output adds its own rounding, and it may overflow where a block comes within 0.8% of the dtype's largest
    value, since scales are rounded up.
    """
    values, transform = x.float(), form.transform
    absmax = values.abs().unflatten(1, (-1, form.block)).amax(2)
    if transform is not None:
        values = mixed(values, transform)
    blocks = values.unflatten(1, (-1, form.block))
    scale = scales_of(blocks.flatten(0, 1), form).view(blocks.shape[:2])
    clipped = (blocks.abs().amax(2) - form.qmax * scale).clamp_(min=0.0)
    bound = scale * (0.5 + form.qmax * 2.0**-21) + clipped
    if transform is None:
        return bound
    size = transform.size
    return size * (bound + absmax * (size.bit_length() * 2.0**-24) + size * 2.0**-150)


def _scaled(values: torch.Tensor, work: Work, form: Format) -> torch.Tensor:
    """Return the scales, fp32 [b], of ``values``, fp32 [b, block].

    A scale is absmax / qmax, rounded up to bf16, within its limits. 0 and NaN follow format.py.
    """
    torch.amax(torch.abs(values, out=work.digits), 1, out=work.absmax)
    bits = torch.mul(work.absmax, form.ratio, out=work.scale).view(torch.int32)
    bits.add_(0xFFFF).bitwise_and_(~0xFFFF).clamp_(SMALLEST_SCALE, form.largest_scale)
    bits.masked_fill_(torch.eq(work.absmax, 0, out=work.mask), 0)
    finite = torch.lt(work.absmax, torch.inf, out=work.mask)  # NaN is not
    bits.masked_fill_(finite.logical_not_(), NAN_SCALE)
    return work.scale


@jit
def scale_tile(bits: tl.tensor, ratio: float, LARGEST: tl.constexpr) -> tl.tensor:
    """absmax as fp32 bits int32 [r] -> scale fp32 [r]."""
    scaled = (bits.to(tl.float32, bitcast=True) * ratio).to(tl.int32, bitcast=True)
    scaled = (scaled + 0xFFFF) & -0x10000
    scaled = tl.minimum(tl.maximum(scaled, 0x00800000), LARGEST)
    scaled = tl.where(bits == 0, 0, scaled)
    return tl.where(bits >= 0x7F800000, 0x7FC00000, scaled).to(tl.float32, bitcast=True)


@jit
def inverse_tile(scale: tl.tensor) -> tl.tensor:
    """1 / scale, 0 for scales 0 and NaN."""
    usable = scale > 0
    return tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)


@jit
def encode_tile(x: tl.tensor, BITS: tl.constexpr, LARGEST: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """x fp32 [r, pack, part] -> payload int8 [r, part], scale fp32 [r]."""
    PACK: tl.constexpr = 8 // BITS
    QMAX: tl.constexpr = (1 << (BITS - 1)) - 1
    bits = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2), axis=1)
    finite = bits < 0x7F800000
    x = tl.where(finite[:, None, None], x, 0.0)
    scale = scale_tile(bits, 1.0 / QMAX, LARGEST)
    y = x * inverse_tile(scale)[:, None, None]
    if BITS == 8:  # of fewer, the largest scale leaves y within qmax + 1 / 8, which is rounded to qmax
        y = tl.clamp(y, -1.0 * QMAX, 1.0 * QMAX)
    digits = small_integers(y)
    p = tl.arange(0, PACK)[None, :, None]
    return tl.sum(digits << (p * BITS), axis=1).to(tl.int8), scale


@jit
def store_tile(
    payload: tl.tensor, scale: tl.tensor, row: tl.tensor, b: tl.tensor, valid: tl.tensor,
    messages: tl.tensor, halves: tl.tensor, row_bytes: tl.tensor, row_blocks: tl.tensor,
    PART: tl.constexpr,
) -> None:  # fmt: skip
    """Store blocks b int64 [r] of a row int64: payload int8 [r, PART] and scale [r]; messages int8 and halves int16
    are one buffer, rows of row_bytes and row_blocks blocks."""
    j = tl.arange(0, PART)
    tl.store(messages + (row * row_bytes + b * PART)[:, None] + j[None, :], payload, mask=valid[:, None])
    top = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(halves + scales_at(row, b, row_bytes, row_blocks, PART), top, mask=valid)


@drawing_jit
def _kernel(
    x: tl.tensor, base: tl.tensor | None, coded: tl.tensor, row_blocks: tl.tensor, row_bytes: tl.tensor,
    sign0: tl.tensor, sign1: tl.tensor, SIZE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, R: tl.constexpr,
) -> None:  # fmt: skip
    PACK: tl.constexpr = 8 // BITS
    PART: tl.constexpr = BLOCK // PACK
    messages, halves = seen_as(coded, tl.int8), seen_as(coded, tl.int16)
    row, b, valid = tile_of(row_blocks, R)
    g = row * row_blocks + b
    p = tl.arange(0, PACK)[None, :, None]
    at = g[:, None, None] * BLOCK + p * PART + tl.arange(0, PART)[None, None, :]
    values = load_values(x, at, valid[:, None, None])
    if base is not None:
        values = rounded_as(values, base) - load_values(base, at, valid[:, None, None])
    values = forward_tile(values, sign0, sign1, SIZE)
    payload, scale = encode_tile(values, BITS, LARGEST)
    store_tile(payload, scale, row, b, valid, messages, halves, row_bytes, row_blocks, PART)


def _launch(x: torch.Tensor, messages: torch.Tensor, form: Format, base: torch.Tensor | None) -> None:
    row_blocks, r = form.blocks(x.shape[1]), TILE // form.block
    _kernel[(-(-row_blocks // r) * x.shape[0],)](
        x, base, messages,
        row_blocks, messages.shape[1], *transform_arguments(form.transform),
        form.bits, form.block, form.largest_scale, r,
        enable_fp_fusion=False,
    )  # fmt: skip
