"""Multiplies SiLU of a gate by another projection and by a row's probability, as experts do between their products.

Each of the three operations is rounded to the rows' dtype, so the bits are those of one operation after the other.
The backward computes SiLU and the first product again: gate, up and probabilities are all that is kept, two tensors
of the rows' size fewer.

Bytes of a bf16 element: 6 forward and 10 backward, in one pass each. One operation after the other moves 14 and 42.

The kernel takes bf16 alone, whose rounding hides what implementations of exp differ by: numpy's and torch's on a CPU
give the same product for every gate, and the gradient's neighbour for 1 gate in 3 million. The gradient of a row's
probability is a sum whose order is the kernel's own: the same for a row whichever lie beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megazero.kernels.dispatch import INTERPRETED, jit, tl, use_kernel
from megazero.kernels.values import load_values, rounded, store_values

TILE = 1024  # elements that a row's program takes at a time: an access of 16 bytes by 128 threads, of each operand


def weighted_swiglu(gate: torch.Tensor, up: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up * probabilities, in the dtype of the rows.

    gate, up: [n, w], of any float dtype. probabilities: [n], at least fp32. Gradients flow to all three.
    """
    return _WeightedSwiGLU.apply(gate, up, probabilities)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up, probabilities)
        return product(gate, up, probabilities)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return gradients(grad, *ctx.saved_tensors)


def product(gate: torch.Tensor, up: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Return what ``weighted_swiglu`` does, [n, w]."""
    if _by_kernel(gate, up, probabilities):
        out = torch.empty_like(gate)
        _launch(_forward, gate, up, probabilities, out)
        return out
    out = F.silu(gate)
    out.mul_(up)
    torch.mul(out, probabilities.unsqueeze(-1), out=out.view_as(out))
    return out


def gradients(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, probabilities: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return those of gate, up and probabilities, in their shapes and dtypes. grad: that of the product, [n, w]."""
    if _by_kernel(gate, up, probabilities):
        to_gate, to_up, sums = (torch.empty_like(x) for x in (gate, up, probabilities))
        _launch(_backward, gate, up, probabilities, grad.contiguous(), to_gate, to_up, sums)
        return to_gate, to_up, sums
    activated = F.silu(gate)
    inner = activated * up
    sums = inner.to(probabilities.dtype).mul_(grad).sum(-1)
    to_inner = torch.mul(grad, probabilities.unsqueeze(-1), out=inner)
    to_up = activated.mul_(to_inner)
    return torch.ops.aten.silu_backward(to_inner.mul_(up), gate), to_up, sums


def _by_kernel(gate: torch.Tensor, up: torch.Tensor, probabilities: torch.Tensor) -> bool:
    narrow = gate.dtype == torch.bfloat16 and probabilities.dtype == torch.float32
    return narrow and gate.numel() > 0 and use_kernel(gate, up)


def _launch(kernel: Any, gate: torch.Tensor, *others: torch.Tensor) -> None:
    """Have a program run for each row."""
    held = (gate, *others)
    assert all(x.is_contiguous() for x in held), [x.stride() for x in held]
    rows, width = gate.shape
    kernel[(rows,)](*held, width, TILE, not INTERPRETED, enable_fp_fusion=False)


@jit
def _forward(
    gate: tl.tensor, up: tl.tensor, probabilities: tl.tensor, out: tl.tensor, width: tl.tensor,
    TILE: tl.constexpr, LIBRARY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    probability = tl.load(probabilities + row)
    for start in range(0, width, TILE):
        column = start + tl.arange(0, TILE)
        at, valid = row * width + column, column < width
        x = load_values(gate, at, valid)
        activated = rounded(tl.div_rn(x, _divisor(x, LIBRARY)))
        inner = rounded(activated * load_values(up, at, valid))
        store_values(out, at, inner * probability, valid)


@jit
def _backward(
    gate: tl.tensor, up: tl.tensor, probabilities: tl.tensor, grad: tl.tensor, to_gate: tl.tensor, to_up: tl.tensor,
    sums: tl.tensor, width: tl.tensor,
    TILE: tl.constexpr, LIBRARY: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    probability = tl.load(probabilities + row)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, width, TILE):
        column = start + tl.arange(0, TILE)
        at, valid = row * width + column, column < width
        x, other, own = load_values(gate, at, valid), load_values(up, at, valid), load_values(grad, at, valid)
        divisor = _divisor(x, LIBRARY)
        activated, share = rounded(tl.div_rn(x, divisor)), tl.div_rn(1.0, divisor)
        total += own * rounded(activated * other)
        to_inner = rounded(own * probability)
        slope = tl.fma(x, 1.0 - share, 1.0)  # as torch's compiler has it
        store_values(to_gate, at, rounded(to_inner * other) * share * slope, valid)
        store_values(to_up, at, to_inner * activated, valid)
    tl.store(sums + row, tl.sum(total, 0))


@jit
def _divisor(x: tl.tensor, LIBRARY: tl.constexpr) -> tl.tensor:
    """1 + exp(-x), by CUDA's library, as torch's kernels. The interpreter has numpy's alone."""
    return 1.0 + (tl.extra.cuda.libdevice.exp(-x) if LIBRARY else tl.exp(-x))
