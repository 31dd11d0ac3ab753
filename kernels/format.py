"""The coded part of a message: where payload and scales lie, and how digits become bytes.

A slice of n elements is n / block blocks. A block's element i has the integer digit q[i] in -qmax .. qmax
(symmetric, so no value is favoured). The block has one scale s, and x[i] is about q[i] * s.

The payload is int8 and takes n * bits / 8 bytes. With bits < 8, a byte holds pack = 8 / bits digits, one from each
pack-th part of the block: byte j is the sum over p of q[p * part + j] * 2 ** (bits * p), where part = block / pack.
A byte takes its digits from parts and not from neighbours, so packing is arithmetic on contiguous runs. Zero digits
give zero bytes.

The scales are n / block bf16 values, which follow the payload. bf16 has the range of fp32 (fp16 scales would lose
gradients below 6e-8 x qmax). It has 8 significant bits, so q * s is exact in fp32: sums of decoded values then have
the same bits on every implementation, whether it contracts to multiply-add or not. Scales are rounded up, so that
absmax is not clipped. megazero/comm/wire.py compares error with bytes.

A scale is at least 2 ** -126 (so its reciprocal is finite), and at most such that qmax * s is finite in bf16.
A block of zeros has scale zero and payload zero. A block with NaN or Inf has scale NaN and payload zero, and decodes
to NaN.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import torch

from megazero.kernels.hadamard import Hadamard

BITS = (2, 4, 8)
SMALLEST_SCALE = 0x00800000  # bits of 2 ** -126
NAN_SCALE = 0x7FC00000
BF16_MAX = float.fromhex("0x1.FEp127")


def fp32(value: float) -> float:
    """Return the nearest fp32 value, so that a constant is the same in torch (double) and Triton (single)."""
    return struct.unpack("f", struct.pack("f", value))[0]


@dataclass(frozen=True)
class Format:
    """A quantised format. A digit has ``bits`` bits (2, 4 or 8).

    ``block`` elements share a scale; it is a power of two from 8 to 2048.
    ``transform``, if there is one, mixes each block, or its parts, before it is encoded.
    """

    bits: int
    block: int
    transform: Hadamard | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            nearest = min(BITS, key=lambda bits: abs(bits - self.bits))
            raise ValueError(f"{self.bits} bits: a codec has 2, 4 or 8 bits; nearest: {nearest}")
        if not (8 <= self.block <= 2048 and self.block & (self.block - 1) == 0):
            nearest = min((1 << e for e in range(3, 12)), key=lambda block: abs(block - self.block))
            raise ValueError(f"block size {self.block}: a power of two from 8 to 2048; nearest: {nearest}")
        if self.transform is not None and self.transform.size > self.block:
            raise ValueError(
                f"Hadamard blocks of {self.transform.size} in blocks of {self.block} that share a scale: at most as "
                f"large; nearest: {self.block}"
            )

    @cached_property
    def qmax(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def pack(self) -> int:
        """Return how many digits a byte holds."""
        return 8 // self.bits

    @cached_property
    def part(self) -> int:
        """Return how many payload bytes a block has."""
        return self.block // self.pack

    @cached_property
    def offset(self) -> int:
        """Return the number that makes a digit non-negative when it is added."""
        return 1 << (self.bits - 1)

    @cached_property
    def bias(self) -> int:
        """Return what makes a byte's digits non-negative: byte + bias has the unsigned digits q + offset."""
        return self.offset * sum(1 << (self.bits * p) for p in range(self.pack))

    @cached_property
    def ratio(self) -> float:
        """Return the factor that absmax is multiplied by to get the scale."""
        return fp32(1 / self.qmax)

    @cached_property
    def largest_scale(self) -> int:
        """Return the largest scale as fp32 bits: bf16's largest value over qmax, rounded down."""
        (bits,) = struct.unpack("I", struct.pack("f", BF16_MAX / self.qmax))
        return bits & 0xFFFF0000

    def blocks(self, n: int) -> int:
        if n % self.block:
            below = n // self.block * self.block
            raise ValueError(
                f"a slice of {n} elements is not whole blocks of {self.block}: pad it to {below + self.block}"
            )
        return n // self.block

    def coded_bytes(self, n: int) -> int:
        """Return how many bytes the payload and scales of a slice of n elements take."""
        return self.blocks(n) * (self.part + 2)

    def payload(self, messages: torch.Tensor, n: int) -> torch.Tensor:
        """Return the payload of ``messages``, uint8 [k, m], as a view int8 [k, n / block, part]."""
        size = self.blocks(n) * self.part
        return messages[:, :size].view(torch.int8).unflatten(1, (-1, self.part))

    def scales(self, messages: torch.Tensor, n: int) -> torch.Tensor:
        """Return the scales of ``messages``, uint8 [k, m], as a view bf16 [k, n / block]."""
        blocks = self.blocks(n)
        start = blocks * self.part
        return messages[:, start : start + 2 * blocks].view(torch.bfloat16)
