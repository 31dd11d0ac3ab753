"""Updates a slice of master weights by AdamW (Loshchilov and Hutter 2019) in one pass over memory.

The pass reads the gradient as it was summed and multiplies it by the clip factor. Every operation is rounded once, to
the master's dtype, so all implementations give the same bits.

Moments may be kept in fewer bits (moments.py): they are decoded, updated and encoded in registers, or in pieces.

Bytes per element with fp32 states: 16 are read (gradient, master, two moments) and 12 written. One operation after
the other (the gradient scaled in place, torch's fused step) moves 36 instead of 28.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from megazero.kernels import moments
from megazero.kernels.arena import SCRATCH
from megazero.kernels.dispatch import CHUNK, tl, use_kernel
from megazero.kernels.format import fp32
from megazero.kernels.moments import close_tile, open_tile
from megazero.kernels.noise import Draws, Noise, block_draws_tile, drawing_jit, launch_arguments

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


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rates: Rates,
    noise: Noise = SILENCE,
) -> None:
    """Update ``master`` and its moments in place: [n], fp32 or fp64, all of one dtype and contiguous.

    Moments may also be of another dtype, as moments.py keeps them. noise: that of their rounding.
    """
    if not master.numel():
        return
    if use_kernel(master, grad):
        _launch(master, grad, exp_avg, exp_avg_sq, rates, noise)
        return
    n = master.numel()
    with SCRATCH.frame(master.device) as frame:
        size = moments.whole(min(CHUNK, n))
        powers = ((exp_avg, moments.EXP_AVG), (exp_avg_sq, moments.EXP_AVG_SQ))
        kept = [moments.Pieces(held, power, n, master.dtype, frame.take) for held, power in powers]
        draws = None if all(each.direct for each in kept) else Draws(noise, size, frame.take)
        work = frame.take(size, master.dtype), frame.take(size, master.dtype), frame.take(size, torch.float64)
        for low, high in moments.chunks(n):
            weight, gradient = master[low:high], grad[low:high]
            first, second = (each.open(low, high) for each in kept)
            _step(weight, gradient, first, second, rates, [x[: high - low] for x in work])
            drawn = None if draws is None else draws(low, moments.whole(high - low))
            for each in kept:
                each.close(low, high, drawn)


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
    master: tl.tensor, grad: tl.tensor, exp_avg: tl.tensor, first_scales: tl.tensor, exp_avg_sq: tl.tensor,
    second_scales: tl.tensor,
    n: tl.tensor, word0: tl.tensor, key0: tl.tensor, key1: tl.tensor,
    scale: tl.tensor, keep: tl.tensor, first: tl.tensor, first_share: tl.tensor, second: tl.tensor,
    second_share: tl.tensor, size: tl.tensor, unbias: tl.tensor, eps: tl.tensor,
    R: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
    FIRST_SMALLEST: tl.constexpr, SECOND_SMALLEST: tl.constexpr,
) -> None:  # fmt: skip
    g = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = g[:, None, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    valid = at < n
    gradient = tl.load(grad + at, mask=valid, other=0) * scale
    moment = open_tile(exp_avg, first_scales, at, g, n, 2) * first + gradient * first_share
    square = open_tile(exp_avg_sq, second_scales, at, g, n, 4) * second + gradient * gradient * second_share
    root = tl.sqrt_rn(square) * unbias + eps
    weight = tl.load(master + at, mask=valid, other=0) * keep - tl.div_rn(moment, root) * size
    drawn = block_draws_tile(g, word0, key0, key1, BLOCK)
    close_tile(exp_avg, first_scales, at, g, n, moment, drawn, 2, LARGEST, FIRST_SMALLEST)
    close_tile(exp_avg_sq, second_scales, at, g, n, square, drawn, 4, LARGEST, SECOND_SMALLEST)
    tl.store(master + at, weight, mask=valid)


def _launch(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rates: Rates,
    noise: Noise,
) -> None:
    forms = [moments.FORMS[power] for power in (moments.EXP_AVG, moments.EXP_AVG_SQ)]
    _kernel[(-(-master.numel() // TILE),)](
        master, grad, *_raw(exp_avg, master), *_raw(exp_avg_sq, master), master.numel(),
        *launch_arguments(noise), *_fp32(rates),
        TILE // moments.BLOCK, moments.BLOCK,
        forms[0].largest_scale, *(form.smallest_scale for form in forms),
        enable_fp_fusion=False,
    )  # fmt: skip


@lru_cache(maxsize=16)  # all slices of a group have the same
def _fp32(rates: Rates) -> tuple[float, ...]:
    return tuple(map(fp32, rates))


def _raw(held: torch.Tensor, master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a kernel's arguments for a moment: its values or digits, and the scales of its blocks, if it has any."""
    if held.dtype != torch.uint8:
        return held, held
    digits = moments.whole(master.numel())
    return held[:digits].view(torch.int8), held[digits:].view(torch.int16)
