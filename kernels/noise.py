"""Noise for the rounding of moments in bf16 (adamw.py), and signs for transforms, drawn from a counter hash.

It is reproducible and the same in every layout. A draw is a function of (seed, step, stream, global element index)
and of nothing else. The stream names what is rounded. Two neighbouring elements share one 32-bit hash, and each takes
16 bits of it. The lowest bit of each half is set, so a draw is an odd multiple of 2 ** -16: its mean is exactly zero,
and an integer plus a draw is never a tie.

The mixer is lowbias32 of Chris Wellons' hash-prospector (public domain), keyed before each multiplication. The keys
are made by the finalizer of splitmix64 (Sebastiano Vigna, public domain).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import torch

from megazero.kernels.arena import Take
from megazero.kernels.dispatch import jit, tl
from megazero.kernels.values import small_floats

# Decorates a kernel that draws. These arguments of it differ from step to step and from unit to unit; Triton would
# make a constant of a 1, and compile anew for multiples of 16.
drawing_jit = jit(do_not_specialize=("word0", "key0", "key1", "sign0", "sign1", "next_sign0", "next_sign1"))


def _finalize(x: int) -> int:
    """Apply the finalizer of splitmix64 to 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def signed(x: int) -> int:
    """Return the int32 that has the low 32 bits of x."""
    return ((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


@dataclass(frozen=True)
class Noise:
    """Where draws are taken: element ``start`` of the stream is for the first rounded element.

    ``start`` is even. A stream has 2 ** 33 elements, 2 per 32-bit counter.
    """

    seed: int
    step: int
    stream: int
    start: int = 0

    @staticmethod
    def named(seed: int, step: int, name: str, start: int = 0) -> Noise:
        """Return the draws of the stream of this name."""
        stream = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        return Noise(seed, step, stream, start)

    @property
    def keys(self) -> tuple[int, int]:
        """Return two int32: one is added to the counter, the other is mixed in after the first multiplication."""
        return stream_keys(self.seed, self.step, self.stream)


@lru_cache(maxsize=256)  # chunks of a slice ask again, and so do slices that draw nothing
def stream_keys(*name: int) -> tuple[int, int]:
    """Return the keys of the stream of this name, as ``Noise.keys``."""
    key = 0
    for part in name:
        key = _finalize(key ^ _finalize(part & 0xFFFFFFFFFFFFFFFF))
    return signed(key), signed(key >> 32)


def hash_words(
    word: torch.Tensor, key: int | torch.Tensor, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """Hash int32 ``word`` in place, and return it. They are counters, the stream's first key added.

    ``key`` is the stream's second. ``scratch`` is another int32 tensor of at least that many elements to use.
    """
    _fold(word, 16, scratch)
    word.mul_(0x7FEB352D).bitwise_xor_(key)
    _fold(word, 15, scratch)
    word.mul_(signed(0x846CA68B))
    _fold(word, 16, scratch)
    return word


def _fold(word: torch.Tensor, bits: int, scratch: torch.Tensor | None) -> None:
    """Compute word ^= word >> bits as if unsigned, because torch shifts int32 with its sign."""
    out = None if scratch is None else scratch[: word.numel()]
    shifted = torch.bitwise_right_shift(word, bits, out=out)
    word.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))


def launch_arguments(noise: Noise) -> tuple[int, int, int]:
    """Return word0, key0, key1 for a kernel that draws, all int32.

    The first element's counter wraps here as it does in the kernel.
    """
    return (signed(noise.start // 2), *noise.keys)


class Draws:
    """The reference: makes draws in chunks of at most ``size`` elements, in reused buffers.

    ``take`` gives the buffers. A draw takes 1.2 ns per element on one core (AVX-512).
    """

    def __init__(self, noise: Noise, size: int, take: Take) -> None:
        self.noise, self.keys = noise, noise.keys
        self.counter = torch.arange(size // 2, out=take(size // 2, torch.int32))
        self.word = take(size // 2, torch.int32)
        self.values = take(size, torch.float32)
        self.shifted = self.values.view(torch.int32)  # done with when the values are written

    def __call__(self, at: int, n: int) -> torch.Tensor:
        """Return fp32 [n], in units of 2 ** -16, for the n elements from the stream's element start + at.

        The result is valid until the next call.
        """
        word = torch.add(
            self.counter[: n // 2],
            signed((self.noise.start + at) // 2 + self.keys[0]),
            out=self.word[: n // 2],
        )
        hash_words(word, self.keys[1], self.shifted).bitwise_or_(0x00010001)
        return self.values[:n].copy_(word.view(torch.int16))


@jit
def draws_tile(word: tl.tensor, key0: tl.tensor, key1: tl.tensor) -> tl.tensor:
    """word uint32 [..., m] (element index / 2) -> fp32 [..., 2 m] draws in units of 2 ** -16."""
    word = word + key0.to(tl.uint32, bitcast=True)
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) ^ key1.to(tl.uint32, bitcast=True)
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    word = (word ^ (word >> 16)) | 0x00010001
    # int16 x as the unsigned x + 2 ** 15: a flipped top bit
    halves = tl.interleave(word & 0xFFFF, word >> 16) ^ 0x8000
    return small_floats(halves, 0x8000)
