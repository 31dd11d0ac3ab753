"""What /proc says of a process of this host. This needs no torch.

A process's number and when it started name it and no other.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from contextlib import suppress
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


def name_process(name: str) -> socket.socket:
    """Let ``named_process`` find this process by a name, until the socket that this returns is closed.

    It is a socket without a file, which only this host's processes reach. A name that is taken stays with its owner.
    """
    sock = socket.socket(socket.AF_UNIX)
    os.register_at_fork(after_in_child=sock.close)  # or a child would keep it for a process that has ended
    with suppress(OSError):
        sock.bind(_address(name))
        sock.listen()
    return sock


def named_process(name: str) -> int:
    """Return the process of this user on this host that has this name, running or stopped.

    Who listens there is the kernel's word. Raises ProcessLookupError if there is none, in this container.
    """
    with socket.socket(socket.AF_UNIX) as sock, suppress(OSError):
        sock.setblocking(False)
        sock.connect(_address(name))
        pid, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if pid > 0 and user == os.getuid():
            return pid
    raise ProcessLookupError(f"no process is named {name}")


def _address(name: str) -> str:
    return f"\0megazero {hashlib.sha256(name.encode()).hexdigest()}"


def _stat(path: str) -> list[str]:
    """Return /proc's fields of a process or thread, from its state on; none if it is gone."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []
