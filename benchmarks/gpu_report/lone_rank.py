"""One rank of a cluster whose other ranks are not there: the engine's own chains, hops and kernels on one device.

What the others would send is taken to be what this rank sends them, so every gather and exchange is a copy of the
right size on the stream that calls it. Memory, allocations, host waits and the order of work are those of a rank;
times of collectives are not. From a pipeline's other stages come zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megazero.comm import hops
from megazero.mesh.grid import AxisSpec, make_grid
from megazero.mesh.mesh import Axis, Mesh


class Landed:
    """The work of a copy: later work of the same stream comes after it."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class LoneMesh(Mesh):
    def gather_rows(self, row: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = row.expand(self.world_size, -1)
        return rows if out is None else out.copy_(rows)

    def gather_data_rows(self, row: torch.Tensor) -> torch.Tensor:
        return row.expand(self.dp_size, -1)


class Echo:
    """A communicator of ``size`` ranks that all have what this one has."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, out: torch.Tensor, own: torch.Tensor) -> Landed:
        row = own.numel()
        for i in range(self.size):
            piece = out[i * row : (i + 1) * row]
            if piece.data_ptr() != own.data_ptr():  # in place: the own row lies there already
                piece.copy_(own)
        return Landed()

    @staticmethod
    def exchange(out: torch.Tensor, sent: torch.Tensor) -> Landed:
        out.copy_(sent)
        return Landed()


def _all_alike(out: list[Any], own: Any, **_: Any) -> None:
    out[:] = [own] * len(out)


@contextmanager
def lone_rank(
    dp: int,
    ranks_per_node: int,
    shards: tuple[int, int, int],
    device: torch.device,
    rank: int = 1,
    pp: int = 1,
) -> Iterator[Mesh]:
    """The mesh of ``rank`` among pp stages of dp ranks; engines on it run inside the block."""
    grid = make_grid(dp * pp, ranks_per_node, pp=pp, shards=shards)

    def axis(spec: AxisSpec) -> Axis:
        gather, reduce = ((Echo(spec.size) if spec.size > 1 else None) for _ in range(2))
        return Axis(spec, spec.index(rank), spec.ranks(rank), gather, reduce)  # type: ignore[arg-type]

    def gather(out: torch.Tensor, own: torch.Tensor, group: Any, **_: Any) -> Landed:
        return group.gather(out, own)

    def exchange(out: torch.Tensor, sent: torch.Tensor, *_: Any, group: Any, **__: Any) -> Landed:
        return group.exchange(out, sent)

    fakes = {"all_to_all_single": exchange, "all_gather_object": _all_alike}
    fakes |= {"send": lambda *_, **__: None, "recv": lambda x, *_, **__: x.zero_()}
    fakes |= {"isend": lambda *_, **__: Landed(), "irecv": lambda x, *_, **__: (x.zero_(), Landed())[1]}
    with patch.object(hops, "all_gather_flat", gather), patch.multiple(dist, **fakes):
        yield LoneMesh(grid, rank, device, {spec.name: axis(spec) for spec in grid.axes})
