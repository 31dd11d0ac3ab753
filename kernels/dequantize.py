"""Decodes payload and scales to values.

q * s is exact in fp32 and is then rounded to the output's dtype. Receivers of differences add to the output. The
fp32 sum then has one rounding, since q * s is exact, and one more to the output's dtype, so every implementation
gives the same bits.

The one pass reads bits / 8 + 2 / block bytes per element and writes 4 (fp32) or 2 (bf16, fp16). If it adds, it also
reads as many bytes as it writes. It accesses memory as quantize does.
"""

from __future__ import annotations

import torch

from megazero.kernels.add_to import add_to
from megazero.kernels.arena import SCRATCH, Frame, Take
from megazero.kernels.dispatch import CHUNK, TILE, jit, tl, use_kernel
from megazero.kernels.format import Format
from megazero.kernels.hadamard import Mixing, inverse_tile, transform_arguments
from megazero.kernels.noise import drawing_jit
from megazero.kernels.quantize import rows_together
from megazero.kernels.values import (
    load_values,
    scales_at,
    seen_as,
    store_values,
    tile_of,
)


def dequantize(messages: torch.Tensor, out: torch.Tensor, form: Format, add: bool = False) -> None:
    """Decode the coded part of ``messages`` into ``out``.

    ``messages`` is uint8 [k, m] and contiguous, and m is a multiple of 16. ``out`` is [k, n] of any float dtype, and
    its rows are contiguous.
    With ``add``, the decoded values are added to ``out``; the sum is taken in fp32 (in fp64 where ``out`` is fp64).
    """
    if not out.numel():
        return
    if use_kernel(messages, out):
        _launch(messages, out, form, add)
        return
    n = out.shape[1]
    payload, scales = form.payload(messages, n), form.scales(messages, n)
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    size = min(n, CHUNK)
    together = rows_together(len(messages), n) if out.is_contiguous() else 1
    direct = out.dtype == dtype and not add
    with SCRATCH.frame(out.device) as frame:
        buffer = frame.take(0 if direct else size * together, dtype)
        decoding = Decoding(frame, size * together, form, dtype)
        for row in range(0, len(messages), together):
            rows = slice(row, row + together)
            for low in range(0, n, size):
                high = min(n, low + size)
                blocks = slice(low // form.block, high // form.block)
                piece = out[rows, low:high].view(-1)
                values = piece if direct else buffer[: len(piece)]
                decoding.values(payload[rows, blocks], scales[rows, blocks], values)
                if add:
                    add_to(values, piece)
                if not direct:
                    piece.copy_(values)


class Decoding:
    """Decodes at most ``size`` elements of a message at a time to ``dtype``, in buffers of ``frame``."""

    def __init__(self, frame: Frame, size: int, form: Format, dtype: torch.dtype) -> None:
        self.unpacking, transform = Unpacking(frame.take, size, form, dtype), form.transform
        self.mixing = Mixing.of(frame, transform, size, dtype) if transform is not None else None
        self.digits = frame.take(size if transform is not None else 0, dtype)

    def values(self, payload: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        """Decode ``payload``, int8 [b, part], and ``scales``, bf16 [b], into ``out``, [b * block].

        Of k rows the first two are [k, b / k, ...].
        """
        digits = out if self.mixing is None else self.digits[: out.numel()]
        self.unpacking.digits(payload, digits)
        if self.mixing is not None:
            self.mixing.inverse_of_digits(digits, out)
        out.view(scales.numel(), -1).mul_(self.unpacking.scales(scales))


class Unpacking:
    """Unpacks payload and scales of at most ``size`` elements at a time, in buffers from ``take``.

    ``dtype`` is the dtype that scales are multiplied in.
    """

    def __init__(self, take: Take, size: int, form: Format, dtype: torch.dtype) -> None:
        self.form = form
        self.scale = take(size // form.block, dtype)
        self.bytes = [take(size // form.pack, torch.int8) for _ in range(2 if form.pack > 1 else 0)]

    def scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Return ``scales``, bf16 [b] or [k, b / k], as a column [b, 1]. It is valid until the next call."""
        column = self.scale[: scales.numel()]
        column.view(scales.shape).copy_(scales)
        return column[:, None]

    def digits(self, payload: torch.Tensor, digits: torch.Tensor) -> None:
        """Unpack ``payload``, int8 [b, part] or [k, b / k, part], into ``digits``: digits q as float [b * block]."""
        form = self.form
        if form.pack == 1:
            digits.view(payload.shape).copy_(payload)
            return
        shifted, digit = (x[: payload.numel()].view(payload.shape) for x in self.bytes)
        # int8 wraps: the bits are those of byte + bias.
        torch.add(payload, (form.bias ^ 0x80) - 0x80, out=shifted)
        parts = digits.view(-1, form.pack, form.part)
        mask = (1 << form.bits) - 1
        for p in range(form.pack):
            torch.bitwise_right_shift(shifted, form.bits * p, out=digit)
            parts[:, p].copy_(digit.bitwise_and_(mask).sub_(form.offset).view(-1, form.part))


@jit
def load_digits(
    words: tl.tensor, halves: tl.tensor, row: tl.tensor, b: tl.tensor, valid: tl.tensor,
    row_bytes: tl.tensor, row_blocks: tl.tensor,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Digits and what each is multiplied by, fp32 [r, w, d], of blocks b int64 [r] of a row int64: w words of d
    digits, as they lie in the payload. words int32 and halves int16 are one buffer.

    A thread loads whole words and keeps their digits. One stays where it is in its word, as the last bits of a float:
    it is 2 ** low times as large, and its scale as much smaller, which is exact, as 2 ** -149 is. So a digit takes
    two operations, and those above bit 16 share a shift.
    """
    PART: tl.constexpr = BLOCK * BITS // 8
    WORD: tl.constexpr = PART if PART < 4 else 4  # bytes
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    BIAS: tl.constexpr = OFFSET * (255 // ((1 << BITS) - 1))
    at = row * (row_bytes // WORD) + b * (PART // WORD)
    at = at[:, None, None] + tl.arange(0, PART // WORD)[None, :, None]
    word = tl.load((halves if WORD < 4 else words) + at, mask=valid[:, None, None], other=0).to(tl.int32)
    # Byte + BIAS has unsigned digits: 128 is a flipped bit, and the rest makes 255 at most, so nothing is carried.
    biased = (word ^ -0x7F7F7F80) + (BIAS - 0x80) * 0x01010101
    bit = tl.arange(0, 8 * WORD // BITS)[None, None, :] * BITS
    shift = bit // 16 * (16 - (BITS if BITS < 4 else 4))
    low = bit - shift
    # 2 ** 23 in a register, as row_blocks is not negative: of two constants, the compiler moves one for each digit.
    exponent = tl.minimum(row_blocks, 0) + 0x4B000000
    digits = ((biased >> shift) & (((1 << BITS) - 1) << low)) | exponent
    digits = digits.to(tl.float32, bitcast=True) - (0x4B000000 + (OFFSET << low)).to(tl.float32, bitcast=True)
    scale = load_values(halves, scales_at(row, b, row_bytes, row_blocks, PART), valid)
    return digits, scale[:, None, None] * ((127 - low) << 23).to(tl.float32, bitcast=True)


@jit
def blocks_tile(x: tl.tensor, BITS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """x [r, w, d] of ``load_digits`` as [r, pack, part]."""
    PACK: tl.constexpr = 8 // BITS
    return tl.permute(tl.reshape(x, (x.shape[0], BLOCK // PACK, PACK)), (0, 2, 1))


@drawing_jit
def _kernel(
    coded: tl.tensor, out: tl.tensor, row_blocks: tl.tensor, row_bytes: tl.tensor,
    row_stride: tl.tensor, sign0: tl.tensor, sign1: tl.tensor, SIZE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr,
) -> None:  # fmt: skip
    words, halves = seen_as(coded, tl.int32), seen_as(coded, tl.int16)
    row, b, valid = tile_of(row_blocks, R)
    # By whole blocks, so that a warp accesses whole lines: halves of them at 4 bits were 41% of a copy's bandwidth.
    at, mask = row * row_stride + b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], valid[:, None]
    if ADD:
        held = load_values(out, at, mask)
    digits, scales = load_digits(words, halves, row, b, valid, row_bytes, row_blocks, BITS, BLOCK)
    values = blocks_tile(digits * scales, BITS, BLOCK)
    values = tl.reshape(inverse_tile(values, sign0, sign1, SIZE), (R, BLOCK))
    if ADD:
        values += held
    store_values(out, at, values, mask)


def _launch(messages: torch.Tensor, out: torch.Tensor, form: Format, add: bool) -> None:
    row_blocks, r = form.blocks(out.shape[1]), TILE // form.block
    _kernel[(-(-row_blocks // r) * messages.shape[0],)](
        messages, out,
        row_blocks, messages.shape[1], out.stride(0), *transform_arguments(form.transform),
        form.bits, form.block, add, r,
        enable_fp_fusion=False,
    )  # fmt: skip
