"""Updates a slice of master weights by AdamW (Loshchilov and Hutter 2019) in one pass over memory.

The pass reads the gradient as it was summed and multiplies it by the clip factor. Every operation is rounded once, to
the master's dtype, so all implementations give the same bits.

Moments may be kept in bf16: they are updated in at least fp32, in registers or in pieces, and rounded at random. An
update changes v by a share of 1 - beta2, by default 0.001, and bf16 has steps of 0.004 to 0.008. Rounded to nearest,
v never falls: 6,000 updates after gradients became ten times smaller, updates are ten times too small. Noise makes
the mean right.

Bytes per element with fp32 states: 16 are read (gradient, master, two moments) and 12 written. One operation after
the other (the gradient scaled in place, torch's fused step) moves 36 instead of 28.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from megazero.kernels.arena import SCRATCH, Frame
from megazero.kernels.dispatch import CHUNK, jit, tl, use_kernel
from megazero.kernels.format import fp32
from megazero.kernels.noise import Draws, Noise, drawing_jit, draws_tile, launch_arguments
from megazero.kernels.values import bits_of, load_values

TILE = 1024  # elements that a program takes: two accesses of 16 bytes by 128 threads, of every fp32 operand


class Rates(NamedTuple):
    """The numbers of one step, equal for all elements.

    scale: what gradients are multiplied by. keep: 1 - rate x weight decay. first, second: the moments' decays.
    first_share, second_share: 1 - those. size: the rate over the first moment's bias correction. unbias: 1 over the
    root of the second moment's.
    """

    scale: float
    keep: float
    first: float
    first_share: float
    second: float
    second_share: float
    size: float
    unbias: float
    eps: float

    @staticmethod
    def of(
        step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, scale: float
    ) -> Rates:
        """Return the numbers of the update number ``step``, which counts from 1."""
        first, second = betas
        return Rates(
            scale,
            1 - lr * weight_decay,
            first,
            1 - first,
            second,
            1 - second,
            lr / (1 - first**step),
            1 / math.sqrt(1 - second**step),
            eps,
        )


SILENCE = Noise(0, 0, 0)
HALF = 1 << 15  # makes a draw, odd and between -HALF and HALF, positive


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rates: Rates,
    noise: Noise = SILENCE,
) -> None:
    """Update ``master`` and its moments in place: [n], fp32 or fp64, all of one dtype and contiguous.

    Moments may also be bf16. noise: that of their rounding.
    """
    if not master.numel():
        return
    if use_kernel(master, grad):
        _launch(master, grad, exp_avg, exp_avg_sq, rates, noise)
        return
    n = master.numel()
    with SCRATCH.frame(master.device) as frame:
        size = min(CHUNK, n)
        held = exp_avg, exp_avg_sq
        rounding = _Rounding(frame, noise, size) if any(x.dtype != master.dtype for x in held) else None
        wide = [None if x.dtype == master.dtype else frame.take(size, master.dtype) for x in held]
        work = frame.take(size, master.dtype), frame.take(size, master.dtype), frame.take(size, torch.float64)
        for low in range(0, n, CHUNK):
            own = slice(low, min(low + CHUNK, n))
            count = own.stop - low
            kept = [x[own] for x in held]
            first, second = (x if w is None else w[:count].copy_(x) for x, w in zip(kept, wide, strict=True))
            _step(master[own], grad[own], first, second, rates, [x[:count] for x in work])
            if rounding is not None:
                pairs = zip((first, second), kept, strict=True)
                rounding.keep(low, [(values, own) for values, own in pairs if values is not own])


class _Rounding:
    """Rounds pieces of at most ``size`` values to bf16, at random: the reference of ``_store``."""

    def __init__(self, frame: Frame, noise: Noise, size: int) -> None:
        size += size % 2  # a draw is of two
        self.draws = Draws(noise, size, frame.take)
        self.single, self.random = frame.take(size, torch.float32), frame.take(size, torch.int32)

    def keep(self, low: int, moments: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write each of (values, held) to the latter, by the draws of the elements from ``low`` on."""
        n = len(moments[0][0])
        random = self.random[:n].copy_(self.draws(low, n + n % 2)[:n]).add_(HALF)
        for values, held in moments:
            single = self.single[:n].copy_(values)
            single.view(torch.int32).add_(random).bitwise_and_(-2 * HALF)
            held.copy_(single)


def _step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    rates: Rates,
    buffers: Sequence[torch.Tensor],
) -> None:
    """Update a piece of the weights and its moments; two buffers are as the weights, the third is fp64.

    Roots are taken in fp64 and then rounded, which gives the nearest fp32 value: on a CPU torch.sqrt may be MKL's,
    which is an ulp off for one fp32 value in five.
    """
    scaled, work, wide = buffers
    torch.mul(gradient, rates.scale, out=scaled)
    first.mul_(rates.first).add_(torch.mul(scaled, rates.first_share, out=work))
    square = torch.mul(scaled, scaled, out=work).mul_(rates.second_share)
    second.mul_(rates.second).add_(square)
    root = work.copy_(wide.copy_(second).sqrt_()).mul_(rates.unbias).add_(rates.eps)
    weight.mul_(rates.keep).sub_(torch.div(first, root, out=work).mul_(rates.size))


@drawing_jit
def _kernel(
    master: tl.tensor, grad: tl.tensor, exp_avg: tl.tensor, exp_avg_sq: tl.tensor,
    n: tl.tensor, word0: tl.tensor, key0: tl.tensor, key1: tl.tensor,
    scale: tl.tensor, keep: tl.tensor, first: tl.tensor, first_share: tl.tensor, second: tl.tensor,
    second_share: tl.tensor, size: tl.tensor, unbias: tl.tensor, eps: tl.tensor,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    valid = at < n
    gradient = tl.load(grad + at, mask=valid, other=0) * scale
    moment = load_values(exp_avg, at, valid) * first + gradient * first_share
    square = load_values(exp_avg_sq, at, valid) * second + gradient * gradient * second_share
    root = tl.sqrt_rn(square) * unbias + eps
    weight = tl.load(master + at, mask=valid, other=0) * keep - tl.div_rn(moment, root) * size
    word = (tile * (TILE // 2) + word0).to(tl.uint32) + tl.arange(0, TILE // 2).to(tl.uint32)
    drawn = draws_tile(word, key0, key1)
    _store(exp_avg, at, valid, moment, drawn)
    _store(exp_avg_sq, at, valid, square, drawn)
    tl.store(master + at, weight, mask=valid)


@jit
def _store(held: tl.tensor, at: tl.tensor, valid: tl.tensor, values: tl.tensor, drawn: tl.tensor) -> None:
    """Keep ``values``, fp32, in fp32 or rounded to bf16 by draws in units of 2 ** -16."""
    if held.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        random = drawn.to(tl.int32) + 32768
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, (bits + random) >> 16)
        tl.store(bits_of(held) + at, rounded.to(tl.int16), mask=valid)
    else:
        tl.store(held + at, values, mask=valid)


def _launch(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rates: Rates,
    noise: Noise,
) -> None:
    _kernel[(-(-master.numel() // TILE),)](
        master, grad, exp_avg, exp_avg_sq, master.numel(), *launch_arguments(noise), *_fp32(rates), TILE,
        enable_fp_fusion=False,
    )  # fmt: skip


@lru_cache(maxsize=16)  # all slices of a group have the same
def _fp32(rates: Rates) -> tuple[float, ...]:
    return tuple(map(fp32, rates))
