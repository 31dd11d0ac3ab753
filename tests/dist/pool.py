"""One pool of long-lived rank processes, shared by every distributed test.

Starting a process costs an import of torch (about 2 s each on 2 cores); a gloo process group among
running processes costs about 30 ms. So ranks are forked once from a server that has torch loaded,
kept for the whole test run, and each call makes and destroys its own process group.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any


class RankError(RuntimeError):
    """A rank raised: the message holds every rank's traceback that arrived."""


def _serve(conn: Connection, path: list[str]) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()
    while True:
        try:
            job = conn.recv_bytes()
        except EOFError:
            return
        rank, world_size, store, timeout, payload = pickle.loads(job)
        try:
            function, args, kwargs = pickle.loads(payload)
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            dist.barrier()  # a rank that ends at once must not close connections that others still make
            try:
                result = (True, function(*args, **kwargs))
            finally:
                dist.destroy_process_group()
                # Engines are cycles, and hold process groups: each kept some 8 threads of gloo that poll; 1300 of
                # them after a file of tests made everything here ten times slower.
                gc.collect()
        except BaseException as error:  # noqa: BLE001 - sent to the caller, whatever it is
            result = (False, (type(error).__name__, f"{error}", traceback.format_exc()))
        try:
            conn.send_bytes(pickle.dumps(result))
        except Exception:  # noqa: BLE001 - an unpicklable result is the test's mistake; say so
            conn.send_bytes(pickle.dumps((False, ("PicklingError", "", traceback.format_exc()))))


class Pool:
    """Rank processes by index; grows on demand, replaces the ones that died."""

    def __init__(self) -> None:
        self.context = mp.get_context("forkserver")
        # torch._dynamo: the first optimizer of a process imports it, 2.6 s.
        self.context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
        self.ranks: dict[int, tuple[Any, Connection]] = {}

    def rank(self, index: int) -> tuple[Any, Connection]:
        process, conn = self.ranks.get(index, (None, None))
        if process is None or not process.is_alive():
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(theirs, sys.path), daemon=True)
            process.start()
            theirs.close()
            self.ranks[index] = (process, ours)
        return self.ranks[index]

    def kill(self, indices: range | None = None) -> None:
        for index in list(self.ranks if indices is None else indices):
            process, conn = self.ranks.pop(index)
            process.kill()
            process.join()
            conn.close()

    def run(
        self,
        world_size: int,
        function: Callable,
        args: tuple,
        kwargs: dict,
        timeout: float,
        return_errors: bool,
    ) -> list:
        handle, store = tempfile.mkstemp(prefix="megazero-store-")
        os.close(handle)
        os.unlink(store)
        payload = pickle.dumps((function, args, kwargs))
        conns = {}
        for rank in range(world_size):
            conn = self.rank(rank)[1]
            conn.send_bytes(pickle.dumps((rank, world_size, store, timeout, payload)))
            conns[conn] = rank
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(results) < world_size and (left := deadline - time.monotonic()) > 0:
            pending = [c for c, r in conns.items() if r not in results]
            for conn in wait(pending, left):
                rank = conns[conn]
                try:
                    results[rank] = pickle.loads(conn.recv_bytes())
                except (EOFError, ConnectionResetError):
                    results[rank] = (False, ("RankDied", f"rank {rank} died", ""))
                if not results[rank][0] and not return_errors:  # let the others speak, but not hang
                    deadline = min(deadline, time.monotonic() + 3)
        if os.path.exists(store):
            os.unlink(store)
        if len(results) < world_size:
            self.kill(range(world_size))
        if return_errors:
            return [results.get(r, (False, ("Timeout", "", ""))) for r in range(world_size)]
        failed = {r: e for r, (ok, e) in results.items() if not ok}
        missing = [r for r in range(world_size) if r not in results]
        if failed or missing:
            texts = [f"--- rank {r}: {name}: {text}\n{trace}" for r, (name, text, trace) in failed.items()]
            raise RankError("\n".join([*texts, f"no answer from ranks {missing}" if missing else ""]))
        return [results[r][1] for r in range(world_size)]


_pool: Pool | None = None


def run_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    timeout: float = 60.0,
    return_errors: bool = False,
    **kwargs: Any,
) -> list:
    """Call a top-level function on every rank of a fresh gloo world; return what each rank returned.

    timeout: seconds, for the call and for each collective. With ``return_errors`` the result of a rank
    is (True, value) or (False, (exception name, message, traceback)) instead of a RankError here.
    """
    global _pool
    if _pool is None:
        _pool = Pool()
        atexit.register(_pool.kill)
    return _pool.run(world_size, function, args, kwargs, timeout, return_errors)
