"""The global norm of the gradients: partial sums over tp, then the squares of unique slices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.kernels.arena import Frame
from megazero.mesh.mesh import Axis, Mesh, all_gather_flat
from megazero.zero.optimizer import Run
from megazero.zero.scalars import Rows, StepPart, Sums


def sum_partial(runs: Sequence[Run], tp: Axis, frame: Frame, traffic: Traffic, waits: Waits) -> None:
    """Sum the gradients that are partial on tp ranks, over the ranks that hold them, in rank order.

    Under sequence parallelism these are the gradients of norms, and of experts that all tp ranks hold; and always of
    key/value heads that several ranks hold.
    frame: of the transient buffers.
    """
    partial = [r for r in runs if r.traits.partial]
    for span in sorted({r.traits.span for r in partial} if tp.size > 1 else ()):
        _sum_over_holders([r for r in partial if r.traits.span == span], tp, frame, traffic, waits)


def _sum_over_holders(partial: Sequence[Run], tp: Axis, frame: Frame, traffic: Traffic, waits: Waits) -> None:
    """Sum the partial runs, which have the same holders.

    All ranks' runs are gathered once per step, inside a node. Sending fewer bytes would need extra process groups.
    """
    sizes = [r.stop - r.start for r in partial]
    every = frame.take(tp.size * sum(sizes), partial[0].grad.dtype).view(tp.size, -1)
    own = every[tp.index]
    for run, part in zip(partial, own.split(sizes), strict=True):
        part.copy_(run.grad)
    traffic.add("tp", tp.link, (tp.size - 1) * own.nbytes)
    with waits("exposed_tp_intra"):
        all_gather_flat(every.view(-1), own, group=tp.gather_group)
    holders = partial[0].traits.holders(tp.index, tp.size)
    total, *rest = every[holders.start : holders.stop].unbind(0)
    for row in rest:
        total.add_(row)
    for run, part in zip(partial, total.split(sizes), strict=True):
        run.grad.copy_(part)


def counted(runs: Sequence[Run], mesh: Mesh) -> list[Run]:
    """Return the runs that this rank contributes to the global norm. One rank counts a slice that several hold."""
    is_first_end = mesh.ends is None or mesh.ends.index == 0
    own = [run for run in runs if run.traits.holders(mesh.tp.index, mesh.tp.size).start == mesh.tp.index]
    return [run for run in own if run.unit.axes.counts and (is_first_end or not run.unit.tied)]


class GlobalNorm(StepPart):
    """The global norm of the divided gradients. A step is skipped if it is not finite.

    runs: those that this rank counts. divisor: of the open step's gradients.
    """

    columns = summed = 1

    def __init__(self, runs: Sequence[Run], mesh: Mesh) -> None:
        self.runs, self.divisor = runs, 1.0
        dtypes = dict.fromkeys(run.leaf.dtype for run in runs)
        by_dtype = [[run for run in runs if run.leaf.dtype == dtype] for dtype in dtypes]
        norms = [torch.empty(len(own), dtype=own[0].leaf.dtype, device=mesh.device) for own in by_dtype]
        self._norms = [(own, each, each.unbind()) for own, each in zip(by_dtype, norms, strict=True)]
        squares = torch.empty(len(runs), dtype=torch.float64, device=mesh.device)
        self._squares = squares, squares.split([len(own) for own in by_dtype])

    def write(self, row: torch.Tensor) -> None:
        """Write the sum of the counted gradients' squares."""
        squares, parts = self._squares
        for (runs, norms, places), part in zip(self._norms, parts, strict=True):
            for run, place in zip(runs, places, strict=True):
                torch.linalg.vector_norm(run.grad, out=place)
            part.copy_(norms)
        torch.sum(squares.square_(), 0, out=row[0])

    def read(self, rows: Rows, sums: Sums) -> Mapping[str, Any]:
        finite = all(math.isfinite(square) for (square,) in rows)
        norm = math.sqrt(sums[0]) / self.divisor if finite else math.nan
        return {"grad_norm": norm, "skipped": not math.isfinite(norm)}


def clip_factor(norm: float, limit: float | None, divisor: float) -> float:
    """Return what gradients are multiplied by: 1/divisor, and clip/norm where the norm is above the limit.

    norm: the norm of the divided gradients. limit: None or 0 means no clipping.
    """
    clip = min(1.0, limit / (norm + 1e-6)) if limit and math.isfinite(norm) else 1.0
    return clip / divisor
