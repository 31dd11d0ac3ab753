"""A file of lines that grows while a run trains. A full disk never stops the run: lines wait in memory."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
RETRY_S = 10.0  # between two attempts: opening may read the whole file


class LineFile:
    """Appends whole lines, each by one unbuffered write. Only one rank may have it open.

    prepare: called before the file is opened (and again if the disk had no room for that). guard: called before a
    line is written or the file is prepared; it does not return if this process may no longer write. Lines that the
    disk does not take wait in memory (those of metrics.jsonl have about 1 kB each), and are written when there is
    room. There is one warning of each kind. Raises OSError with the path if opening fails for another reason.
    """

    def __init__(
        self,
        path: Path,
        prepare: Callable[[], None] = lambda: None,
        *,
        guard: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._prepare, self._prepared = prepare, False
        self._guard = guard
        self._clock, self._retry_at = clock, 0.0
        self._file: IO[bytes] | None = None
        self._waiting = deque[bytes]()  # the first one may be the rest of a line
        self._warned: set[str] = set()
        try:
            self._open()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise OSError(error.errno, error.strerror, str(path)) from error
            self._failed(error)

    def append(self, line: bytes) -> None:
        """Write a line (it ends with a newline), or keep it until there is room."""
        self._waiting.append(line)
        if self._clock() >= self._retry_at:
            self._write()

    def close(self) -> None:
        """Write the waiting lines if there is room now, else warn how many are lost."""
        self._write()
        if self._waiting:
            self._warn(f"{len(self._waiting)} line(s) lost, for which the disk had no room")
        self._waiting.clear()
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._failed(error)
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        if not self._prepared:
            self._guard()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._prepare()
            self._prepared = True
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        return self._file

    def _write(self) -> None:
        self._guard()
        try:
            while self._waiting:
                line = self._waiting[0]
                written = self._open().write(line) or 0
                if written < len(line):
                    self._waiting[0] = line[written:]
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._waiting.popleft()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self._warn(
            f"{error.strerror}; training goes on, and lines are kept in memory until the disk takes them again"
        )
        self._retry_at = self._clock() + RETRY_S
        if self._file is not None and error.errno not in NO_ROOM:
            self._file.close()  # a stale handle never works again
            self._file = None

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"{self.path}: {what}", stacklevel=2)
