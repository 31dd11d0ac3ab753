"""Updates a slice of master weights by AdamW (Loshchilov and Hutter 2019) in one pass over memory.

The pass reads the gradient as it was summed and multiplies it by the clip factor. It also leaves what the next
refresh sends: the weights in the parameters' dtype, or their difference to what receivers hold, in the gradient's
place. Every operation is rounded once, to the master's dtype, so all implementations give the same bits.

Bytes per element with fp32 states and 16-bit parameters: 16 are read (gradient, master, two moments) and 12 written;
parameters add 2 written, differences 2 read and 4 written. One operation after the other (the gradient scaled in
place, torch's fused step, the cast or the difference) moves 42 instead of 30, and 58 instead of 34.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from megazero.kernels.accumulate import accumulate
from megazero.kernels.arena import SCRATCH
from megazero.kernels.dispatch import CHUNK, jit, tl, use_kernel
from megazero.kernels.format import fp32
from megazero.kernels.values import load_values, raw, rounded_values, store_values

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


class Refresh(NamedTuple):
    """What an update leaves for the next refresh of its slice [n]; both tensors have the parameters' dtype.

    copy: is given the rounded weights, without ``held``. held: what receivers hold; the gradient becomes the rounded
    weights' difference to it. Each may be None.
    """

    copy: torch.Tensor | None = None
    held: torch.Tensor | None = None

    def part(self, start: int, stop: int) -> Refresh:
        """Return that of the elements [start, stop)."""
        return Refresh(*(None if x is None else x[start:stop] for x in self))


NOTHING = Refresh()


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rates: Rates,
    refresh: Refresh = NOTHING,
) -> None:
    """Update ``master`` and its moments in place: [n], fp32 or fp64, all of one dtype and contiguous."""
    if not master.numel():
        return
    if use_kernel(master, grad):
        _launch(master, grad, exp_avg, exp_avg_sq, rates, refresh)
    else:
        reference(master, grad, exp_avg, exp_avg_sq, rates, refresh)


def reference(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rates: Rates,
    refresh: Refresh = NOTHING,
) -> None:
    """Do the same as ``adamw`` in torch, on any device.

    Roots are taken in fp64 and then rounded, which gives the nearest fp32 value: on a CPU torch.sqrt may be MKL's,
    which is an ulp off for one fp32 value in five.
    """
    copy, held = refresh
    size = min(CHUNK, master.numel())
    with SCRATCH.frame(master.device) as frame:
        scaled_, work_ = (frame.take(size, master.dtype) for _ in range(2))
        wide_ = frame.take(size, torch.float64)
        rounded_ = frame.take(0 if held is None else size, master.dtype if held is None else held.dtype)
        for low in range(0, master.numel(), size):
            at = slice(low, min(low + size, master.numel()))
            weight, gradient, first, second = (x[at] for x in (master, grad, exp_avg, exp_avg_sq))
            scaled, work = scaled_[: len(weight)], work_[: len(weight)]
            torch.mul(gradient, rates.scale, out=scaled)
            first.mul_(rates.first).add_(torch.mul(scaled, rates.first_share, out=work))
            square = torch.mul(scaled, scaled, out=work).mul_(rates.second_share)
            second.mul_(rates.second).add_(square)
            wide = wide_[: len(weight)].copy_(second).sqrt_()
            root = work.copy_(wide).mul_(rates.unbias).add_(rates.eps)
            weight.mul_(rates.keep).sub_(torch.div(first, root, out=work).mul_(rates.size))
            if held is not None:
                rounded = rounded_[: len(weight)].copy_(weight)
                accumulate(gradient.copy_(rounded), held[at], alpha=-1.0)
            elif copy is not None:
                copy[at].copy_(weight)


@jit
def _kernel(
    master: tl.tensor, grad: tl.tensor, exp_avg: tl.tensor, exp_avg_sq: tl.tensor, beside: tl.tensor,
    n: tl.tensor, scale: tl.tensor, keep: tl.tensor, first: tl.tensor, first_share: tl.tensor, second: tl.tensor,
    second_share: tl.tensor, size: tl.tensor, unbias: tl.tensor, eps: tl.tensor,
    COPY: tl.constexpr, DIFFERENCE: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    valid = at < n
    gradient = tl.load(grad + at, mask=valid, other=0) * scale
    moment = tl.load(exp_avg + at, mask=valid, other=0) * first + gradient * first_share
    square = tl.load(exp_avg_sq + at, mask=valid, other=0) * second + gradient * gradient * second_share
    root = tl.sqrt_rn(square) * unbias + eps
    weight = tl.load(master + at, mask=valid, other=0) * keep - tl.div_rn(moment, root) * size
    tl.store(exp_avg + at, moment, mask=valid)
    tl.store(exp_avg_sq + at, square, mask=valid)
    tl.store(master + at, weight, mask=valid)
    if COPY:
        store_values(beside, at, weight, valid)
    if DIFFERENCE:
        tl.store(grad + at, rounded_values(beside, weight) - load_values(beside, at, valid), mask=valid)


def _launch(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rates: Rates,
    refresh: Refresh,
) -> None:
    copy, held = refresh
    beside = held if held is not None else master if copy is None else copy
    _kernel[(-(-master.numel() // TILE),)](
        master, grad, exp_avg, exp_avg_sq, raw(beside), master.numel(), *map(fp32, rates),
        copy is not None and held is None, held is not None, TILE,
        enable_fp_fusion=False,
    )  # fmt: skip
