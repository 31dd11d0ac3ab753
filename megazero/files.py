"""Whole-file writes: data are written beside the target, flushed to the device, then renamed. And waits for files."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

SEEN_S = 30.0  # until a node sees what another one wrote: network file systems cache folders
LOOK_S = 0.05


def temporary_beside(path: Path) -> Path:
    """Return a name in the same directory that no other process uses (process ids of several nodes may clash)."""
    return path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file. It takes the name ``path`` when the block ends well, and leaves no trace otherwise.

    An OSError of a full disk, which has no name of a file, gets this one.
    """
    temporary = temporary_beside(path)
    try:
        with open(temporary, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, which is replaced as a whole. Folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as handle:
        handle.write(text.encode())


@contextmanager
def exclusive(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold an advisory lock on ``path`` (created when absent). It is released when the process dies, too.

    wait: for another process that holds it; else BlockingIOError is raised."""
    with open(path, "ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def appears(there: Callable[[], bool], folder: Path, tick: Callable[[], None] = lambda: None) -> bool:
    """Wait until ``there`` finds what other nodes wrote into ``folder``, for SEEN_S at most. Return whether it has.

    tick: called after each look that found nothing.
    """
    deadline = time.monotonic() + SEEN_S
    while not there():
        if time.monotonic() > deadline:
            return False
        tick()
        time.sleep(LOOK_S)
        with suppress(OSError):
            os.listdir(folder)  # makes a network's file system ask again
    return True
