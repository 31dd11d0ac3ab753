"""Standard output and error of a program: control characters are written as \\x1b is. A full disk and a reader that
has gone (``| head``) do no harm.

Names of tensors, keys of files, paths and events come from strangers' files, and a terminal obeys what stands in
them. This needs no torch. It is installed first of all, so that everything Python prints goes through it.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from megazero.log.line_file import NO_ROOM

# Control characters but tab and line feed, and marks that reorder what is read. A carriage return may begin what is
# written, as bars do that show progress, or a line's end.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]|(?<!^)\r(?!\n)"
)


def printable(text: str) -> str:
    """Return a text whose control characters are written as in Python's source. A terminal obeys none of it."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class SafeStream:
    """Wraps a text stream. It escapes control characters. Text that a full disk or a pipe without a reader
    does not take is dropped, instead of raising OSError.

    Everything else is the stream's own. Libraries may replace ``write`` (wandb wraps the one it finds): theirs is
    called with the safe text.
    """

    def __init__(self, stream: TextIO) -> None:
        self.__dict__["_stream"] = stream

    def write(self, text: str) -> int:
        with _unwritable_ignored(self._stream):
            self._stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with _unwritable_ignored(self._stream):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "write":
            self.__dict__["write"] = lambda text: value(printable(text))
        else:
            setattr(self._stream, name, value)


@contextmanager
def _unwritable_ignored(stream: TextIO) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:  # Python flushes once more at its end: what is left goes to nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        elif error.errno not in NO_ROOM:
            raise


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream that a SafeStream wraps, for who writes colours and bars (log/terminal.py)."""
    return stream._stream if isinstance(stream, SafeStream) else stream


def guard_streams() -> None:
    """Wrap standard output and error in a SafeStream."""
    os.environ.setdefault("PYTHON_COLORS", "0")  # Python 3.13 colours its traces
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))
