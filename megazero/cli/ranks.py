"""Local rank processes: one set for a whole verification, a fresh gloo world for each call. No ports."""

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
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

GRACE_S = 5.0  # for the others to speak once a rank has failed


class RanksFailed(RuntimeError):
    """At least one rank raised, died or did not answer; the message has what each of them said."""


class Ranks:
    """At most ``count`` processes that live until ``close``; a context manager. Started as calls need them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *args: Any, world: int, timeout: float) -> list[Any]:
        """``function(*args)`` on each rank of a world of its own; what they return, by rank.

        function: importable from its module. world: at most ``count``. timeout: seconds, for the call and for each
        collective. Raises RanksFailed; the processes are then gone, and started again by the next call.
        """
        assert world <= self.count, (world, self.count)
        self._start(world)
        conns = {conn: rank for rank, (_, conn) in enumerate(self._ranks[:world])}
        with tempfile.TemporaryDirectory(prefix="megazero-verify-") as folder:
            job = pickle.dumps((function, args))
            for conn, rank in conns.items():
                conn.send((rank, world, os.path.join(folder, "store"), timeout, job))
            results = _collect(conns, time.monotonic() + timeout)
        failed = {rank: text for rank, (good, text) in results.items() if not good}
        missing = [rank for rank in range(world) if rank not in results]
        if failed or missing:
            self.close()
            texts = [f"rank {rank}: {text}" for rank, text in sorted(failed.items())]
            raise RanksFailed(
                "\n".join([*texts, f"no answer from ranks {missing}"][: None if missing else -1])
            )
        return [results[rank][1] for rank in range(world)]

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
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "megazero.cli.task"])
        for _ in range(world - len(self._ranks)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, sys.path), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _collect(conns: dict[Connection, int], deadline: float) -> dict[int, tuple[bool, Any]]:
    results: dict[int, tuple[bool, Any]] = {}
    while len(results) < len(conns) and (left := deadline - time.monotonic()) > 0:
        for conn in wait([c for c, rank in conns.items() if rank not in results], left):
            assert isinstance(conn, Connection)
            rank = conns[conn]
            try:
                results[rank] = conn.recv()
            except (EOFError, ConnectionResetError):
                results[rank] = (False, "the process died")
            if not results[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return results


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
            result = (True, _run(*job))
        except Exception:  # noqa: BLE001 - sent to the caller, whatever it is
            result = (False, traceback.format_exc())
        conn.send(result)


def _run(rank: int, world: int, store: str, timeout: float, job: bytes) -> Any:
    import torch.distributed as dist

    function, args = pickle.loads(job)
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
        gc.collect()  # engines are cycles, and hold process groups with threads that poll
