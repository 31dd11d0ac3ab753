"""The watchdog names the ranks that hang: every rank sends heartbeats, and when nothing moves, the missing are found.

Every second or more a thread looks at where the main thread is, which costs the main thread nothing, and writes a
heartbeat to the store, through its own connection. When a rank has not moved for the time limit, one line names the
missing ranks: those without heartbeats (stopped, frozen, lost, or cut off) and those that compute or read while
others wait for them in a collective. All that can still answer write their stacks and torch's record of their last
collectives to files, and end. A rank that is stopped is the launcher's to end: srun, torchrun and --nproc-per-node
send it SIGKILL when others have failed.

The store answers anyone, so what is read from it only says which ranks are silent and that stacks are wanted; files
have names of a fixed form.

``touch LOG_DIR/dump_stacks`` asks for the same files from a run that goes on: see ``REQUEST``.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from megazero.mesh import rendezvous
from megazero.mesh.launch import Launch
from megazero.mesh.sealed import SealedStore, Store
from megazero.mesh.waiting import waiting
from megazero.ops.heartbeat import Heartbeat, Where, in_words, innermost, missing_ranks, read

INTERVAL = 1.0  # seconds between heartbeats of up to RANKS_PER_SECOND ranks; more ranks send fewer
RANKS_PER_SECOND = 500  # that one store answers without being felt (it takes some 10,000 operations a second)
REQUEST = "dump_stacks"  # in LOG_DIR: the first rank removes it, and all ranks write into LOG_DIR/stacks/TIME
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d")
ANSWER = 1.5  # seconds for the store, and for ranks that are asked for their stacks, to answer


class Limit(NamedTuple):
    """How long a rank may stand still, in seconds, and the flag that sets it."""

    seconds: float
    flag: str


class Watched(Protocol):
    """What the watchdog asks of its rank, from its own thread."""

    def where(self) -> Where:
        """Return what the main thread is doing."""

    def progress(self) -> object:
        """Return a value that changes whenever the main thread moves on."""

    def limit(self) -> Limit:
        """Return how long ``progress`` may stay the same before this is a hang."""

    def report(self, line: str) -> None:
        """Print and record who is missing. The process goes on."""

    def end(self) -> None:
        """End the process."""


class Watchdog:
    """Sends one rank's heartbeats from ``start()`` to ``stop()``, and ends the process when the ranks hang.

    launch: this rank's. log_dir: stacks are written into its folder "hang", or "stacks" on request. secret: of the
    job (``job_secret``).
    """

    def __init__(
        self, store: Store, launch: Launch, watched: Watched, log_dir: Path, secret: bytes = b""
    ) -> None:
        self.calls, self.rank, self.world_size = _Timed(store), launch.rank, launch.world_size
        self.store = SealedStore(cast(Store, self.calls), secret)
        self.watched, self.log_dir, self.folder = watched, log_dir, log_dir / "hang"
        self.interval = interval_s(launch.world_size)
        self.error = ""  # of the collective or the communicator that failed on this rank
        self._main = threading.main_thread().ident or 0
        self._host = launch.host
        self._stopped, self._wanted = threading.Event(), threading.Event()
        self._answering = self._reported = False
        self._seen: object = None  # of ``progress``
        self._count, self._since = 0, time.monotonic()
        self._requests = 0  # for stacks, answered
        self._requested = threading.Event()
        # The store does not answer, or files hang, as ranks do: threads of their own look after them.
        runs = [self._mind_store, self._run, *([self._mind_requests] if self.rank == 0 else [])]
        self._threads = [threading.Thread(target=run, daemon=True, name="watchdog") for run in runs]

    def start(self) -> None:
        minds_store, *others = self._threads
        minds_store.start()
        with suppress(RuntimeError):  # the store's own errors
            self._send()  # a rank that stops from here on is known
        for thread in others:
            thread.start()

    def stop(self) -> None:
        """End the threads. This rank is silent from then on, so call it when all ranks have done their work."""
        self._stopped.set()
        self._wanted.set()
        for thread in self._threads:
            thread.join(ANSWER)

    def find_missing(self, error: str) -> None:
        """Find out who is missing after a collective failed on this rank, and end. Does not return."""
        if not self._answering:  # else it failed because ranks are leaving
            self.error = error
        self._wanted.set()
        for thread in self._threads:
            thread.join()

    # -- the threads ---------------------------------------------------------------------------------------

    @property
    def _late(self) -> bool:
        return bool(self.error) or time.monotonic() - self._since > self.watched.limit().seconds

    @property
    def _why(self) -> str:
        seconds, flag = self.watched.limit()
        return self.error or f"nothing moved for {seconds:g} s ({flag})"

    def _run(self) -> None:
        while not self._stopped.is_set():
            seen = self.watched.progress()
            if seen != self._seen:
                self._seen, self._since = seen, time.monotonic()
            self.error = self.error or failed_communicator()
            try:
                self._send()
                asked = bool(self.store.get(["hang"]))
                if asked or self._late:
                    own = f"{self.rank}"
                    self._answer(first=not asked and self.store.claim("hang", own) == own)
                self._answer_request()
            except RuntimeError as error:  # the store's own errors
                if self._late:
                    self._leave_alone(str(error))
            self._wanted.wait(self.interval)

    def _mind_store(self) -> None:
        """The store's calls have no time limit of their own, and it may be in the process that hangs."""
        while not self._stopped.wait(ANSWER / 4):
            if self.calls.seconds > ANSWER and self._late:
                self._leave_alone(f"no answer for {self.calls.seconds:.1f} s")

    def _mind_requests(self) -> None:
        request = self.log_dir / REQUEST
        while not self._stopped.wait(self.interval):
            with suppress(OSError):
                if request.exists():
                    request.unlink()  # first: what cannot be removed would be a request for ever
                    self._requested.set()

    def _answer_request(self) -> None:
        """Write this rank's stack if all ranks were asked for theirs. The run continues."""
        key = f"stacks/{self._requests}"
        if self._requested.is_set():
            self._requested.clear()
            self.store.set(key, time.strftime("%Y-%m-%dT%H-%M-%S"))
        if (at := self.store.get([key]).get(key)) is not None:
            self._requests += 1
            if TIME.fullmatch(at):
                self._write_stack(self.log_dir / "stacks" / at)

    def _send(self) -> None:
        self._count += 1
        heartbeat = {
            "count": self._count,
            "host": self._host,
            "pid": os.getpid(),
            "since": time.monotonic() - self._since,
            "waiting": bool(self.error or waiting),
            "where": dict(self.watched.where()),
            "stack": innermost(self._frames()[-1]),
        }
        self.store.set(f"heartbeat/{self.rank}", json.dumps(heartbeat))

    def _frames(self) -> list[FrameType | None]:
        """Return the innermost frames of the main thread and of those that Python did not start: in a backward on
        CUDA autograd's, which runs the hooks. They are only looked at: no source is read.
        """
        frames = sys._current_frames()
        pythons = {
            each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)
        }
        return [frames.get(self._main), *(frame for ident, frame in frames.items() if ident not in pythons)]

    def _answer(self, first: bool) -> None:
        """Write this rank's stack. The first rank to notice finds the missing; the others wait until it has.

        It reports before the others know: a launcher that sees them end may end the first.
        """
        self._answering = True
        self._write_stack(self.folder)
        if first:
            self._report(self._judge())
            self.store.set("reported", "")
            self._leave()
        deadline = time.monotonic() + self.interval + 4 * ANSWER
        while not self.store.get(["reported"]):
            if time.monotonic() > deadline:
                raise RuntimeError("the rank that noticed first fell silent")
            self._send()
            time.sleep(self.interval / 4)
        self._leave()

    def _judge(self) -> str:
        """Return who is missing, as a line. Waits an interval, in which the silent send nothing."""
        ranks = range(self.world_size)
        before = self._heartbeats(ranks)
        time.sleep(self.interval + ANSWER)
        self._send()
        after = self._heartbeats(ranks)
        silent = [beat for rank, beat in after.items() if rank in before and beat.count == before[rank].count]
        known = [beat for beat in after.values() if beat not in silent]
        busy = [beat for beat in known if not beat.waiting]
        never = sorted(set(ranks) - after.keys())
        words = missing_ranks(silent, busy, never, known)
        return self._line(f"{words}. Stacks: {self.folder}")

    def _heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        keys = {f"heartbeat/{rank}": rank for rank in ranks}
        beats = {keys[key]: read(text, keys[key]) for key, text in self.store.get(keys).items()}
        return {rank: beat for rank, beat in beats.items() if beat is not None}

    def _line(self, missing: str) -> str:
        """Return what happened, then who is missing, and only then what else a failed collective says."""
        what, _, more = self._why.partition(". ")
        return f"{what}; {missing}" + (f". {more}" if more else "")

    def _leave_alone(self, symptom: str) -> None:
        """Write this rank's stack and end without the others: the store, and so rank 0, does not answer."""
        self._write_stack(self.folder)
        line = self._line(
            "missing: rank 0 (or its launcher), which holds the store: it is stopped or lost, or the "
            f"link to it is ({symptom.splitlines()[0][:120]}), says rank {self.rank} on {self._host}, in "
            f"{in_words(self.watched.where())}"
        )
        self._report(line)
        self._leave()

    def _write_stack(self, folder: Path) -> None:
        text = "".join(line for frame in self._frames() for line in traceback.format_stack(frame))

        def write() -> None:
            with suppress(OSError):  # a full log disk: the line that names the ranks is printed all the same
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"rank_{self.rank}.txt").write_text(f"{in_words(self.watched.where())}\n{text}")
                (folder / f"nccl_trace_rank_{self.rank}").write_bytes(last_collectives())

        _try(write)

    def _report(self, line: str) -> None:
        self._reported = True
        _try(lambda: self.watched.report(line))

    def _leave(self) -> None:
        if self.rank == 0:
            time.sleep(self.interval)  # it may hold the store where the others are about to read
        if self.error and not self._reported:
            self._report(self.error)  # the error of a collective says what it waited for
        self.watched.end()


