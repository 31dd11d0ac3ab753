"""Numbered trials. Each is a line of a file as soon as it is done, so the same command continues with the others."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.harness import Store

Row = dict[str, Any]  # trial: its number; problems: empty if all was right


def run_trials(
    trial: Callable[[int], Row],
    number: int,
    store: Store,
    done: Sequence[Row],
    seconds: float = math.inf,
    jobs: int = 1,
) -> list[Row]:
    """Run the first ``number`` trials but those in ``done``, and return the rows of all.

    seconds: no trial begins after these. jobs: trials at a time.
    """
    rows, until = list(done), time.monotonic() + seconds
    lock, over = threading.Lock(), threading.Event()
    missing = iter(sorted(set(range(number)) - {row["trial"] for row in rows}))

    def work() -> None:
        while time.monotonic() < until and not over.is_set():
            with lock:
                following = next(missing, None)
            if following is None:
                return
            start = time.monotonic()
            row = trial(following)
            took = time.monotonic() - start
            with lock:
                rows.append(row)
                store.append(row)
            print(f"trial {following}: {row['problems'] or 'right'} in {took:.1f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for each in [pool.submit(work) for _ in range(jobs)]:
                each.result()
        finally:
            over.set()  # after an error or an interrupt, no other trial begins
    return rows
