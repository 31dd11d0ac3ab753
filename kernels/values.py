"""Loads and stores of values in the kernels.

It handles bf16 by its bits, so that Triton's interpreter rounds as the GPU does. The interpreter of Triton 3.x
truncates fp32 to bf16 and gets bf16 denormals wrong. Shifts and an integer rounding give the GPU's and torch's bits
everywhere, for a few integer operations per element.
"""

from __future__ import annotations

from megazero.kernels.dispatch import jit, tl


@jit
def seen_as(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """The pointer x to another dtype. A view of a tensor for every launch would take the host 1 to 2 us."""
    return x.to(tl.pointer_type(DTYPE), bitcast=True)


@jit
def bits_of(x: tl.tensor) -> tl.tensor:
    """The pointer x, to int16 where it points to bf16."""
    if x.dtype.element_ty == tl.bfloat16:
        x = seen_as(x, tl.int16)
    return x


@jit
def tile_of(row_blocks: tl.tensor, R: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What this program takes of rows of row_blocks blocks: its row, int64; its blocks of the row, int64 [R]; and
    which of these there are.

    A program stays in one row, so it divides once. With a row for every block, 64-bit divisions were most of what a
    program ran: 64 a thread and source in decode-sum-encode, at 2 to 3% of a copy's bandwidth.
    """
    tiles = tl.cdiv(row_blocks, R)
    program = tl.program_id(0)
    b = (program % tiles).to(tl.int64) * R + tl.arange(0, R)
    return (program // tiles).to(tl.int64), b, b < row_blocks


@jit
def small_floats(x: tl.tensor, OFFSET: tl.constexpr) -> tl.tensor:
    """fp32 of x - OFFSET, for integers x from 0 to 2 ** 16 - 1: as the last bits of 2 ** 23, which is then taken off.

    A conversion runs at a quarter of an addition's rate, and one per element and source bounded decode-sum-encode.
    """
    return (x | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@jit
def small_integers(x: tl.tensor) -> tl.tensor:
    """int32 of fp32 x rounded half to even, for abs(x) < 2 ** 21: the last bits of the sum with 1.5 x 2 ** 23."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@jit
def scales_at(
    row: tl.tensor, b: tl.tensor, row_bytes: tl.tensor, row_blocks: tl.tensor,
    PART: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where a message's scales lie, in int16 from the buffer's start: blocks b int64 of a row int64. The payload
    before them may be 4 GiB or more, so that its size is no int32."""
    return row * (row_bytes // 2) + tl.cast(row_blocks, tl.int64) * (PART // 2) + b


@jit
def load_values(x: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """fp32 values at x + at, 0 where masked; x points to fp32, fp16 or bf16, which may be seen as int16."""
    x = bits_of(x)
    loaded = tl.load(x + at, mask=mask, other=0)
    if x.dtype.element_ty == tl.int16:
        values = (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = loaded.to(tl.float32)
    return values


@jit
def rounded(values: tl.tensor) -> tl.tensor:
    """fp32 of values rounded to bf16, to nearest even."""
    bits = values.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    nearest = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, nearest)
    return nearest.to(tl.float32, bitcast=True)


@jit
def rounded_as(values: tl.tensor, x: tl.tensor) -> tl.tensor:
    """fp32 of values rounded to what x points to, to nearest even; x as for load_values."""
    if x.dtype.element_ty == tl.bfloat16:  # noqa: SIM108 (Triton takes each branch by its type)
        values = rounded(values)
    else:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    return values


@jit
def store_values(x: tl.tensor, at: tl.tensor, values: tl.tensor, mask: tl.tensor) -> None:
    """fp32 values to x + at, rounded to nearest even; x as for load_values."""
    x = bits_of(x)
    if x.dtype.element_ty == tl.int16:
        bits = rounded(values).to(tl.int32, bitcast=True)
        tl.store(x + at, (bits >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(x + at, values.to(x.dtype.element_ty), mask=mask)
