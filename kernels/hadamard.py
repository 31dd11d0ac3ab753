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
- NaN and Inf make their whole block NaN, as they do without a transform. Where sums overflow, implementations differ
  in which of a block's elements are Inf, NaN or neither; no update is made of them.

For each element a transform takes log2(T) additions, in registers and between neighbouring threads. Torch on a CPU
makes a pass of each stage (``Mixing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch

from megazero.kernels.arena import SCRATCH, Frame
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
    """The reference: transforms at most ``len(buffer) / 2`` elements at a time, in ``buffer``'s halves.

    Elements stay where they are, because torch takes as long to transpose them as for four stages. Pairs 8 or more
    apart are added in runs, closer ones as complex numbers of two neighbours, one in so many. Neighbours are added
    by a product: (a - ib) (1 + i) is (a + b) + i (a - b). So odd elements are negated before.
    """

    @staticmethod
    def of(frame: Frame, transform: Hadamard, n: int, dtype: torch.dtype = torch.float32) -> Mixing:
        """Take one for at most n elements; its views stay for the next steps (kernels/arena.py)."""
        return frame.bind(2 * n, dtype, transform, partial(Mixing, transform))

    def __init__(self, transform: Hadamard, buffer: torch.Tensor) -> None:
        self.size, self.halves = transform.size, buffer.chunk(2)
        self.constants = _constants(transform, buffer.dtype, buffer.device)
        self.stages: dict[int, _Stages] = {}  # by how many elements are transformed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return H D x / T of x [m], whole blocks. It is valid until the next call."""
        return self._transformed(x, self.constants.shares)

    def inverse(self, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write D H y of y [m], whole blocks, to ``out`` [m], which may be y."""
        mixed = self._transformed(y, self.constants.flips)
        torch.mul(mixed.view(-1, self.size), self.constants.signs, out=out.view(-1, self.size))

    def inverse_of_digits(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """Write D H q of integers q [m], whole blocks, to ``out`` [m], another tensor.

        A matrix product adds up in an order of its own, but these sums are exact, and D comes after it for the signs
        of zeros.
        """
        rows = out.view(-1, self.size)
        torch.mm(q.view(-1, self.size), self.constants.matrix, out=rows)
        rows.mul_(self.constants.signs)

    def _transformed(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return H of x [m] times ``factors`` [T], whose odd elements are negated, in one of the halves."""
        n = x.numel()
        stages = self.stages.get(n) or self.stages.setdefault(n, _Stages.of(self.halves, n, self.size))
        torch.mul(x.view(-1, self.size), factors, out=stages.first)
        for a, b, total, difference in stages.pairs:
            torch.add(a, b, out=total)
            torch.sub(a, b, out=difference)
        torch.mul(stages.neighbours, self.constants.turn, out=stages.last)
        return stages.result


class _Stages(NamedTuple):
    """Views of two buffers that the stages go between.

    first: [m / T, T], where elements come. pairs: a, b, and where a + b and a - b go. neighbours, last: complex, the
    last stage's. result: [m].
    """

    first: torch.Tensor
    pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    neighbours: torch.Tensor
    last: torch.Tensor
    result: torch.Tensor

    @staticmethod
    def of(halves: Sequence[torch.Tensor], n: int, size: int) -> _Stages:
        a, b = (half[:n] for half in halves)
        first, pairs, stride = a.view(-1, size), [], size // 2
        while stride > 1:
            pairs += [
                (*here, *there) for here, there in zip(_apart(a, stride), _apart(b, stride), strict=True)
            ]
            a, b, stride = b, a, stride // 2
        return _Stages(first, pairs, _in_twos(a), _in_twos(b), b)


def _apart(x: torch.Tensor, stride: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return views of x [m] that hold the first and the second elements of its pairs ``stride`` (2 or more) apart."""
    if stride >= 8:
        runs = x.view(-1, 2, stride)
        return [(runs[:, 0], runs[:, 1])]
    twos, half = _in_twos(x), stride // 2
    return [(twos[i::stride], twos[i + half :: stride]) for i in range(half)]


def _in_twos(x: torch.Tensor) -> torch.Tensor:
    """Return x [m] as complex numbers [m / 2]."""
    return x.view(x.dtype.to_complex())


def mixed(x: torch.Tensor, transform: Hadamard) -> torch.Tensor:
    """Return H D x / T of x, fp32 or fp64 and whole blocks, as a new tensor of x's shape."""
    with SCRATCH.frame(x.device) as frame:
        mixing = Mixing.of(frame, transform, x.numel(), x.dtype)
        return mixing.forward(x.contiguous().view(-1)).view(x.shape).clone()


class _Constants(NamedTuple):
    """signs: D's diagonal [T]. shares: D / T, odd elements negated. flips: ones, odd ones negated. matrix: H. turn:
    1 + i, of no dimension."""

    signs: torch.Tensor
    shares: torch.Tensor
    flips: torch.Tensor
    matrix: torch.Tensor
    turn: torch.Tensor


@cache
def _constants(transform: Hadamard, dtype: torch.dtype, device: torch.device) -> _Constants:
    """Return a transform's constants. They come from the host, whose copies are over when they return: other streams
    use them next."""
    size = transform.size
    draws = Draws(transform.noise, size, lambda numel, dtype: torch.empty(numel, dtype=dtype))
    signs = draws(0, size).sign().to(dtype)
    flips = signs.new_tensor([1, -1]).repeat(size // 2)
    matrix = signs.new_ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(signs.new_tensor([[1, 1], [1, -1]]), matrix)
    turn = torch.tensor(1 + 1j, dtype=dtype.to_complex())
    return _Constants(*(x.to(device) for x in (signs, signs * flips / size, flips, matrix, turn)))


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
