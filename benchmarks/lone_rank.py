"""One rank of a cluster without the other ranks: the engine's own chains, hops and kernels on one device.

The others are taken to send what this rank sends them, so every gather and exchange is a copy of the right size on
the calling stream. Memory, allocations, host waits and the order of work are a rank's; times of collectives are not.
A pipeline's other stages send zeros. rank_threads.py runs all ranks of a cluster on one device, by the same means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist

from megazero.comm import hops
from megazero.mesh import mesh as meshes
from megazero.mesh.grid import AxisSpec, Grid, make_grid
from megazero.mesh.mesh import Axis, Mesh


class Communicator(Protocol):
    """Takes a process group's place. What it returns has ``wait`` and ``is_completed``."""

    def gather(self, out: torch.Tensor, own: torch.Tensor) -> Any: ...
    def exchange(self, out: torch.Tensor, sent: torch.Tensor, *splits: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class PretendedMesh(Mesh):
    """A mesh without process groups. world: the communicator of all ranks."""

    world: Communicator

    def gather_rows(self, row: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = row.new_empty(self.world_size, row.numel()) if out is None else out
        self.world.gather(out.view(-1), row).wait()
        return out


def axes_of(grid: Grid, rank: int, communicator: Callable[[AxisSpec, str], Communicator]) -> dict[str, Axis]:
    """Return the axes by name. communicator: makes one for an axis and a purpose, 'gather' or 'reduce'."""

    def axis(spec: AxisSpec) -> Axis:
        pair = [communicator(spec, each) if spec.size > 1 else None for each in ("gather", "reduce")]
        return Axis(spec, spec.index(rank), spec.ranks(rank), *pair)  # type: ignore[arg-type]

    specs = dict.fromkeys((*grid.axes, *grid.ep_axes, *grid.expert_axes))
    return {spec.name: axis(spec) for spec in specs}


@contextmanager
def own_collectives(**more: Callable[..., Any]) -> Iterator[None]:
    """Let the engine's collectives go to a ``Communicator``. more: replaces further functions of
    torch.distributed."""

    def gather(out: torch.Tensor, own: torch.Tensor, group: Communicator, async_op: bool = False) -> Any:
        return _begun(group.gather(out, own), async_op)

    def exchange(
        out: torch.Tensor, sent: torch.Tensor, *splits: Any, group: Communicator, async_op: bool = False
    ) -> Any:
        return _begun(group.exchange(out, sent, *splits), async_op)

    with (
        patch.object(hops, "all_gather_flat", gather),
        patch.object(meshes, "all_gather_flat", gather),
        patch.multiple(dist, all_to_all_single=exchange, **more),
    ):
        yield


def _begun(work: Any, async_op: bool) -> Any:
    if not async_op:
        work.wait()
    return work


class Landed:
    """The handle of a copy. Later work of the same stream follows it."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Echo:
    """A communicator of ``size`` ranks that all send what this one does."""

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
    def exchange(out: torch.Tensor, sent: torch.Tensor, *_: object) -> Landed:
        out.copy_(sent)
        return Landed()


@contextmanager
def lone_rank(
    dp: int,
    ranks_per_node: int,
    shards: tuple[int, int, int],
    device: torch.device,
    rank: int = 1,
    pp: int = 1,
) -> Iterator[Mesh]:
    """Yield the mesh of ``rank`` among pp stages of dp ranks. Engines on it run inside the block."""
    grid = make_grid(dp * pp, ranks_per_node, pp=pp, shards=shards)
    axes = axes_of(grid, rank, lambda spec, _: Echo(spec.size))
    fakes: dict[str, Any] = {"send": lambda *_, **__: None}
    fakes |= {"recv": lambda x, *_, **__: x.zero_()}
    fakes |= {"isend": lambda *_, **__: Landed(), "irecv": lambda x, *_, **__: (x.zero_(), Landed())[1]}
    with own_collectives(**fakes):
        yield PretendedMesh(grid, rank, device, axes, world=Echo(grid.world_size))