def _try(write: Callable[[], None]) -> None:
    """Call ``write`` in a thread that is left to itself after ``ANSWER`` seconds: files may hang as ranks do."""
    thread = threading.Thread(target=write, daemon=True, name="watchdog")
    thread.start()
    thread.join(ANSWER)


class _Timed:
    """A store that measures its present call: ``seconds`` since it began, or 0 between calls."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._began = time.monotonic()
            try:
                return getattr(self._store, name)(*arguments)
            finally:
                self._began = None

        return call


def connect(launch: Launch, timeout_s: float) -> Store:
    """Return a second connection to the store at which the ranks met: the main thread may wait in the first."""
    store = rendezvous.connect(launch, timeout_s)
    store.set_timeout(timedelta(seconds=ANSWER))
    return dist.PrefixStore("watchdog", store)


def failed_communicator() -> str:
    """Return what NCCL reported of a communicator of this rank, in words; '' as long as all are well.

    A lost rank ends collectives over NCCL with no Python error. torch looks every 0.1 s for what NCCL reports, waits
    60 s for debuggers, and ends the process (SIGABRT, TORCH_NCCL_ASYNC_ERROR_HANDLING=3, its default) without saying
    which rank is lost. In that minute the watchdog can. Its other modes would let the main thread compute on with
    what an aborted collective left. Read in torch's source; not measured on a cluster.
    """
    if not torch.cuda.is_initialized():
        return ""
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # a group without NCCL
            ask = getattr(group._get_backend(torch.device("cuda")), "get_error", None)
            if ask is not None and (name := ask().name) != "SUCCESS":
                return f"NCCL reports {name} of a communicator of this rank"
    return ""


def last_collectives() -> bytes:
    """Return torch's flight record: the last collectives that this rank issued and their state, a pickled dictionary.

    ``torchfrtrace LOG_DIR/hang`` compares those of all ranks. torch keeps the last 2,000 (TORCH_FR_BUFFER_SIZE).
    """
    # NCCL has a recorder of its own; the other is gloo's.
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None) if torch.cuda.is_initialized() else None
    return (dump or _distributed_c10d._dump_fr_trace)()  # type: ignore[attr-defined] # not in torch's stubs


def judging_s(world_size: int) -> float:
    """Return the seconds that the watchdog may need, after the limit, to name the missing."""
    return 2 * interval_s(world_size) + 5 * ANSWER


def interval_s(world_size: int) -> float:
    """Return the seconds between two heartbeats of a rank."""
    return max(INTERVAL, world_size / RANKS_PER_SECOND)
