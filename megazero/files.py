"""Whole-file writes: data are written beside the target, flushed to the device, then renamed. And strict JSON."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


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
