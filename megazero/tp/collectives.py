"""The tensor-parallel context, which layers are given, and the collectives on its axis, plain and differentiable.

The collectives act on dim 0 (the sequence, in [s, b, h] activations) and keep the dtype. Sums run in the order of
source ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.mesh.grid import INTRA, nearest_multiple
from megazero.mesh.mesh import all_gather_flat, reduce_scatter_flat
from megazero.tp.deferred import DeferredGradients


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis as one rank sees it: its group, its index in it, and the group's size.

    With ``size`` 1 nothing communicates and ``group`` is not looked at. With ``group`` None and a larger size the
    context serves for shapes, placements and initialisation only. Communication needs the group by name, since
    torch.distributed reads None as the whole world.

    sequence_parallel: Between the parallel linears, activations are cut along the sequence (dim 0) over the axis
        (Korthikanti et al. 2022, section 4.2.2).
    traffic: It counts the bytes this rank sends, if given. The axis never leaves a node.
    waits: It times the waits for other ranks of the axis.
    deferred: It lets backwards put weight gradients off, if given. It works for every size, 1 included.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_parallel: bool = False
    traffic: Traffic | None = field(default=None, compare=False, repr=False)
    waits: Waits = field(default_factory=Waits, compare=False, repr=False)
    deferred: DeferredGradients | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"tensor-parallel rank {self.rank} is not in [0, {self.size})")

    @property
    def sharded_sequence(self) -> bool:
        """Return whether activations between the parallel linears hold only this rank's part of the sequence."""
        return self.sequence_parallel and self.size > 1

    def count(self, sent: int) -> None:
        """Add bytes that this rank sends over the axis."""
        if self.traffic is not None:
            self.traffic.add("tp", INTRA, sent)

    def share(self, total: int, what: str) -> int:
        """Return ``total / size``. Raises ValueError naming ``what`` when it does not divide."""
        if total % self.size:
            raise ValueError(
                f"{what} = {total} does not divide over tensor parallel size {self.size}; "
                f"the nearest multiple is {nearest_multiple(total, self.size)}"
            )
        return total // self.size


class Pending(NamedTuple):
    """A collective in flight. ``inputs`` keeps its buffers alive until ``wait``, which ``waits`` times."""

    work: Any
    waits: Waits
    inputs: Tensor
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Return the result once the collective is done (on CUDA: once the current stream waits for it)."""
        with self.waits("exposed_tp_intra"):
            self.work.wait()
        return self.finish()


def _group(tp: TensorParallel) -> dist.ProcessGroup:
    assert tp.group is not None, "this TensorParallel has no process group: it cannot communicate"
    return tp.group


def start_all_reduce(x: Tensor, tp: TensorParallel) -> Pending:
    """Sum ``x`` (any shape) over the axis, in place where it is contiguous."""
    x = x.contiguous()
    tp.count(2 * (tp.size - 1) * x.nbytes // tp.size)  # a ring's share
    work = dist.all_reduce(x, group=_group(tp), async_op=True)
    return Pending(work, tp.waits, x, lambda: x)


def start_all_gather(x: Tensor, tp: TensorParallel) -> Pending:
    """Concatenate the ranks' [n, ...] along dim 0. The result is [size * n, ...]."""
    x = x.contiguous()
    tp.count((tp.size - 1) * x.nbytes)
    out = x.new_empty(tp.size * x.shape[0], *x.shape[1:])
    work = all_gather_flat(out, x, group=_group(tp), async_op=True)
    return Pending(work, tp.waits, x, lambda: out)


def start_reduce_scatter(x: Tensor, tp: TensorParallel) -> Pending:
    """Sum [size * n, ...] over the axis and keep this rank's [n, ...].

    On the CPU this is an all-to-all and a sum by source. For a million fp32 values on 4 ranks it took 10 ms, and
    gloo's own reduce-scatter 54 ms. The order of the sum is fixed, too.
    """
    x = x.contiguous()
    tp.count((tp.size - 1) * x.nbytes // tp.size)
    shape = (x.shape[0] // tp.size, *x.shape[1:])
    if x.is_cuda:
        out = x.new_empty(shape)
        work = reduce_scatter_flat(out, x, group=_group(tp), async_op=True)
        return Pending(work, tp.waits, x, lambda: out)
    parts = torch.empty_like(x)
    work = dist.all_to_all_single(parts, x, group=_group(tp), async_op=True)
    return Pending(work, tp.waits, x, lambda: parts.view(tp.size, *shape).sum(0))


class _ReduceForward(torch.autograd.Function):
    """Forward sums over the axis, in place. Backward passes the gradient on (all ranks hold the same)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        out = start_all_reduce(x, tp).wait()
        if out is x:
            ctx.mark_dirty(x)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatterForward(torch.autograd.Function):
    """Forward is a reduce-scatter along dim 0. Backward is an all-gather along dim 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return start_reduce_scatter(x, tp).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_all_gather(grad, ctx.tp).wait(), None


def reduce_output(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum the ranks' partial [s, b, h]. The sum is returned whole, or as this rank's [s / size, b, h] under sequence
    parallel, in the dtype of ``x``.

    ``x`` may be overwritten, so it must be a fresh result that no backward needs.
    """
    return x if tp.size == 1 else _reduced(x, tp)


@torch._disable_dynamo  # it waits for a collective, counts its bytes and times it
def _reduced(x: Tensor, tp: TensorParallel) -> Tensor:
    if not tp.sequence_parallel:
        return _ReduceForward.apply(x, tp)
    if x.shape[0] % tp.size:
        raise ValueError(
            f"sequence length {x.shape[0]} does not divide over tensor parallel size {tp.size}, which "
            f"sequence parallel needs; pad to {-(-x.shape[0] // tp.size) * tp.size} or turn it off"
        )
    return _ReduceScatterForward.apply(x, tp)


def sequence_slice(length: int, tp: TensorParallel) -> slice:
    """Return the positions of a sequence of ``length`` that this rank holds between the parallel linears."""
    if not tp.sharded_sequence:
        return slice(0, length)
    share = tp.share(length, "sequence length")
    return slice(tp.rank * share, (tp.rank + 1) * share)
