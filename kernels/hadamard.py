"""Mixes blocks before they are encoded: a randomised Hadamard transform (SDP4Bit, Jia et al. 2024, section 3.3).

A block of ``size`` = T elements x is sent as y = H D x / T and read as x = D H y. H is Sylvester's matrix of 1 and -1
(H H = T) and D a diagonal of random signs, equal for all blocks, senders and steps: the signs of draws of the noise
generator. An outlier is spread over T elements, so scales are finer. 1 / T, and not 1 / sqrt(T) on both sides, is a
power of two for every T, and y never overflows.

H is log2(T) stages of butterflies, (a, b) -> (a + b, a - b), first between a block's halves, last between neighbours.
Each sum is rounded once, in this order, so every implementation gives the same bits.

- **What one message decodes to is exact.** D H (q s) is s times an integer of at most 127 x 128, 22 bits with those
  of s. fp32 holds it, whatever the order.
- **It is linear**, and D is the same everywhere. Messages are summed first and transformed once; between two hops
  with one transform (dequantize_sum_quantize) nothing is transformed at all.
- **Padding.** Blocks lie inside a codec's blocks, so they straddle no parameter and no slice. A parameter's last
  block is filled with zeros. They are mixed with values and do not decode to zeros, so the decoding side clears them
  (zero/layout.py).
- NaN and Inf make their whole block NaN, as they do without a transform.

For each element a transform takes log2(T) additions, in registers and between neighbouring threads, and on a CPU two
more passes that change the layout. On one core encoding with 4 bits takes 2.8 to 4.2 ns instead of 0.8 to 1.1, and
decoding 2.4 to 2.8 instead of 0.4 to 0.7 (CPU time, 1M elements, 10 turns). A matrix product is no slower, but adds
up in an order of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from megazero.kernels.arena import SCRATCH, Take
from megazero.kernels.dispatch import jit, tl
from megazero.kernels.noise import Draws, Noise, draws_tile

SIZES = (8, 16, 32, 64, 128)
STREAM = 0x68616461  # of the signs among the noise generator's streams


@dataclass(frozen=True)
class Hadamard:
    """The transform of blocks of ``size`` elements, with the signs of ``seed``."""

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            nearest = min(SIZES, key=lambda size: abs(size - self.size))
            raise ValueError(
                f"Hadamard blocks of {self.size}: a power of two from 8 to 128; nearest: {nearest}"
            )

    @property
    def noise(self) -> Noise:
        """Return the draws whose signs are D's."""
        return Noise(self.seed, 0, STREAM)


def transform_arguments(transform: Hadamard | None) -> tuple[int, int, int]:
    """Return sign0, sign1 and SIZE for a kernel that transforms; SIZE is 0 where nothing is transformed."""
    return (*transform.noise.keys, transform.size) if transform is not None else (0, 0, 0)


class Mixing:
    """The reference: transforms at most n elements of ``dtype`` at a time, in buffers from ``take``.

    Elements at the same place of their blocks lie together meanwhile, so that every stage adds long runs.
    """

    def __init__(self, transform: Hadamard, n: int, take: Take, dtype: torch.dtype = torch.float32) -> None:
        self.size = transform.size
        self.buffers = take(n, dtype), take(n, dtype)
        self.signs, self.shares = _signs(transform, dtype, self.buffers[0].device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return H D x / T of x [m], whole blocks. It is valid until the next call."""
        a, b = (buffer[: x.numel()] for buffer in self.buffers)
        a.view(self.size, -1).copy_(x.view(-1, self.size).t()).mul_(self.shares)
        a, b = self._butterflies(a, b)
        b.view(-1, self.size).copy_(a.view(self.size, -1).t())
        return b

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """Write D H y over y [m], whole blocks, and return it."""
        a, b = (buffer[: y.numel()] for buffer in self.buffers)
        a.view(self.size, -1).copy_(y.view(-1, self.size).t())
        a, _ = self._butterflies(a, b)
        y.view(-1, self.size).copy_(a.view(self.size, -1).mul_(self.signs).t())
        return y

    def _butterflies(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply H to a [T, m / T], flat. Return the buffer that holds the result, then the other."""
        stride = self.size // 2
        while stride:
            pairs, out = (buffer.view(self.size // (2 * stride), 2, -1) for buffer in (a, b))
            torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
            torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
            a, b, stride = b, a, stride // 2
        return a, b


def mixed(x: torch.Tensor, transform: Hadamard) -> torch.Tensor:
    """Return H D x / T of x, fp32 or fp64 and whole blocks, as a new tensor of x's shape."""
    with SCRATCH.frame(x.device) as frame:
        mixing = Mixing(transform, x.numel(), frame.take, x.dtype)
        return mixing.forward(x.contiguous().view(-1)).view(x.shape).clone()


@cache
def _signs(
    transform: Hadamard, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the diagonals of D and of D / T, as columns [T, 1].

    Both come from the host, whose copies are over when they return: other streams use them next.
    """
    draws = Draws(transform.noise, transform.size, lambda numel, dtype: torch.empty(numel, dtype=dtype))
    signs = draws(0, transform.size).sign().to(dtype)[:, None]
    return signs.to(device), (signs / transform.size).to(device)


@jit
def forward_tile(x: tl.tensor, sign0: tl.tensor, sign1: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """H D x / SIZE of x fp32 [r, pack, part], in blocks of SIZE elements of its last two axes; x where SIZE is 0."""
    if SIZE > 0:
        x = _butterflies_tile(_signed_tile(x, sign0, sign1, SIZE, 1.0 / SIZE), SIZE)
    return x


@jit
def inverse_tile(y: tl.tensor, sign0: tl.tensor, sign1: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """D H y of y fp32 [r, pack, part], as ``forward_tile`` has it; y where SIZE is 0."""
    if SIZE > 0:
        y = _signed_tile(_butterflies_tile(y, SIZE), sign0, sign1, SIZE, 1.0)
    return y


@jit
def _signed_tile(
    x: tl.tensor, sign0: tl.tensor, sign1: tl.tensor, SIZE: tl.constexpr, FACTOR: tl.constexpr
) -> tl.tensor:
    draws = draws_tile(tl.arange(0, SIZE // 2).to(tl.uint32), sign0, sign1)
    factors = tl.where(draws < 0, -FACTOR, FACTOR)
    return tl.reshape(tl.reshape(x, (x.numel // SIZE, SIZE)) * factors[None, :], x.shape)


@jit
def _butterflies_tile(x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """A pair's other value is the sum of both as integers less one's own: one exchange between threads, or none."""
    y = x
    STAGES: tl.constexpr = (SIZE > 8) + (SIZE > 16) + (SIZE > 32) + (SIZE > 64) + 3
    for stage in tl.static_range(STAGES):
        y = tl.reshape(y, (x.numel // (SIZE >> stage), 2, SIZE >> (stage + 1)))
        bits = y.to(tl.int32, bitcast=True)
        other = (tl.sum(bits, axis=1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        y = tl.where(tl.arange(0, 2)[None, :, None] == 0, y + other, other - y)
    return tl.reshape(y, x.shape)
