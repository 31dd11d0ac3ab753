"""Saves a checkpoint: parts that are each rank's own work, with collectives between them.

``saving`` is a generator. The parts it yields use no collective, so any thread may run them; between the yields it is
collective. ``save`` runs each part at once. An asynchronous save (train/state/saver.py) gives the parts to a thread
and resumes the generator at the end of a step, when every rank has finished its part. So there is one way to save, no
thread uses a process group, and no second set of groups is needed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import torch as safetensors

from megazero.checkpoint import directory
from megazero.checkpoint.directory import Retention
from megazero.checkpoint.errors import CheckpointError, agree, agree_local, gather_to_first
from megazero.checkpoint.image import Staging
from megazero.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    FileEntry,
    Manifest,
    checksum,
    to_json,
    write_file,
)
from megazero.checkpoint.metadata import METADATA_FILE, read_metadata
from megazero.checkpoint.planners import SliceSavePlanner, stored_tensors
from megazero.checkpoint.reading import rank_file
from megazero.checkpoint.records import SliceRecord
from megazero.checkpoint.storage import Writer

logger = logging.getLogger(__name__)

Tick = Callable[[], None]  # called whenever a part gets on


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
            if (
                name != os.path.basename(name)
                or name.startswith(".")
                or name in ("", MANIFEST_FILE, STATE_FILE)
            ):
                raise ValueError(f"a snapshot's file cannot have the name {name!r}")


class Part:
    """One rank's own share of a save, to be done on any thread: reading and writing of files, no collective."""

    def __init__(self, what: str, action: Callable[[Tick], Any]) -> None:
        self.what, self._action = what, action
        self._value: Any = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._moved = time.monotonic()

    def run(self) -> None:
        """Do it. An error is kept for ``result``."""
        self._tick()
        try:
            self._value = self._action(self._tick)
        except Exception as error:
            self._error = error
        self._done.set()

    def _tick(self) -> None:
        self._moved = time.monotonic()

    def ended(self, limit_s: float) -> bool:
        """Whether it is done, or nothing of it has got on for ``limit_s`` seconds, which ends it with an error."""
        still = time.monotonic() - self._moved
        if not self._done.is_set() and self._error is None and still > limit_s:
            self._error = TimeoutError(
                errno.ETIMEDOUT,
                f"{self.what} has not got on for {still:.0f} s: the disk or the link to it hangs",
            )
        return self._done.is_set() or self._error is not None

    def wait(self, limit_s: float) -> None:
        """Return when it has ended."""
        while not self.ended(limit_s):
            self._done.wait(min(1.0, limit_s / 4))

    def result(self) -> Any:
        """Return what the action returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value


def save(
    root: str | os.PathLike,
    snapshot: Snapshot,
    *,
    group: dist.ProcessGroup | None = None,
    retention: Retention | None = None,
    overwrite: bool = False,
    staging: Staging | None = None,
    guard: Callable[[], None] = lambda: None,
) -> Path:
    """Write ``root/iter_<step>`` from every rank's snapshot and return its path. An error on one rank (a full
    disk, say) raises CheckpointError on every rank. After an error or a kill the older checkpoints are as they were.
    An existing directory of the same step is kept and is an error, unless ``overwrite``. ``root`` must be the same
    directory for every rank, and no other job may save into it. CUDA tensors are read on the current stream. With
    ``staging`` what is written is a copy there, as when a run saves behind its training. ``guard`` is called on the
    first rank before it changes the root; it ends the process if another job has taken that."""
    parts = saving(
        root,
        snapshot,
        group=group,
        retention=retention,
        overwrite=overwrite,
        staging=staging,
        guard=guard,
    )
    while True:
        try:
            next(parts).run()
        except StopIteration as end:
            return end.value


def saving(
    root: str | os.PathLike,
    snapshot: Snapshot,
    *,
    group: dist.ProcessGroup | None = None,
    retention: Retention | None = None,
    overwrite: bool = False,
    staging: Staging | None = None,
    guard: Callable[[], None] = lambda: None,
) -> Generator[Part, None, Path]:
    """Do as ``save`` does, but yield what is this rank's own work. Go on when the parts of all ranks have ended.

    With ``staging`` the snapshot is copied there before the first part, and may change from then on. Without, its
    tensors must stay as they are until the first part is done.
    """
    root = Path(root)
    rank, world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    final = root / directory.checkpoint_name(snapshot.step)
    doing = f"checkpoint '{final}' not saved, older ones are unharmed"

    def prepare() -> Path:
        guard()
        return directory.prepare(root, snapshot.step, overwrite)

    temporary = agree(group, doing, lambda: prepare() if rank == 0 else None)[0]
    assert temporary is not None
    try:
        writer = Writer(temporary, rank)
        agree(group, doing, partial(_plan, writer, snapshot.records, group))
        small: dict[str, bytes] = agree_local(group, doing, partial(_small_files, snapshot, rank))
        if staging is not None:
            agree(group, doing, partial(writer.take_image, staging))

        def write(tick: Tick) -> dict[str, FileEntry]:
            return {name: write_file(temporary / name, data) for name, data in small.items()} | (
                writer.write_tensors(tick)
            )

        yield (part := Part(f"writing '{temporary}'", write))
        written = agree(group, doing, part.result)
        results = gather_to_first(group, writer.results)

        def commit(tick: Tick) -> None:
            files = {name: entry for entries in written for name, entry in entries.items()}
            writer.write_metadata(results)
            files[METADATA_FILE] = checksum(temporary / METADATA_FILE)
            manifest = _manifest(temporary, snapshot, files, world_size)
            guard()
            directory.commit(temporary, final, manifest)

        yield (part := _of_first(rank, f"completing '{final}'", commit))
        agree(group, doing, part.result)
    except (
        CheckpointError
    ) as error:  # every rank agrees on it, so none writes any more, except on a disk that hangs
        if rank == 0 and not isinstance(error.__cause__, TimeoutError):
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    rule = retention or Retention()
    yield (part := _of_first(rank, f"deleting in '{root}'", lambda tick: directory.retain(root, final, rule)))
    try:
        agree(group, f"checkpoint '{final}' is saved, but older ones cannot be deleted", part.result)
    except CheckpointError as error:  # the save itself has succeeded; the next one tries again
        if rank == 0:
            logger.warning("%s", error)
    return final


def _of_first(rank: int, what: str, action: Callable[[Tick], Any]) -> Part:
    return Part(what, action if rank == 0 else lambda tick: None)


def _plan(writer: Writer, records: Sequence[SliceRecord], group: dist.ProcessGroup | None) -> None:
    """Let torch's checkpointing arrange what each rank writes. Collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit", UserWarning)
        dcp.save(
            {},
            storage_writer=writer,
            planner=SliceSavePlanner(records),
            process_group=group,
            no_dist=group is None,
        )


def _small_files(snapshot: Snapshot, rank: int) -> dict[str, bytes]:
    """Return what the rank writes besides its slices, by the files' names."""
    files: dict[str, bytes] = {}
    if rank == 0:
        state = json.dumps(to_json(snapshot.state, "state"), indent=1)
        files = {**snapshot.files, STATE_FILE: state.encode()}
    if snapshot.rank_tensors:
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in snapshot.rank_tensors.items()}
        files[rank_file(rank)] = safetensors.save(tensors)
    return files


def _manifest(path: Path, snapshot: Snapshot, files: Mapping[str, FileEntry], world_size: int) -> Manifest:
    kinds = {
        kind: tuple(
            sorted({str(tensor.properties.dtype).removeprefix("torch.") for tensor in tensors.values()})
        )
        for kind, tensors in stored_tensors(read_metadata(path)).items()
    }
    return Manifest(
        step=snapshot.step,
        serial=0,  # given by directory.commit
        world_size=world_size,
        kinds=kinds,
        layout=to_json(snapshot.layout, "layout"),
        configuration=to_json(snapshot.configuration, "configuration"),
        files=files,
    )
