"""Saves a checkpoint: parts that are each rank's own work, with collectives between them.

``saving`` is a generator. The parts it yields use no collective, and a thread runs each; between the yields it is
collective. ``save`` waits for each part. An asynchronous save (train/state/saver.py) resumes the generator at the end
of a step, when every rank has finished its part. So there is one way to save, no thread uses a process group, and no
second set of groups is needed.

Everything that touches the disk is in a part, so a disk that hangs blocks a thread, never a collective. If the disk
refuses a write, the save is tried again (``Retry``) from the same tensors, or the same copy of them, into a new
folder. A failure on one rank fails the attempt on all.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import torch as safetensors
from torch.distributed.checkpoint.metadata import Metadata

from megazero.checkpoint import directory
from megazero.checkpoint.directory import Retention
from megazero.checkpoint.errors import (
    CheckpointError,
    SaveError,
    agree,
    agree_local,
    error_number,
    first_bytes,
)
from megazero.checkpoint.image import Staging
from megazero.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    FileEntry,
    Manifest,
    is_plain_name,
    to_json,
    write_file,
)
from megazero.checkpoint.metadata import METADATA_FILE
from megazero.checkpoint.planning import arranged, description, dtypes_by_kind, own_chunks
from megazero.checkpoint.reading import rank_file
from megazero.checkpoint.records import SliceRecord
from megazero.checkpoint.writer import Writer
from megazero.files import appears, encodable
from megazero.mesh.objects import gather_to_first
from megazero.mesh.waiting import waiting

logger = logging.getLogger(__name__)

Tick = Callable[[], None]  # called whenever a part makes progress
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before the next attempt; doubled each time
LOOK_S = 1.0  # between two looks at the parts of all ranks


@dataclass(frozen=True)
class Snapshot:
    """What one rank saves. ``step`` is the training step and names the directory. ``records`` are this rank's
    slices. ``rank_tensors`` are small tensors of this rank alone (random generators). ``state``, ``layout`` and
    ``configuration`` are plain JSON values, the same on every rank (the first rank's are stored). ``files`` are small
    files by name that go with them, of the first rank (``read_file`` gives them back)."""

    step: int
    records: Sequence[SliceRecord]
    state: Mapping[str, Any] = field(default_factory=dict)
    rank_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"a snapshot's step is {self.step}; steps count from 0")
        for name in self.files:
            if not is_plain_name(name) or name.startswith(".") or name in (MANIFEST_FILE, STATE_FILE):
                raise ValueError(f"a snapshot's file cannot have the name {name!r}")


class Part:
    """One rank's share of a save, run on a thread. It reads and writes files and uses no collective.

    pause: the part only waits, between two attempts.
    """

    def __init__(self, what: str, action: Callable[[Tick], Any], pause: bool = False) -> None:
        self.what, self._action, self.pause = what, action, pause
        self._value: Any = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._moved = time.monotonic()

    def start(self) -> None:
        """Start the thread. It is a daemon, so the process can end even if a disk hangs forever."""
        self._tick()
        threading.Thread(target=self._run, name="save", daemon=True).start()

    def _run(self) -> None:
        """Run the action. Its error is raised by ``result``."""
        try:
            self._value = self._action(self._tick)
        except Exception as error:
            self._error = error
        self._done.set()

    def _tick(self) -> None:
        self._moved = time.monotonic()

    def ended(self, limit_s: float) -> bool:
        """Return whether it has ended: done, or without progress for ``limit_s`` seconds, which is an error."""
        still = time.monotonic() - self._moved
        if not self._done.is_set() and self._error is None and still > limit_s:
            self._error = TimeoutError(
                errno.ETIMEDOUT,
                f"{self.what} has made no progress for {still:.0f} s: the disk or the link to it hangs",
            )
        return self._done.is_set() or self._error is not None

    def returned(self, seconds: float) -> bool:
        """Wait at most so many seconds for the thread to end. Return whether it has."""
        return self._done.wait(seconds)

    def wait_for_all(self, group: dist.ProcessGroup | None, limit_s: float) -> None:
        """Return when every rank's part has ended. Collective, again and again: no message waits for a slow disk."""
        while True:
            self._done.wait(min(LOOK_S, limit_s / 4))
            ended = torch.tensor(float(self.ended(limit_s)))
            if group is not None:
                with waiting:
                    dist.all_reduce(ended, dist.ReduceOp.MIN, group=group)
            if ended:
                return

    def result(self) -> Any:
        """Return what the action returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value


class Retry:
    """Says how often a save that the storage refused is tried again: for ``limit_s`` seconds from the first failure.

    The first rank's clock counts. tell: is called with a sentence about each failure. part: this rank's last part. It
    may hang in a call that returns later; nothing is tried until then.
    """

    def __init__(self, limit_s: float = 0.0, tell: Callable[[str], None] = lambda text: None) -> None:
        self.limit_s, self.tell = limit_s, tell
        self.failures, self._until, self.pause_s = 0, 0.0, 0.0
        self.part: Part | None = None

    def again(self) -> float | None:
        """Return the seconds to wait after a failure, or None if the time is over."""
        now = time.monotonic()
        if not self.failures:
            self._until = now + self.limit_s
        pause = min(FIRST_PAUSE_S * 2 ** min(self.failures, 10), LONGEST_PAUSE_S)
        self.failures += 1
        left = self._until - now
        return min(pause, left) if left > 0 else None

    def waiting(self) -> Part:
        """Return the part that waits before the next attempt: the pause, and until a part that hangs returns."""
        return Part("waiting", self._wait, pause=True)

    def _wait(self, tick: Tick) -> None:
        end = time.monotonic() + self.pause_s
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left))
            tick()
        while self.part is not None and not self.part.returned(LOOK_S):
            tick()
            if time.monotonic() > self._until:
                self.part.result()


def save(
    root: str | os.PathLike,
    snapshot: Snapshot,
    *,
    group: dist.ProcessGroup | None = None,
    limit_s: float = inf,
    **how: Any,
) -> Path:
    """Run ``saving``, which takes ``how``, to its end. No progress for ``limit_s`` seconds is an error."""
    return completed(saving(root, snapshot, group=group, **how), group, limit_s)


def completed(
    parts: Generator[Part, None, Path], group: dist.ProcessGroup | None, limit_s: float = inf
) -> Path:
    """Run all parts of a save and return its path. Collective."""
    while True:
        try:
            part = next(parts)
        except StopIteration as end:
            return end.value
        part.start()
        part.wait_for_all(group, limit_s)


def saving(
    root: str | os.PathLike,
    snapshot: Snapshot,
    *,
    group: dist.ProcessGroup | None = None,
    retention: Retention | None = None,
    overwrite: bool = False,
    staging: Staging | None = None,
    guard: Callable[[], None] = lambda: None,
    retry: Retry | None = None,
) -> Generator[Part, None, Path]:
    """Write ``root/iter_<step>`` from every rank's snapshot and return its path.

    It yields this rank's parts: start each, and resume when those of all ranks have ended.

    An error on one rank (a full disk, say) raises CheckpointError on every rank. After an error or a kill the older
    checkpoints are as they were. An existing directory of the same step is kept and is an error, unless
    ``overwrite``. ``root`` must be the same directory for every rank, and no other job may save into it. ``guard`` is
    called on the first rank before it changes the root; it ends the process if another job owns the root.
    With ``staging`` the snapshot is copied there before the first part, and may change from then on. Without, its
    tensors must stay as they are until the end. If the storage refuses a write, the save is tried again as ``retry``
    says; then SaveError is raised.
    """
    task, retry = _Task(Path(root), snapshot, group, overwrite, guard), retry or Retry()
    task.plan()
    if staging is not None:
        agree(group, task.doing, partial(task.writer.take_image, staging))
    elif torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the thread that reads the tensors has a stream of its own
    while True:
        try:
            if retry.failures:  # of this save, or of one whose place it takes
                yield (part := retry.waiting())
                agree(group, task.doing, part.result)
            for part in task.attempt():
                if retry.part is None or retry.part.returned(0):
                    retry.part = part
                yield part
            break
        except CheckpointError as error:
            if error_number(error) is None:
                raise
            pause_s = agree(group, task.doing, retry.again)[0]
            if pause_s is None:
                tried = f". It was tried {retry.failures} times" if retry.failures > 1 else ""
                raise SaveError(f"{error}{tried}") from error
            retry.pause_s = pause_s
            retry.tell(f"{error}. It is tried again in {pause_s:.0f} s")
    retry.failures = 0
    yield (part := task.of_first(f"deleting in '{root}'", partial(task.retain, retention or Retention())))
    try:
        agree(group, f"checkpoint '{task.final}' is saved, but older ones cannot be deleted", part.result)
    except CheckpointError as error:  # the save itself has succeeded; the next one tries again
        if task.rank == 0:
            logger.warning("%s", error)
    return task.final


@dataclass
class _Task:
    """A save, of one or more attempts.

    writer: of this rank's slices. small: the files that it writes besides them. description: torch's, of all tensors,
    and kinds: the manifest's, on the first rank.
    """

    root: Path
    snapshot: Snapshot
    group: dist.ProcessGroup | None
    overwrite: bool
    guard: Callable[[], None]
    writer: Writer = field(init=False)
    small: Mapping[str, bytes] = field(init=False)
    description: bytes = b""
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank, self.world_size = 0, 1
        if self.group is not None:
            self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.final = self.root / directory.checkpoint_name(self.snapshot.step)
        self.doing = f"checkpoint '{self.final}' not saved, older ones are unharmed"

    def plan(self) -> None:
        """Arrange what each rank writes. Collective."""
        chunks = agree_local(self.group, self.doing, partial(own_chunks, self.snapshot.records))
        rows = self._gathered([chunk.row for chunk in chunks])
        described = Metadata({})

        def arrange() -> bytes:
            nonlocal described
            described, left_out = arranged(rows)
            self.kinds = dtypes_by_kind(described)
            return json.dumps(left_out).encode()

        left_out = set(json.loads(first_bytes(self.group, self.doing, arrange))[self.rank])
        own = [chunk for i, chunk in enumerate(chunks) if i not in left_out]
        self.writer = agree_local(self.group, self.doing, partial(Writer, self.rank, own))
        places = self._gathered(self.writer.rows)

        def describe() -> dict[str, bytes]:
            if self.rank == 0:
                self.description = description(described, places)
            return _small_files(self.snapshot, self.rank)

        self.small = agree_local(self.group, self.doing, describe)

    def _gathered(self, rows: list[list[Any]]) -> list[list[list[Any]]]:
        """Return all ranks' rows on the first rank. Collective."""
        return [rows] if self.group is None else gather_to_first(rows, group=self.group)

    def of_first(self, what: str, action: Callable[[], Any]) -> Part:
        """Return a part in which only the first rank acts."""
        return Part(what, lambda tick: action() if self.rank == 0 else None)

    def attempt(self) -> Generator[Part, None, None]:
        """Write everything into a new folder and make it the checkpoint. Collective between the parts."""
        yield (part := self.of_first(f"preparing '{self.root}'", self._prepare))
        temporary: Path = agree(self.group, self.doing, part.result)[0]
        try:
            yield (part := Part(f"writing '{temporary}'", partial(self._write, temporary)))
            written = agree(self.group, self.doing, part.result, FileEntry)
            completing = partial(self._commit, temporary, written)
            yield (part := Part(f"completing '{self.final}'", completing))
            agree(self.group, self.doing, part.result)
        except CheckpointError as error:
            if not isinstance(error.__cause__, TimeoutError):  # else a rank may still be writing there
                removing = partial(shutil.rmtree, temporary, ignore_errors=True)
                yield self.of_first(f"removing '{temporary}'", removing)
            raise

    def _prepare(self) -> Path:
        self.guard()
        return directory.prepare(self.root, self.snapshot.step, self.overwrite)

    def _write(self, temporary: Path, tick: Tick) -> dict[str, FileEntry]:
        appears(temporary.is_dir, self.root, tick)  # the first rank made it, on another node
        written = {name: write_file(temporary / name, data) for name, data in self.small.items()}
        return written | self.writer.write_tensors(temporary, tick)

    def _commit(self, temporary: Path, written: Sequence[Mapping[str, FileEntry]], tick: Tick) -> None:
        if self.rank != 0:
            return
        files = {name: entry for entries in written for name, entry in entries.items()}
        files[METADATA_FILE] = write_file(temporary / METADATA_FILE, self.description)
        manifest = Manifest(
            step=self.snapshot.step,
            serial=0,  # given by directory.commit
            world_size=self.world_size,
            kinds=self.kinds,
            layout=to_json(self.snapshot.layout, "layout"),
            configuration=to_json(self.snapshot.configuration, "configuration"),
            files=files,
        )
        self.guard()
        directory.commit(temporary, self.final, manifest, tick)

    def retain(self, rule: Retention) -> None:
        self.guard()
        directory.retain(self.root, self.final, rule)


def _small_files(snapshot: Snapshot, rank: int) -> dict[str, bytes]:
    """Return what the rank writes besides its slices, by the files' names."""
    files: dict[str, bytes] = {}
    if rank == 0:
        # An fp16 run that saves after an overflow has a loss of NaN, which is no JSON.
        state = json.dumps(encodable(to_json(snapshot.state, "state")), indent=1, allow_nan=False)
        files = {**snapshot.files, STATE_FILE: state.encode()}
    if snapshot.rank_tensors:
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in snapshot.rank_tensors.items()}
        files[rank_file(rank)] = safetensors.save(tensors)
    return files
