"""Whole-file writes: data are written beside the target, flushed to the device, then renamed. Waits for files, strict
JSON."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

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


def encodable(value: Any) -> Any:
    """Return a value for strict JSON, which has no NaN and no infinity: these become the texts "NaN" and "Infinity".

    Numbers of numpy and torch become Python's.
    """
    if isinstance(value, Mapping):
        return {str(key): encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if not isinstance(value, float):
        return encodable(value.item())  # a numpy or torch scalar
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decoded(value: Any) -> Any:
    """Undo ``encodable`` on what was read from JSON."""
    if isinstance(value, dict):
        return {key: decoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decoded(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


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
