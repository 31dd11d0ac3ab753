"""The watchdog of one rank, with other ranks' heartbeats put into its store by hand.

tests/dist/failures/test_hangs.py has ranks that hang.
"""

from __future__ import annotations

import _thread
import json
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megazero.comm.timing import Waits
from megazero.mesh.launch import Launch
from megazero.mesh.sealed import SealedStore
from megazero.mesh.waiting import waiting
from megazero.ops import watchdog
from megazero.ops.heartbeat import innermost
from megazero.ops.watchdog import Limit, Watchdog
from megazero.zero.scalars import StepScalars


class Rank:
    """What the watchdog asks of rank 0. It moves on; ``lines`` are its reports."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ended = threading.Event()
        self.count = iter(range(10**9))

    def where(self) -> dict[str, str]:
        return {"phase": "iteration 7"}

    def progress(self) -> int:
        return next(self.count)

    def limit(self) -> Limit:
        return Limit(600.0, "--limit")

    def report(self, line: str) -> None:
        self.lines.append(line)

    def end(self) -> None:
        self.ended.set()
        threading.Event().wait()  # the thread: the process goes on here


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A process group whose NCCL can be made to report."""
    backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name="SUCCESS"))
    (group := SimpleNamespace(backend=backend))._get_backend = lambda device: backend
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=[group]))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return group


def test_who_is_lost_is_named_when_nccl_reports_an_error(monkeypatch, tmp_path: Path, group) -> None:
    """There is no Python error: torch would end the process a minute later, with SIGABRT."""
    monkeypatch.setattr(watchdog, "ANSWER", 0.2)
    monkeypatch.setattr(watchdog, "INTERVAL", 0.1)
    monkeypatch.setattr(watchdog, "last_collectives", lambda: b"")
    store, rank = dist.HashStore(), Rank()
    beat = {
        "count": 3,
        "host": "gpu01",
        "pid": 10**7,
        "since": 0.0,
        "waiting": False,
        "stack": "x.py:1 f",
    }
    SealedStore(store, b"").set("heartbeat/1", json.dumps({**beat, "where": {"phase": "iteration 7"}}))
    watching = Watchdog(store, Launch(0, 2, 0, 2), rank, tmp_path)
    watching.start()
    assert not rank.ended.wait(0.5) and rank.lines == []
    group.backend.get_error = lambda: SimpleNamespace(name="COMM_ERROR")
    assert rank.ended.wait(20)
    watching.stop()
    (line,) = rank.lines
    assert line.startswith("NCCL reports COMM_ERROR of a communicator of this rank; missing: rank 1 on gpu01")
    assert (
        "no answer, so its process is stopped or lost" in line and (tmp_path / "hang" / "rank_0.txt").exists()
    )


def stand(file: str, lock: threading.Lock) -> None:
    """Wait for the lock in code of this file."""
    exec(compile("lock.acquire()", file, "exec"), {"lock": lock})


def test_a_backward_on_cuda_is_shown_where_autograds_thread_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the hooks of a backward, which gather and reduce, run in a thread that Python did not start."""
    every, others = sys._current_frames, {*sys._current_frames()}  # a test's worker has such threads, too
    monkeypatch.setattr(
        sys, "_current_frames", lambda: {i: each for i, each in every().items() if i not in others}
    )
    (lock := threading.Lock()).acquire()
    main = threading.Thread(target=stand, args=("/x/backward.py", lock))
    main.start()
    watching = Watchdog(dist.HashStore(), Launch(0, 2, 0, 2), Rank(), tmp_path)
    watching._main = main.ident or 0
    for number, file in enumerate(("backward.py", "hook.py"), 1):
        if number > 1:
            _thread.start_new_thread(stand, (f"/x/{file}", lock))
        while sum("<module>" in innermost(each) for each in sys._current_frames().values()) < number:
            time.sleep(0.01)
        assert innermost(watching._frames()[-1]).startswith(file)
    watching._write_stack(tmp_path)
    assert all(file in (tmp_path / "rank_0.txt").read_text() for file in ("backward.py", "hook.py"))
    for _ in range(2):
        lock.release()
        time.sleep(0.05)
    main.join(20)


def test_the_heartbeat_says_whether_this_rank_waits(tmp_path: Path) -> None:
    watching = Watchdog(dist.HashStore(), Launch(0, 2, 0, 2), Rank(), tmp_path)

    def waits() -> bool:
        watching._send()
        return watching._heartbeats([0])[0].waiting

    assert not waits()
    with waiting:
        with Waits(timed=lambda name: nullcontext())("exposed_ep_inter"):
            assert waits()
        assert waits()
    with pytest.raises(RuntimeError), waiting:
        raise RuntimeError("the collective's")
    assert not waits()
    watching.error = "a collective failed"
    assert waits()


def test_on_cuda_the_host_waits_where_it_reads_the_steps_numbers() -> None:
    """There collectives are only enqueued: the read is where the host stands in a hang."""
    scalars = StepScalars.__new__(StepScalars)
    seen: list[bool] = []
    scalars.received = SimpleNamespace(tolist=lambda: seen.append(bool(waiting)) or [])  # type: ignore[assignment]
    scalars.parts, scalars.places = (), []
    scalars.read()
    assert seen == [True] and not waiting
