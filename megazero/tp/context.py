"""The tensor-parallel context, which layers are given, and the way of a layer's output to its ranks.

Activations are [s, b, h], so a rank's slice under sequence parallel is a part of dim 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.comm.peers import Peers, Pending
from megazero.mesh.grid import nearest_multiple
from megazero.products.product import PLAIN, Across, Operand, Product
from megazero.tp.deferred import DeferredGradients


@dataclass(frozen=True)
class TensorParallel(Peers):
    """The ranks of the tp axis. The axis never leaves a node.

    sequence_parallel: Between the parallel linears, activations are cut along the sequence (dim 0) over the axis
        (Korthikanti et al. 2022, section 4.2.2).
    product: How the linears multiply.
    deferred: It lets backwards put weight gradients off, if given. It works for every size, 1 included.
    """

    kind: str = "tp"
    sequence_parallel: bool = False
    product: Product = field(default=PLAIN, compare=False, repr=False)
    deferred: DeferredGradients | None = field(default=None, compare=False, repr=False)

    @property
    def sharded_sequence(self) -> bool:
        """Return whether activations between the parallel linears hold only this rank's part of the sequence."""
        return self.sequence_parallel and self.size > 1

    def share(self, total: int, what: str) -> int:
        """Return ``total / size``. Raises ValueError naming ``what`` when it does not divide."""
        if total % self.size:
            raise ValueError(
                f"{what} = {total} does not divide over tensor parallel size {self.size}; "
                f"the nearest multiple is {nearest_multiple(total, self.size)}"
            )
        return total // self.size

    @property
    def across(self) -> Across | None:
        """What makes the largest of numbers that the ranks have of parts of a sequence; None: each has it whole."""
        return self._largest if self.sharded_sequence else None

    def _largest(self, number: Tensor) -> Tensor:
        return self.start_sum(number, dist.ReduceOp.MAX).wait()

    def start_whole(self, x: Operand) -> Callable[[], Operand]:
        """Start to gather the sequence's parts of an operand. The result waits for the whole one."""
        if not self.sharded_sequence:
            return lambda: x
        parts = [self.start_gather(part) if part.dim() else part for part in x]
        return lambda: tuple(part.wait() if isinstance(part, Pending) else part for part in parts)


def reduce_output(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum the ranks' partial [s, b, h]. The sum is returned whole, or as this rank's [s / size, b, h] under sequence
    parallel, in the dtype of ``x``.

    ``x`` may be overwritten, so it must be a fresh result that no backward needs.
    """
    if not tp.sharded_sequence:
        return tp.sum(x)
    if x.shape[0] % tp.size:
        raise ValueError(
            f"sequence length {x.shape[0]} does not divide over tensor parallel size {tp.size}, which "
            f"sequence parallel needs; pad to {-(-x.shape[0] // tp.size) * tp.size} or turn it off"
        )
    return tp.scatter(x)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return tp.start_gather(x).wait() if tp.sequence_parallel else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        tp: TensorParallel = ctx.tp
        pending = tp.start_scatter(grad) if tp.sequence_parallel else tp.start_sum(grad.clone())
        return pending.wait(), None


def whole(x: Tensor, tp: TensorParallel) -> Tensor:
    """Return [s, b, n] of all positions, of which each rank makes its own heads. ``x`` is that, or the rank's slice
    under sequence parallel. Its gradient is the sum of the ranks'.
    """
    return x if tp.size == 1 else _whole(x, tp)


@torch._disable_dynamo
def _whole(x: Tensor, tp: TensorParallel) -> Tensor:
    return _Whole.apply(x, tp)


def sequence_slice(length: int, tp: TensorParallel) -> slice:
    """Return the positions of a sequence of ``length`` that this rank holds between the parallel linears."""
    if not tp.sharded_sequence:
        return slice(0, length)
    share = tp.share(length, "sequence length")
    return slice(tp.rank * share, (tp.rank + 1) * share)
