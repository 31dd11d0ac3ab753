"""What ranks tell each other before an update: partial sums over tp, and one row of scalars."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megazero.comm.traffic import Traffic
from megazero.mesh.collectives import all_gather_flat
from megazero.mesh.grid import INTER, INTRA
from megazero.mesh.mesh import Axis, Mesh
from megazero.zero.optimizer import Run
from megazero.zero.rounding import relative_errors


def sum_partial(runs: Sequence[Run], tp: Axis, traffic: Traffic) -> None:
    """Sum the gradients that are partial on tp ranks, over the ranks that hold them, in rank order.

    These are the gradients of norms under sequence parallel, and of key/value heads that several ranks hold.
    """
    partial = [r for r in runs if r.traits.partial]
    for span in sorted({r.traits.span for r in partial} if tp.size > 1 else ()):
        _sum_over_holders([r for r in partial if r.traits.span == span], tp, traffic)


def _sum_over_holders(partial: Sequence[Run], tp: Axis, traffic: Traffic) -> None:
    """Sum the partial runs, which have the same holders.

    All ranks' runs are gathered. The bytes stay inside a node, once per step, and to send fewer would need
    process groups of their own.
    """
    own = torch.cat([r.grad for r in partial])
    every = own.new_empty(tp.size * own.numel())
    traffic.add("tp", tp.link, (tp.size - 1) * own.nbytes)
    all_gather_flat(every, own, group=tp.gather_group)
    holders = partial[0].traits.holders(tp.index, tp.size)
    rows = every.view(tp.size, -1)[holders.start : holders.stop].unbind(0)
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    for run, part in zip(partial, total.split([r.stop - r.start for r in partial]), strict=True):
        run.grad.copy_(part)


def exchange_scalars(
    mesh: Mesh, square: torch.Tensor, order: int, rounding: torch.Tensor, traffic: Traffic
) -> tuple[float, dict[str, float]]:
    """Return the global norm of the gradients (nan if one is not finite) and relative rounding errors by
    kind.

    square: fp64 scalar, the sum of squares of this rank's gradient slices; replicas' slices do not count.
    order: the hash of what this rank issued. rounding: fp64 [2 x KINDS] from ``Rounding.take``.
    Raises RuntimeError if ranks of one stage issued other collectives.
    """
    square = torch.zeros((), dtype=torch.float64) if mesh.is_replica else square.cpu()
    hashed = torch.tensor(float(order), dtype=torch.float64)
    row = torch.cat([torch.stack([square, hashed]), rounding.cpu()])
    rows = mesh.gather_rows(row.to(mesh.device)).cpu()
    link = INTER if mesh.grid.ranks_per_node < mesh.world_size else INTRA
    traffic.add("scalar", link, (mesh.world_size - 1) * row.nbytes)
    stage = mesh.grid.axis("pp").index
    hashes = [
        {rows[r, 1].item() for r in range(mesh.world_size) if stage(r) == s} for s in range(mesh.pp.size)
    ]
    if any(len(issued) > 1 for issued in hashes):
        raise RuntimeError(
            f"ranks issued different collectives in this step (hashes {rows[:, 1].tolist()}): the modules "
            "must be called in the same order on every rank"
        )
    finite = rows[:, 0].isfinite().all()
    norm = math.sqrt(rows[:, 0].sum().item()) if finite else math.nan
    return norm, relative_errors(rows[:, 2:].sum(0))
