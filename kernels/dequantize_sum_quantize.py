"""Decodes, sums and encodes between the two hops of a reduction (ZeRO++, section 4.2).

The sum, messages[0] + messages[1] + ..., is taken in fp32 and in this order, and stays in registers. It is then
encoded in rows for the next hop. The two formats may differ: a program takes whole blocks of both and reshapes
between them.

For each element, the one pass reads k x (bits / 8 + 2 / block) bytes and writes bits / 8 + 2 / block of the next
format. Two separate passes would move 8 bytes more, because they write and read the fp32 sum.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megazero.kernels.arena import SCRATCH
from megazero.kernels.dequantize_accumulate import Summed, sum_tile
from megazero.kernels.dispatch import TILE, tl, use_kernel
from megazero.kernels.format import Format
from megazero.kernels.hadamard import forward_tile, inverse_tile, transform_arguments
from megazero.kernels.noise import drawing_jit
from megazero.kernels.quantize import encode_rows, encode_tile, store_tile
from megazero.kernels.values import seen_as


def dequantize_sum_quantize(
    messages: torch.Tensor,
    n: int,
    form: Format,
    out: torch.Tensor,
    next_form: Format,
) -> None:
    """Decode the rows of ``messages``, sum them, and encode the sum into the rows of ``out``.

    ``messages`` is uint8 [k, m], and the coded part of each row holds n elements. ``out`` is uint8 [rows, m2] and
    contiguous, and the coded part of each row gets n / rows elements. m and m2 are multiples of 16. If both formats
    have one transform, the sum stays transformed.
    """
    share = n // len(out)
    form.blocks(share)  # a row of out is whole blocks of both
    if not n:
        return
    if form.transform == next_form.transform:
        form, next_form = replace(form, transform=None), replace(next_form, transform=None)
    if use_kernel(messages, out):
        _launch(messages, n, form, out, next_form)
        return
    with SCRATCH.frame(out.device) as frame:
        total = Summed(messages, n, form, torch.float32, frame)

        def load(low: int, high: int, buffer: torch.Tensor) -> torch.Tensor:
            total.add(low, high, buffer, accumulate=False)
            return buffer

        encode_rows(load, out, share, next_form)


@drawing_jit
def _kernel(
    coded: tl.tensor, out: tl.tensor, sources: tl.tensor, row_blocks: tl.tensor, row_bytes: tl.tensor,
    share_blocks: tl.tensor, out_blocks: tl.tensor, out_bytes: tl.tensor,
    sign0: tl.tensor, sign1: tl.tensor, SIZE: tl.constexpr,
    next_sign0: tl.tensor, next_sign1: tl.tensor, NEXT_SIZE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, NEXT_BITS: tl.constexpr, NEXT_BLOCK: tl.constexpr,
    LARGEST: tl.constexpr, ELEMENTS: tl.constexpr,
) -> None:  # fmt: skip
    NEXT_PACK: tl.constexpr = 8 // NEXT_BITS
    NEXT_PART: tl.constexpr = NEXT_BLOCK // NEXT_PACK
    R: tl.constexpr = ELEMENTS // BLOCK
    NEXT_R: tl.constexpr = ELEMENTS // NEXT_BLOCK
    words, halves = seen_as(coded, tl.int32), seen_as(coded, tl.int16)
    row, tile = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    h, b = tile * NEXT_R + tl.arange(0, NEXT_R), tile * R + tl.arange(0, R)  # the same elements
    valid, there = h < out_blocks, b < share_blocks
    b += row * share_blocks
    acc = tl.zeros((R, BLOCK), tl.float32)
    acc = sum_tile(acc, words, halves, sources, b, there, row_bytes, row_blocks, BITS, BLOCK)
    acc = inverse_tile(acc, sign0, sign1, SIZE)
    acc = tl.reshape(acc, (NEXT_R, NEXT_PACK, NEXT_PART))
    acc = forward_tile(acc, next_sign0, next_sign1, NEXT_SIZE)
    payload, scale = encode_tile(acc, NEXT_BITS, LARGEST)
    out_halves = seen_as(out, tl.int16)
    store_tile(
        payload, scale, row, h, valid, seen_as(out, tl.int8), out_halves, out_bytes, out_blocks, NEXT_PART
    )


def _launch(messages: torch.Tensor, n: int, form: Format, out: torch.Tensor, next_form: Format) -> None:
    rows = out.shape[0]
    share = n // rows
    _kernel[(-(-share // TILE), rows)](
        messages, out, messages.shape[0], form.blocks(n), messages.shape[1], form.blocks(share),
        next_form.blocks(share), out.shape[1],
        *transform_arguments(form.transform), *transform_arguments(next_form.transform),
        form.bits, form.block, next_form.bits, next_form.block, next_form.largest_scale, TILE,
        enable_fp_fusion=False,
    )  # fmt: skip
