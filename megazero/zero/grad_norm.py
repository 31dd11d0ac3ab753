"""What ranks exchange before an update: partial sums over tp, and one row of scalars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.kernels.arena import Frame
from megazero.mesh.grid import INTER, INTRA
from megazero.mesh.mesh import Axis, Mesh, all_gather_flat
from megazero.zero.optimizer import Run
from megazero.zero.rounding import KINDS, relative_errors

OWN = 2 + 2 * len(KINDS)  # the engine's scalars of a row: square, order, and the sums of rounding errors
Rows = tuple[tuple[float, ...], ...]


def sum_partial(runs: Sequence[Run], tp: Axis, frame: Frame, traffic: Traffic, waits: Waits) -> None:
    """Sum the gradients that are partial on tp ranks, over the ranks that hold them, in rank order.

    These are the gradients of norms under sequence parallelism, and of key/value heads that several ranks hold.
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


class StepScalars:
    """The one exchange of scalars in a step, and the one place where the host waits for the device in it.

    Every rank contributes a row: the sum of squares of its gradient slices, the hash of its issued collectives,
    rounding errors, with outer replicas what these tell each other (outer.py), and the caller's scalars. Its tensors
    are used in every step: ``row`` [k] is written, then ``exchange`` sends it.
    """

    def __init__(self, mesh: Mesh, waits: Waits, differ: Callable[[], None]) -> None:
        """differ: raises RuntimeError that names the collectives in which ranks differ."""
        self.mesh, self.waits, self.differ = mesh, waits, differ
        link = INTER if mesh.grid.ranks_per_node < mesh.world_size else INTRA
        self.hop = f"exposed_scalar_{link.removesuffix('_node')}"  # of waits in the exchange
        self._make(0)

    def _make(self, extra: int) -> None:
        """Make the tensors, all fp64, for rows with this many caller's scalars."""
        world, k, replicas = self.mesh.world_size, OWN + extra, self.mesh.grid.outer
        self.received = torch.zeros(world * k + replicas * OWN, dtype=torch.float64, device=self.mesh.device)
        self.rows = self.received[: world * k].view(world, k)
        self.sums = self.received[world * k :].view(replicas, OWN)
        self.row = torch.zeros(k, dtype=torch.float64, device=self.mesh.device)

    def open(self, *extra: torch.Tensor | None) -> torch.Tensor:
        """Return the row with these scalars, each 1-D, filled in behind the engine's, which the engine writes."""
        given = [each for each in extra if each is not None]
        count = sum(each.numel() for each in given)
        if self.row.numel() != OWN + count:
            self._make(count)
        for each, part in zip(given, self.row[OWN:].split([e.numel() for e in given]), strict=True):
            part.copy_(each)
        return self.row

    def exchange(self, traffic: Traffic) -> None:
        """Exchange the rows and sum them. On CUDA this is only enqueued."""
        with self.waits(self.hop):
            self.mesh.gather_rows(self.row, self.rows)
        for link, rows in self.mesh.grid.rows_sent.items():
            if rows:
                traffic.add("scalar", link, rows * self.row.nbytes)
        for replica, sums in zip(self.rows.split(self.mesh.grid.replica_size), self.sums, strict=True):
            torch.sum(replica[:, 0], 0, out=sums[0])
            torch.sum(replica[:, 2:OWN], 0, out=sums[2:])

    def read(self) -> tuple[list[float], dict[str, float], Rows]:
        """Return the global norm of the gradients of every outer replica (nan if one is not finite), this replica's
        relative rounding errors by kind, and the scalars given to ``open`` by rank.

        Raises RuntimeError if ranks of one stage of a replica issued other collectives.
        """
        received = self.received.tolist()  # the host waits here, for all that the step has enqueued
        k, world = self.row.numel(), self.mesh.world_size
        rows = [received[r * k : (r + 1) * k] for r in range(world)]
        stage, size = self.mesh.grid.axis("pp").index, self.mesh.grid.replica_size
        hashes: dict[tuple[int, int], set[float]] = {}
        for rank, row in enumerate(rows):
            hashes.setdefault((rank // size, stage(rank)), set()).add(row[1])
        if any(len(issued) > 1 for issued in hashes.values()):
            self.differ()
            raise RuntimeError(
                f"ranks issued different collectives in this step (hashes {[row[1] for row in rows]}): the modules "
                "must be called in the same order on every rank"
            )
        sums, norms = received[world * k :], []
        for replica in range(self.mesh.grid.outer):
            finite = all(math.isfinite(row[0]) for row in rows[replica * size : (replica + 1) * size])
            norms.append(math.sqrt(sums[replica * OWN]) if finite else math.nan)
        _, _, *errors = sums[self.mesh.replica * OWN :][:OWN]
        return norms, relative_errors(errors), tuple(tuple(row[OWN:]) for row in rows)
