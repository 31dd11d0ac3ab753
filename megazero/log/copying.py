"""Copies what a rank writes at its file descriptors to a file, too, with *** in the place of secrets.

    python -m megazero.log.copying FILE SOURCE=TARGET...

It reads the descriptors SOURCE until they end, and writes to FILE and to the descriptors TARGET. As a process of its
own it has what libraries in C print, too, and the last words of a rank that is killed. This needs no torch.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from megazero.config.secrets import redact

PATIENCE_S = 0.2  # for the rest of a line: a prompt or a bar is shown without
MOST_BYTES = 2**20  # of a line


def copy(file: int, targets: Mapping[int, int]) -> None:
    """Copy from each of the descriptors ``targets`` to its value and to ``file``, line by line, until they end.

    What one of them does not take, for want of room or of a reader, is missing there.
    """
    begun = dict.fromkeys(targets, b"")  # lines that have not ended
    since = dict.fromkeys(targets, 0.0)
    while begun:
        ready, _, _ = select.select(list(begun), [], [], PATIENCE_S if any(begun.values()) else None)
        now = time.monotonic()
        late = [s for s in begun if s not in ready and begun[s] and now - since[s] >= PATIENCE_S]
        for source in (*ready, *late):
            more = os.read(source, 2**16) if source in ready else b""
            since[source] = now
            text = begun[source] + more
            goes_on = more and len(text) < MOST_BYTES
            end = 1 + max(text.rfind(b"\n"), text.rfind(b"\r")) if goes_on else len(text)
            safe = redact(text[:end].decode(errors="surrogateescape")).encode(errors="surrogateescape")
            for target in (targets[source], file):
                _write(target, safe)
            begun[source] = text[end:]
            if source in ready and not more:
                del begun[source]


def _write(target: int, text: bytes) -> None:
    with suppress(OSError):
        while text:
            try:
                text = text[os.write(target, text) :]
            except BlockingIOError:  # a terminal that another program told not to block
                select.select([], [target], [])


def main(path: str, *pairs: str) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:  # no room for it: the rank's output goes on
        file = os.open(os.devnull, os.O_WRONLY)
    copy(file, {int(source): int(target) for source, target in (pair.split("=") for pair in pairs)})


if __name__ == "__main__":
    main(*sys.argv[1:])
