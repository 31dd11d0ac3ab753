"""How AdamW's moments are kept between updates: as they are, in bf16, or as INT8 of their roots in blocks.

The dtype of what is held says which: that of the master weights; bfloat16 [n]; or uint8, the coded part of a
message (format.py) of n elements, filled up to whole blocks, with a power of two as each block's scale s. A digit q
is

    exp_avg      m = sign(q) (q s) ** 2            q = -127 .. 127
    exp_avg_sq   v = (max(q, 1) s) ** 4            q = 0 .. 127, s > 0

An update is u = m / sqrt(v). Digits encode roots of m and of sqrt(v), so both have steps of 2 / q, over a range of
127 ** 2 in a block. With linear INT8 of v, sqrt(v) has a range of 11 only, and smaller values become 0.

Why v is not 0 where a block has a value. If v becomes 0 and m does not, the next update divides a digit of m by the
new gradient alone. Here rounding turns u into at most 8 u + 8 r, where r is the ratio of the block's largest |m| to
its largest sqrt(v): roots of |m| grow by one scale at most, roots of v are at most halved and stay at least a scale,
and each scale is at most twice the least that would do. In 60 updates with blocks of 128 normal gradients, one of
which is 1e-2, 1e-4 or 1e-6 of the others, the largest update is 1.4, 2.9 and 2.8 times the rate
(tests/unit/zero/test_moments.py), without rounding 1.0. In the first case linear INT8 of m and v, to nearest, gives
3,900, and of m and sqrt(v) 620.

Why rounding is random. An update changes v by a share of 1 - beta2, by default 0.001; bf16 has steps of 0.004 to
0.008, INT8 of 0.03 and more. Rounded to nearest, v never falls: 6,000 updates after gradients became ten times
smaller it is unchanged, and updates are ten times too small. Noise makes the mean right: exactly in bf16, within
1.5 / q in INT8, which is less than half a step (there it is the root's mean that is exact).

Decoded values, in fp32, are encoded to bytes that decode to the same values, with any noise (format.py on powers of
two; roots of q ** 4 s ** 4 rounded to fp32 are exact, because s is at least 2 ** -31, of exp_avg 2 ** -62). So
checkpoints hold moments as fp32 or bf16 values, which every layout and every choice loads, and a resume has the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megazero.kernels.arena import SCRATCH, Take
from megazero.kernels.dequantize import Unpacking
from megazero.kernels.dispatch import CHUNK, jit, tl
from megazero.kernels.format import Format
from megazero.kernels.quantize import Work, encode_blocks, encode_tile
from megazero.kernels.values import bits_of, load_values

BLOCK = 128
EXP_AVG, EXP_AVG_SQ = 2, 4  # the powers that digits are raised to
FORMS = {power: Format(8, BLOCK, least=-124 // power) for power in (EXP_AVG, EXP_AVG_SQ)}
HALF = 1 << 15  # makes a draw, odd and between -HALF and HALF, positive


def room(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros for a moment of ``like``: in its shape and dtype for fp32, in its shape for bfloat16, else coded.

    dtype: float32, bfloat16 or uint8. float32 is ``like``'s own dtype, which may be float64.
    """
    if dtype != torch.uint8:
        return torch.zeros_like(like, dtype=like.dtype if dtype == torch.float32 else dtype)
    return torch.zeros(FORMS[EXP_AVG].coded_bytes(whole(like.numel())), dtype=dtype, device=like.device)


