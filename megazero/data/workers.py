"""Processes that make tokens of records while a run trains. No torch: they start in a second."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from multiprocessing.connection import wait
from queue import SimpleQueue

from megazero.data.records import Encode, Ids, Mask, Record


def encode_all(encode: Encode, records: Sequence[Record]) -> list[tuple[Ids, Mask] | str]:
    """Return the tokens of each record, or what is wrong with it."""

    def one(record: Record) -> tuple[Ids, Mask] | str:
        try:
            return encode(record)
        except ValueError as error:
            return f"{error}"

    return [one(record) for record in records]


def _end_with_parent() -> None:
    """End this process when the one that started it is killed, which tells it nothing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


class Workers:
    """``count`` processes that encode, and threads that fetch for them. Without any, who needs a text makes it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._tasks: SimpleQueue[tuple[Future[None], Callable[[], None]]] = SimpleQueue()

    def begin(self, task: Callable[[], None]) -> Future[None]:
        """Run a task in a thread that ends with the process, though it waits for a store."""
        future: Future[None] = Future()
        self._tasks.put((future, task))
        assert self._threads
        return future

    @cached_property
    def _threads(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(4 * self.count)]
        for thread in threads:
            thread.start()
        return threads

    def _serve(self) -> None:
        while True:
            future, task = self._tasks.get()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

    @cached_property
    def _processes(self) -> ProcessPoolExecutor:
        # spawned, not forked: tokenizers keep threads that do not survive a fork
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self.count, context, initializer=_end_with_parent)

    def encode(self, encode: Encode, records: Sequence[Record]) -> list[tuple[Ids, Mask] | str]:
        if not self.count:
            return encode_all(encode, records)
        try:
            return self._processes.submit(encode_all, encode, records).result()
        except BrokenProcessPool:
            raise ValueError("a worker process died (out of memory?); the same command continues") from None
