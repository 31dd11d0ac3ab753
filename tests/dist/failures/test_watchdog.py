"""Ranks that hang are named, with what they were at, and every rank ends, the one that hangs included."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megazero.log.exit_status import ExitStatus
from megazero.mesh.launch import Launch
from megazero.mesh.rendezvous import meet
from megazero.mesh.starter import free_port
from megazero.mesh.waiting import waiting
from megazero.ops.watchdog import INTERVAL, REQUEST, Limit, Watchdog, connect

WORLD, LIMIT, HANGS_AT = 3, 2.0, 5


def hang(kind: str, folder: Path) -> None:
    """Do what a rank does that never comes to its next collective."""
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "loop":
        while True:
            pass
    elif kind == "fifo":
        (folder / "fifo").read_bytes()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def rank_program(rank: int, port: int, victim: int, kind: str, folder: Path) -> None:
    sys.stderr = (folder / f"rank{rank}.log").open("w", buffering=1)
    at, came = [0], list[float]()
    limit, launch = timedelta(seconds=60), Launch(rank, WORLD, rank, WORLD, master_port=port)
    dist.init_process_group("gloo", store=meet(launch, 60), timeout=limit, world_size=WORLD, rank=rank)

    class Counting:
        def where(self) -> dict[str, str]:
            return {"phase": f"iteration {at[0]}"}

        def progress(self) -> int:
            return at[0]

        def limit(self) -> Limit:
            return Limit(LIMIT if came else 60.0, "--limit")

        def report(self, line: str) -> None:
            print(f"{time.time() - came[0] - LIMIT:.1f} s after the limit: {line}", file=sys.stderr)

        def end(self) -> None:
            os._exit(ExitStatus.RANK_LOST)

    watchdog = Watchdog(connect(launch, 60), launch, Counting(), folder)
    watchdog.start()
    try:
        for at[0] in range(1_000):
            if at[0] == HANGS_AT:
                while len(list(folder.glob("stacks/*/nccl_trace_rank_*"))) < WORLD:
                    time.sleep(INTERVAL / 10)  # a rank that is ended first answers no request
                time.sleep(2 * INTERVAL)  # all have been heard in this iteration
                came.append(time.time())
                if rank == victim:
                    hang(kind, folder)
            with waiting:
                dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        watchdog.find_missing(f"a collective failed: {error}")


SOME = [("loop", 0)]  # test_failing_ranks has a stopped one, in training
EVERY = [(kind, victim) for kind in ("stopped", "loop", "fifo", "killed") for victim in range(WORLD)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "victim"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in SOME)],
)
def test_a_rank_that_hangs_is_named_and_all_end(tmp_path: Path, kind: str, victim: int) -> None:
    """All kinds and ranks: pytest -m slow tests/dist/failures/test_watchdog.py."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / REQUEST).touch()
    context, port = get_context("forkserver"), free_port()
    context.set_forkserver_preload(["torch", "torch.distributed"])
    ranks = [
        context.Process(target=rank_program, args=(rank, port, victim, kind, tmp_path), daemon=True)
        for rank in range(WORLD)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    others = [rank.exitcode for i, rank in enumerate(ranks) if i != victim]
    assert others == [ExitStatus.RANK_LOST] * 2
    assert ranks[victim].exitcode in (-signal.SIGKILL, ExitStatus.RANK_LOST)
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(WORLD)]
    lines = [line for log in logs for line in log.splitlines() if "missing: " in line]
    assert lines, logs
    for line in lines:
        words = line.partition(": ")[2]
        assert f"missing: rank {victim} " in words and f"; rank {(victim + 1) % WORLD}" not in words, words
        if kind in ("loop", "fifo"):
            assert f"in iteration {HANGS_AT}: not in a collective but at" in words and "hang" in words
    assert not (tmp_path / REQUEST).exists()
    (on_request,) = (tmp_path / "stacks").iterdir()  # the run went on
    names = [
        f"{kind}{rank}{end}"
        for rank in range(WORLD)
        for kind, end in (("nccl_trace_rank_", ""), ("rank_", ".txt"))
    ]
    assert sorted(path.name for path in on_request.iterdir()) == sorted(names)
    for folder in (on_request, tmp_path / "hang"):
        waiting = f"rank_{(victim + 1) % WORLD}"
        assert "rank_program" in (folder / f"{waiting}.txt").read_text()
        record = pickle.loads((folder / f"nccl_trace_{waiting}").read_bytes())
        assert record["entries"][-1]["profiling_name"].endswith("all_reduce")
