"""Copies checkpoints to another folder (--save-copy) while the training goes on.

A copy is a checkpoint like any other. The first rank makes it, by processes of the lowest priority (image.py). Every
file's checksum is compared with the manifest twice: as the file is read, and as the copy is read back. The folder is
written beside its name and renamed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megazero.checkpoint import directory
from megazero.checkpoint.directory import Retention
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.image import copy_file
from megazero.checkpoint.manifest import Manifest, read_manifest
from megazero.checkpoint.saving import Part, Tick


class Copier:
    """Copies checkpoints into ``root``, one at a time: the first one at or after each multiple of ``interval``.

    If a copy fails, there is a warning, and the next checkpoint is copied. Only the first rank of ``group`` copies.
    retention: of the copies. tell: takes a sentence, and whether it is a warning, on any thread. limit_s: seconds
    without progress after which a disk counts as hanging. guard: called before ``root`` is changed; it ends the
    process if another run owns that folder.
    """

    def __init__(
        self,
        root: Path,
        interval: int,
        retention: Retention,
        tell: Callable[[str, bool], None],
        limit_s: float,
        group: dist.ProcessGroup | None = None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._interval, self._retention, self._guard = root, interval, retention, guard
        self._tell, self._limit_s, self._group = tell, limit_s, group
        self._first = group is None or dist.get_rank(group) == 0
        self._part = Part("nothing", lambda tick: None)
        self._part.start()
        self._source: Path | None = None

    @property
    def busy(self) -> Path | None:
        """The checkpoint that is being copied, which must not be deleted."""
        return None if self._part.returned(0) else self._source

    def offer(self, source: Path, always: bool = False) -> None:
        """Begin to copy a checkpoint, if it is due or ``always``, and none is being copied."""
        if self._part.returned(0):  # one that hangs is waited for: it would take the files of another away
            self._source = source
            self._part = Part(
                f"copying '{source}'", lambda tick: self._copy(source, always, tick) if self._first else None
            )
            self._part.start()

    def finish(self, source: Path) -> None:
        """Wait for the copy under way, then copy the last checkpoint of the run. Collective."""
        self._part.wait_for_all(self._group, self._limit_s)
        self.offer(source, always=True)
        self._part.wait_for_all(self._group, self._limit_s)
        try:
            self._part.result()
        except TimeoutError as error:
            self._tell(f"--save-copy: {error}", True)

    def _copy(self, source: Path, always: bool, tick: Tick) -> None:
        began = time.monotonic()
        try:
            manifest = read_manifest(source)
            if self._is_due(manifest, always):
                made = copy_checkpoint(source, manifest, self._root, tick, self._guard)
                self._guard()
                directory.retain(self._root, made, self._retention)
                self._tell(f"copied {source.name} to {made} in {time.monotonic() - began:.1f} s", False)
        except (CheckpointError, OSError) as error:
            self._tell(f"{source} is not copied to {self._root}: {error}. The next checkpoint will be", True)

    def _is_due(self, manifest: Manifest, always: bool) -> bool:
        newest = directory.latest(self._root)
        if newest is None:
            return True
        copied = read_manifest(newest)
        if copied.files == manifest.files:
            return False
        rolled_back = copied.step >= manifest.step
        return always or rolled_back or copied.step // self._interval != manifest.step // self._interval


def copy_checkpoint(
    source: Path, manifest: Manifest, root: Path, tick: Tick, guard: Callable[[], None] = lambda: None
) -> Path:
    """Copy a checkpoint into ``root`` and check it there. Returns its path.

    Raises CheckpointError if a file is not what the manifest says, here or there, and OSError.
    """
    guard()
    temporary = directory.prepare(root, manifest.step, overwrite=True)
    try:
        for name, entry in manifest.files.items():
            read, back = copy_file(source / name, temporary / name, tick)
            if read != entry:
                raise CheckpointError(f"'{source / name}' is damaged: it has checksum {read.crc32:08x}")
            if back != entry:
                raise CheckpointError(f"'{temporary / name}', read back, has checksum {back.crc32:08x}")
        final = root / directory.checkpoint_name(manifest.step)
        guard()
        directory.commit(temporary, final, manifest)
    except (CheckpointError, OSError):
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final