def whole(n: int) -> int:
    """Return ``n`` filled up to whole blocks."""
    return -(-n // BLOCK) * BLOCK


def decode(held: torch.Tensor, power: int, n: int, start: int, stop: int) -> torch.Tensor:
    """Return the elements [start, stop) of a coded moment of n elements, as a new fp32 tensor."""
    first = start // BLOCK * BLOCK
    out = torch.empty(stop - first, dtype=torch.float32, device=held.device)
    with SCRATCH.frame(held.device) as frame:
        pieces = Pieces(held, power, n, torch.float32, frame.take)
        for low, high in chunks(len(out)):
            out[low:high].copy_(pieces.open(first + low, first + high))
    return out[start - first :]


def encode(values: torch.Tensor, held: torch.Tensor, power: int) -> None:
    """Make ``values``, fp32 [n], the coded moment ``held``, rounded to nearest."""
    n = len(values)
    with SCRATCH.frame(held.device) as frame:
        pieces = Pieces(held, power, n, torch.float32, frame.take)
        for low, high in chunks(n):
            pieces.open(low, high).copy_(values[low:high])
            pieces.close(low, high)


def chunks(n: int) -> Iterator[tuple[int, int]]:
    """Yield [low, high) of the pieces that n elements are taken in; all but the last are whole blocks."""
    for low in range(0, n, CHUNK):
        yield low, min(low + CHUNK, n)


class Pieces:
    """Opens and closes a moment piece by piece: the reference of ``open_tile`` and ``close_tile``.

    held: the moment of n elements. dtype: that in which it is opened. take: gives the buffers.
    """

    def __init__(self, held: torch.Tensor, power: int, n: int, dtype: torch.dtype, take: Take) -> None:
        self.held, self.power = held, power
        self.direct, self.coded = held.dtype == dtype, held.dtype == torch.uint8
        if self.direct:
            return
        size = whole(min(n, CHUNK))
        self.values, self.roots = take(size, dtype), take(size, torch.float32)
        if self.coded:
            message, form = held.view(1, -1), FORMS[power]
            self.payload, self.scales = form.payload(message, whole(n))[0], form.scales(message, whole(n))[0]
            self.work = Work.of(take, size, form)
            self.unpacking = Unpacking(take, size, form, torch.float32)
        else:
            self.random = take(size, torch.int32)

    def open(self, low: int, high: int) -> torch.Tensor:
        """Return the values of the elements [low, high), to be changed in place, and valid until the next call."""
        if self.direct:
            return self.held[low:high]
        if not self.coded:
            return self.values[: high - low].copy_(self.held[low:high])
        blocks, roots = self._blocks(low, high)
        values = self.values[: len(roots)]
        self.unpacking.digits(self.payload[blocks], roots)
        if self.power == EXP_AVG_SQ:
            roots.clamp_(min=1.0)
        roots.view(-1, BLOCK).mul_(self.unpacking.scales(self.scales[blocks]))
        if self.power == EXP_AVG_SQ:
            values.copy_(roots.square_().square_())
        else:
            values.copy_(roots).abs_().mul_(roots)
        return values[: high - low]

    def close(self, low: int, high: int, drawn: torch.Tensor | None = None) -> None:
        """Keep the values of the elements [low, high), which were opened last.

        drawn: as ``Draws`` gives it for these elements, filled up to whole blocks; None rounds to nearest.
        """
        if self.direct:
            return
        blocks, roots = self._blocks(low, high)
        values = self.values[: high - low]
        if self.coded:
            self._take_roots(values, roots)
            work = self.work.of_blocks(blocks.stop - blocks.start)
            form, payload = FORMS[self.power], self.payload[blocks]
            found = encode_blocks(roots.view(-1, BLOCK), work, form, payload, drawn)
            self.scales[blocks].view(torch.int16).copy_(found)
            return
        rounded = roots[: high - low].copy_(values)
        if drawn is not None:
            random = self.random[: high - low].copy_(drawn[: high - low]).add_(HALF)
            rounded.view(torch.int32).add_(random).bitwise_and_(-2 * HALF)
        self.held[low:high].copy_(rounded)

    def _blocks(self, low: int, high: int) -> tuple[slice, torch.Tensor]:
        """Return which blocks [low, high) are, and fp32 room for all their elements."""
        blocks = slice(low // BLOCK, -(-high // BLOCK))
        return blocks, self.roots[: (blocks.stop - blocks.start) * BLOCK]

    def _take_roots(self, values: torch.Tensor, roots: torch.Tensor) -> None:
        """Write what is encoded of values [n] to ``roots``, and zeros behind. Rounded fp64 roots are the nearest."""
        n = len(values)
        own = roots[:n].copy_(values)
        with SCRATCH.frame(values.device) as frame:
            wide = frame.take(n, torch.float64)
            own.copy_(wide.copy_(own).abs_().sqrt_())
            if self.power == EXP_AVG_SQ:
                own.copy_(wide.copy_(own).sqrt_())
            else:
                torch.copysign(own, values, out=own)
        roots[n:].zero_()


@jit
def open_tile(
    held: tl.tensor, scales: tl.tensor, at: tl.tensor, g: tl.tensor, n: tl.tensor, POWER: tl.constexpr
) -> tl.tensor:
    """A moment, fp32 [r, 1, BLOCK], of the elements ``at`` below n, which blocks g int64 [r] have; held is fp32,
    bf16, or digits as int8, whose scales are int16."""
    valid = at < n
    if held.dtype.element_ty == tl.int8:
        digits = tl.load(held + at, mask=valid, other=0).to(tl.float32)
        if POWER == 4:
            digits = tl.maximum(digits, 1.0)
        roots = digits * load_values(scales, g, g * at.shape[2] < n)[:, None, None]
        if POWER == 4:
            roots = roots * roots
            values = roots * roots
        else:
            values = roots * tl.abs(roots)
    else:
        values = load_values(held, at, valid)
    return values


@jit
def close_tile(
    held: tl.tensor, scales: tl.tensor, at: tl.tensor, g: tl.tensor, n: tl.tensor, values: tl.tensor,
    drawn: tl.tensor, POWER: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
) -> None:  # fmt: skip
    """Keep ``values``, fp32 [r, 1, BLOCK], where ``open_tile`` finds them; drawn as in ``encode_tile``."""
    valid = at < n
    if held.dtype.element_ty == tl.int8:
        roots = tl.sqrt_rn(tl.abs(values))
        if POWER == 4:  # noqa: SIM108 (as open_tile)
            roots = tl.sqrt_rn(roots)
        else:
            roots = tl.where(values < 0, -roots, roots)
        roots = tl.where(valid, roots, 0.0)
        payload, scale = encode_tile(roots, 8, LARGEST, 0x7FFFFF, SMALLEST, drawn)
        tl.store(held + at, payload[:, None, :], mask=valid)
        top = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        tl.store(scales + g, top, mask=g * values.shape[2] < n)
    elif held.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        random = drawn.to(tl.int32) + 32768
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, (bits + random) >> 16)
        tl.store(bits_of(held) + at, rounded.to(tl.int16), mask=valid)
    else:
        tl.store(held + at, values, mask=valid)
