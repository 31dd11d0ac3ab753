"""Decodes and sums, at the end of a quantised reduction.

It computes out (+)= messages[0] + messages[1] + ... in this order. Products q * s are exact in fp32 and each addition
is rounded once, so the sum has the same bits on every implementation. Where out is fp64, the sum is taken in fp64.
Under a transform (hadamard.py) the messages are summed first, transformed back once, and then added to out.

For each element of out, the one pass reads k x (bits / 8 + 2 / block) bytes and writes 4. If it accumulates, it
reads 4 more.
"""

from __future__ import annotations

import torch

from megazero.kernels.arena import SCRATCH, Frame
from megazero.kernels.dequantize import Decoding, blocks_tile, load_digits
from megazero.kernels.dispatch import CHUNK, TILE, jit, tl, use_kernel
from megazero.kernels.format import Format
from megazero.kernels.hadamard import inverse_tile, transform_arguments
from megazero.kernels.noise import drawing_jit
from megazero.kernels.values import seen_as


def dequantize_accumulate(messages: torch.Tensor, out: torch.Tensor, form: Format, accumulate: bool) -> None:
    """Decode the rows of ``messages`` and write their sum to ``out``, or add it to ``out`` if ``accumulate``.

    ``messages`` is uint8 [k, m] and contiguous, and m is a multiple of 16; its coded part is read. ``out`` is [n],
    fp32 or fp64, and contiguous.
    """
    if not out.numel():
        return
    if use_kernel(messages, out):
        _launch(messages, out, form, accumulate)
        return
    n = out.numel()
    with SCRATCH.frame(out.device) as frame:
        total = Summed(messages, n, form, out.dtype, frame)
        for low in range(0, n, total.size):
            high = min(n, low + total.size)
            total.add(low, high, out[low:high], accumulate)


class Summed:
    """The reference: sums decoded messages, uint8 [k, m], by pieces of at most ``size`` elements.

    Its buffers are of ``frame``.
    """

    def __init__(
        self, messages: torch.Tensor, n: int, form: Format, dtype: torch.dtype, frame: Frame
    ) -> None:
        self.form, self.size = form, min(n, CHUNK)
        self.payload, self.scales = form.payload(messages, n), form.scales(messages, n)
        self.digits, self.decoding = frame.take(self.size, dtype), Decoding(frame, self.size, form, dtype)
        self.sums = frame.take(self.size if form.transform is not None else 0, dtype)

    def add(self, low: int, high: int, out: torch.Tensor, accumulate: bool) -> None:
        """Compute out [high - low] (+)= the elements low .. high of every message."""
        mixing, unpacking = self.decoding.mixing, self.decoding.unpacking
        if mixing is not None and accumulate:
            sums = self.sums[: high - low]
            self.add(low, high, sums, accumulate=False)
            out.add_(sums)
            return
        blocks = slice(low // self.form.block, high // self.form.block)
        if mixing is not None and len(self.payload) == 1:
            self.decoding.values(self.payload[0, blocks], self.scales[0, blocks], out)
            return
        sums, digits = out.view(-1, self.form.block), self.digits[: high - low].view(-1, self.form.block)
        for k, (payload, scales) in enumerate(zip(self.payload, self.scales, strict=True)):
            scale = unpacking.scales(scales[blocks])
            first = k == 0 and not accumulate
            unpacking.digits(payload[blocks], sums if first else digits)
            if first:
                sums.mul_(scale)
            else:
                sums.addcmul_(digits, scale)
        if mixing is not None:
            mixing.inverse(out, out)


@jit
def sum_tile(
    acc: tl.tensor, words: tl.tensor, halves: tl.tensor, sources: tl.tensor, b: tl.tensor, valid: tl.tensor,
    row_bytes: tl.tensor, row_blocks: tl.tensor,
    BITS: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """acc fp32 [r, BLOCK] + blocks b int64 [r] of messages 0, 1, ... sources - 1, in this order: [r, pack, part].

    The sum stays in the layout of loaded words (load_digits), so nothing is exchanged between threads for it.
    """
    PACK: tl.constexpr = 8 // BITS
    D: tl.constexpr = 32 // BITS if 32 // BITS < BLOCK else BLOCK  # digits of a word
    acc = tl.permute(tl.reshape(acc, (acc.shape[0], PACK, BLOCK // PACK)), (0, 2, 1))
    acc = tl.reshape(acc, (acc.shape[0], BLOCK // D, D))
    for k in range(sources):
        row = tl.cast(k, tl.int64)
        digits, scales = load_digits(words, halves, row, b, valid, row_bytes, row_blocks, BITS, BLOCK)
        acc = tl.fma(digits, scales, acc)  # the product is exact, so the sum is rounded once
    return blocks_tile(acc, BITS, BLOCK)


@drawing_jit
def _kernel(
    coded: tl.tensor, out: tl.tensor, sources: tl.tensor, row_blocks: tl.tensor,
    row_bytes: tl.tensor, sign0: tl.tensor, sign1: tl.tensor, SIZE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ACCUMULATE: tl.constexpr, R: tl.constexpr,
) -> None:  # fmt: skip
    words, halves = seen_as(coded, tl.int32), seen_as(coded, tl.int16)
    b = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = b < row_blocks
    at, mask = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], valid[:, None]
    acc = tl.zeros((R, BLOCK), tl.float32)
    if ACCUMULATE and SIZE == 0:
        acc = tl.load(out + at, mask=mask, other=0.0)
    acc = sum_tile(acc, words, halves, sources, b, valid, row_bytes, row_blocks, BITS, BLOCK)
    acc = tl.reshape(inverse_tile(acc, sign0, sign1, SIZE), (R, BLOCK))
    if ACCUMULATE and SIZE > 0:
        acc += tl.load(out + at, mask=mask, other=0.0)
    tl.store(out + at, acc, mask=mask)


def _launch(messages: torch.Tensor, out: torch.Tensor, form: Format, accumulate: bool) -> None:
    row_blocks, r = form.blocks(out.numel()), TILE // form.block
    _kernel[(-(-row_blocks // r),)](
        messages, out,
        messages.shape[0], row_blocks, messages.shape[1], *transform_arguments(form.transform),
        form.bits, form.block, accumulate, r,
        enable_fp_fusion=False,
    )  # fmt: skip
