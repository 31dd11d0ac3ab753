"""Hangs of every kind in a training of three ranks: the culprit is named, and every rank ends, that one included.

    pytest -m slow -s tests/dist/failures/test_hangs.py

It prints how long after the limit each was named, and all had ended.

Always run are one of these, and one that is stopped, one in a loop and a stage that stalls: test_failing_ranks.py,
test_watchdog.py, tests/dist/pipeline/test_failures.py. A link that is cut is in tests/netlab/test_hangs.py.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from megazero.log.exit_status import ExitStatus
from megazero.models import Decoder
from megazero.pp.links import Links
from megazero.train.data import feeding
from tests.dist.failures.test_failing_ranks import LONG, errors, iterations
from tests.dist.runs import Processes

LIMIT, CALLS = 6.0, 8  # seconds; what is called so often hangs
TRAINING = {**LONG, "global_batch_size": 3, "distributed_timeout_minutes": LIMIT / 60, "lr_warmup_iters": 0}
STAGES = {**TRAINING, "global_batch_size": 6, "pipeline_model_parallel_size": 3, "num_layers": 3}
PTRACE_ATTACH = 16
BUSY = "not in a collective but at "


def at_call(owner: Any, name: str, began: Path, action: Callable[[], Any]) -> None:
    """Replace a method by one that does something else at its CALLS-th call, of which ``began`` keeps the time."""
    call, left = getattr(owner, name), [CALLS]

    def counted(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            began.touch()
            return action()
        return call(*arguments, **options)

    setattr(owner, name, counted)


def endless() -> None:
    while True:
        pass


def in_data(began: Path, rank: int) -> None:
    fifo = began.with_name("fifo")
    if rank == 1:
        os.mkfifo(fifo)
        at_call(feeding.Batches, "next_step", began, fifo.read_bytes)


def in_a_loop(began: Path, rank: int) -> None:
    if rank == 2:
        at_call(Decoder, "run_stage", began, endless)


def sends_nothing(began: Path, rank: int) -> None:
    """The middle stage leaves a message out and goes on."""
    if rank == 1:
        at_call(Links, "send", began, lambda: None)


def hold(pid: int) -> None:
    """Attach to a process as a debugger does, which stops it, until it is killed, and reap it before its parent.

    It is held while it waits: a thread that is stopped with the interpreter's lock would silence the others, too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    while Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass
    if libc.ptrace(PTRACE_ATTACH, pid, 0, 0) != 0:
        os._exit(ctypes.get_errno())
    while os.WIFSTOPPED(os.waitpid(pid, 0x40000000)[1]):  # __WALL: it is no child
        pass


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def trace(pid: int) -> None:
    debugger = get_context("fork").Process(target=hold, args=(pid,), daemon=True)
    debugger.start()
    time.sleep(1)
    if not debugger.is_alive():
        pytest.skip(f"ptrace is not allowed ({os.strerror(debugger.exitcode or 0)})")


# name -> (the rank, what it or the test does, the run, what is said of it)
KINDS: dict[str, tuple[int, Callable[..., None], dict[str, Any], str]] = {
    "stopped, first rank": (0, stop, TRAINING, "which holds the store: it is stopped or lost"),
    "stopped, middle rank": (1, stop, TRAINING, "no answer, so its process is stopped or lost"),
    "stopped, last rank": (2, stop, TRAINING, "no answer, so its process is stopped or lost"),
    "held by ptrace": (1, trace, TRAINING, "where it is held, as by a debugger"),
    "reads a FIFO nobody writes": (1, in_data, TRAINING, BUSY),
    "endless loop": (2, in_a_loop, TRAINING, BUSY),
    "a stage never sends": (1, sends_nothing, STAGES, "it waits, too"),
}


ALWAYS = "a stage never sends"


@pytest.mark.parametrize(
    "kind", [ALWAYS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != ALWAYS)]
)
def test_a_hang_is_named_and_all_end(tmp_path: Path, kind: str) -> None:
    victim, act, values, words = KINDS[kind]
    began = tmp_path / "began"
    outside = act in (stop, trace)
    ranks = Processes.start(
        3, {**values, "log_dir": str(tmp_path / "logs")}, tmp_path, None if outside else partial(act, began)
    )
    if outside:
        ranks.wait_for(lambda: iterations(tmp_path / "logs") > 2)
        began.touch()
        act(ranks.ranks[victim].pid)
    codes, ended = ranks.statuses(), time.time()
    texts = ranks.texts()
    assert codes[victim] in (-signal.SIGKILL, ExitStatus.RANK_LOST), texts
    assert [codes[rank] for rank in range(3) if rank != victim] == [ExitStatus.RANK_LOST] * 2, texts
    said = errors("\n".join(texts))
    assert said and all(f"missing: rank {victim} " in line and words in line for _, line in said), texts
    late = [log.stat().st_mtime for log, text in zip(ranks.logs, texts, strict=True) if "missing: " in text]
    named, all_ended = (at - began.stat().st_mtime - LIMIT for at in (min(late), ended))
    print(f"\n| {kind} | {named:.1f} s | {all_ended:.1f} s |")
