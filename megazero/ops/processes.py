"""What /proc says of a process of this host. This needs no torch.

A process's number and when it started name it and no other.
"""

from __future__ import annotations

import os
from pathlib import Path


def started(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if there is none."""
    fields = _stat(f"/proc/{pid}/stat")
    return int(fields[19]) if fields else 0


def is_gone(pid: int, start: int) -> bool:
    """Tell whether the process that started at ``start`` (see ``started``) has ended, its number given on or not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's, which may be hidden in /proc
    fields = _stat(f"/proc/{pid}/stat")
    return bool(fields) and (fields[0] in "ZX" or int(fields[19]) != start)


def is_held(pid: int) -> bool:
    """Tell whether a process's main thread is stopped. A debugger may hold it alone while other threads go on."""
    return _stat(f"/proc/{pid}/task/{pid}/stat")[:1] in (["t"], ["T"])


def _stat(path: str) -> list[str]:
    """Return /proc's fields of a process or thread, from its state on; none if it is gone."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []
