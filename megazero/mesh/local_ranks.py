"""A pool of local rank processes: one set serves many calls, and each call gets a fresh gloo world.

It uses no ports. Starting a process costs an import of torch (about 2 s each on 2 cores). A gloo process group
among running processes costs about 30 ms. So ranks are forked from a server that has torch loaded.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

GRACE_S = 5.0  # for the others to speak once a rank has failed
DIED, TIMEOUT = "RankDied", "Timeout"


class RanksFailed(RuntimeError):
    """At least one rank raised, died or did not answer. The message has the error of each."""


@dataclass(frozen=True)
class Answer:
    """A rank's return value, or the reason why it did not return.

    ``error`` is an exception's name, DIED or TIMEOUT; it is '' where there is no error. ``text`` is its message,
    and ``trace`` is its traceback.
    """

    value: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""


class LocalRanks:
    """A context manager of processes that live until ``close``. Calls start them as needed.

    ``preload`` names modules that the server imports once, for all ranks. Those of this process's first call count.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = ["torch", "torch.distributed", "torch._dynamo", *preload]
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *args: Any, world: int, timeout: float) -> list[Any]:
        """Run ``function(*args)`` on each rank of a world of its own. Returns what the ranks return, by rank.

        ``function`` must be importable from its module. ``timeout`` is in seconds, for the call and for each
        collective. Raises RanksFailed.
        """
        answers = self.ask(function, *args, world=world, timeout=timeout)
        failed = [
            f"rank {rank}: {each.trace or f'{each.error}: {each.text}'}"
            for rank, each in enumerate(answers)
            if each.error
        ]
        if failed:
            raise RanksFailed("\n".join(failed))
        return [each.value for each in answers]

    def ask(
        self, function: Callable[..., Any], *args: Any, world: int, timeout: float, grace: float = GRACE_S
    ) -> list[Answer]:
        """Do the same as ``call``, but return every rank's answer.

        ``grace`` is the time in seconds that the other ranks have when one has failed. Where a rank died or has not
        answered in time, all of them are ended.
        """
        self._start(world)
        conns = {conn: rank for rank, (_, conn) in enumerate(self._ranks[:world])}
        with tempfile.TemporaryDirectory(prefix="megazero-ranks-") as folder:
            job = pickle.dumps((function, args))
            for conn, rank in conns.items():
                conn.send((rank, world, os.path.join(folder, "store"), timeout, job))
            found = _collect(conns, time.monotonic() + timeout, grace)
        answers = [found.get(rank, Answer(error=TIMEOUT, text="no answer")) for rank in range(world)]
        if any(each.error in (DIED, TIMEOUT) for each in answers):
            self.close()
        return answers

    def close(self) -> None:
        """End every process, whatever it does."""
        for process, conn in self._ranks:
            conn.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks.clear()

    def _start(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        # Loaded once, in the server. torch._dynamo: the first optimizer of a process imports it, 2.6 s.
        context.set_forkserver_preload(self._preload)
        for _ in range(world - len(self._ranks)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, sys.path), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _collect(conns: dict[Connection, int], deadline: float, grace: float) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    while len(found) < len(conns) and (left := deadline - time.monotonic()) > 0:
        for conn in wait([c for c, rank in conns.items() if rank not in found], left):
            assert isinstance(conn, Connection)
            rank = conns[conn]
            try:
                found[rank] = pickle.loads(conn.recv_bytes())
            except (EOFError, ConnectionResetError):
                found[rank] = Answer(error=DIED, text="the process died")
            if found[rank].error:
                deadline = min(deadline, time.monotonic() + grace)
    return found


def _serve(conn: Connection, path: Sequence[str]) -> None:
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    while True:
        try:
            job = conn.recv()
        except (EOFError, OSError):
            return
        try:
            answer = pickle.dumps(Answer(_run(*job)))
        except BaseException as error:  # noqa: BLE001 - sent to the caller, whatever it is
            answer = pickle.dumps(Answer(None, type(error).__name__, f"{error}", traceback.format_exc()))
        # Engines are cycles, and hold process groups: each kept some 8 threads of gloo that poll, and 1300 of them
        # made everything ten times slower. What is left is loaded modules: to walk them again took 16 ms a job.
        gc.collect()
        gc.freeze()
        conn.send_bytes(answer)


def _run(rank: int, world: int, store: str, timeout: float, job: bytes) -> Any:
    import torch
    import torch.distributed as dist

    function, args = pickle.loads(job)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()  # a rank that ends at once must not close connections that others still make
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
