"""The ranks of a cluster as threads of one process: the engine's own chains, hops and bits, without gloo.

    losses = run_threads(4, train, settings)  # calls train(mesh_of, settings) on every rank

Threads take turns; a rank's turn ends when it waits for another one. So ranks cost only what they compute, and share
one core or one card. ``mesh_of`` is the rank's ``create_mesh``, with shards, ranks_per_node, device and ep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from benchmarks.lone_rank import PretendedMesh, axes_of, own_collectives
from megazero.mesh.grid import AxisSpec, make_grid
from megazero.mesh.mesh import Mesh

PATIENCE_S = 600.0  # a rank that waits so long waits for one that has ended


class MeshOf(Protocol):
    """The part of ``create_mesh`` that takes shard factors and ranks that share experts."""

    def __call__(
        self,
        *,
        shards: tuple[int, int, int],
        ranks_per_node: int,
        device: torch.device | str = "cpu",
        ep: int = 1,
    ) -> Mesh: ...


class Threads:
    """Shared by the ranks: whose turn it is, and the rooms where they meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition()
        self.failed: BaseException | None = None
        self.rooms: dict[tuple[Any, ...], dict[int, Meeting]] = {}

    def mesh(
        self,
        rank: int,
        made: list[Mesh],
        *,
        shards: tuple[int, int, int],
        ranks_per_node: int,
        device: torch.device | str = "cpu",
        ep: int = 1,
    ) -> Mesh:
        """Return ``rank``'s next mesh; ``made`` has those before. All ranks make as many, in one order."""
        grid, number = make_grid(self.size, ranks_per_node, shards=shards, ep=ep), len(made)

        def member(spec: AxisSpec, purpose: str) -> Member:
            ranks = spec.ranks(rank)
            room = self.rooms.setdefault((number, spec.name, ranks, purpose), {})
            return Member(self, room, spec.index(rank), spec.size)

        world = Member(self, self.rooms.setdefault((number, "world"), {}), rank, self.size)
        made.append(PretendedMesh(grid, rank, torch.device(device), axes_of(grid, rank, member), world=world))
        return made[-1]


class Meeting:
    """One collective. Each member leaves its outputs and its messages, by member; the last one copies."""

    def __init__(self, threads: Threads, size: int) -> None:
        self.threads, self.size = threads, size
        self.left: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self.events: list[Any] = []  # CUDA: what each member had enqueued; at last, that all is copied
        self.done = False

    def join(self, index: int, out: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        self.left[index] = out, sent
        self._record(out)
        if len(self.left) < self.size:
            return
        for event in self.events:
            torch.cuda.current_stream().wait_event(event)
        for i, (pieces, _) in self.left.items():
            for j, (_, messages) in self.left.items():
                if pieces[j].data_ptr() != messages[i].data_ptr():  # else it lies there already
                    pieces[j].copy_(messages[i])
        self._record(out)
        self.left.clear()
        self.done = True
        self.threads.turn.notify_all()

    def _record(self, tensors: list[torch.Tensor]) -> None:
        if tensors[0].is_cuda:
            self.events.append(torch.cuda.current_stream().record_event())

    def wait(self, timeout: object = None) -> bool:
        threads = self.threads
        came = threads.turn.wait_for(lambda: self.done or threads.failed is not None, PATIENCE_S)
        if not self.done:
            raise RuntimeError("another rank failed" if came else f"no other rank came in {PATIENCE_S:g} s")
        if self.events:
            torch.cuda.current_stream().wait_event(self.events[-1])
        return True

    def is_completed(self) -> bool:
        return self.done


class Member:
    """One rank's side of a communicator. Its n-th collective meets the n-th of the others."""

    def __init__(self, threads: Threads, room: dict[int, Meeting], index: int, size: int) -> None:
        self.threads, self.room, self.index, self.size, self.count = threads, room, index, size, 0

    def gather(self, out: torch.Tensor, own: torch.Tensor) -> Meeting:
        return self._meet(list(out.view(self.size, -1)), [own.view(-1)] * self.size)

    def exchange(self, out: torch.Tensor, sent: torch.Tensor, *splits: Any) -> Meeting:
        """splits: of ``out`` and of ``sent``, even without."""
        even = [out.numel() // self.size] * self.size
        of_out, of_sent = (each or even for each in splits or (None, None))
        return self._meet(list(out.split(of_out)), list(sent.split(of_sent)))

    def _meet(self, out: list[torch.Tensor], sent: list[torch.Tensor]) -> Meeting:
        meeting = self.room.setdefault(self.count, Meeting(self.threads, self.size))
        meeting.join(self.index, out, sent)
        if meeting.done:
            del self.room[self.count]
        self.count += 1
        return meeting


def run_threads(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(mesh_of, *args)`` on every rank; return what each returned. Raises what the first that failed
    raised."""
    threads, found = Threads(size), [None] * size

    def act(rank: int) -> None:
        # Backwards of a card's graphs would otherwise share one thread, which would wait for itself.
        with threads.turn, torch.autograd.set_multithreading_enabled(False):
            try:
                found[rank] = function(partial(threads.mesh, rank, []), *args)
            except BaseException as error:
                threads.failed = threads.failed or error
                threads.turn.notify_all()

    ranks = [threading.Thread(target=act, args=(rank,), daemon=True) for rank in range(size)]
    with own_collectives():
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    if threads.failed is not None:
        raise threads.failed
    return found
