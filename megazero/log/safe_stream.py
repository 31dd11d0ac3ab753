"""Standard output and error of a rank: secrets are hidden, and a full disk does no harm.

This needs no torch. It is installed first of all, so that everything Python prints goes through it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from megazero.config.secrets import redact, take_secrets
from megazero.log.line_file import NO_ROOM


class SafeStream:
    """Wraps a text stream. It hides secrets, and drops what a full disk does not take instead of raising OSError.

    Everything else is the stream's own. Libraries may replace ``write`` (wandb wraps the one it finds): theirs is
    called with the redacted text.
    """

    def __init__(self, stream: TextIO) -> None:
        self.__dict__["_stream"] = stream

    def write(self, text: str) -> int:
        with _full_disk_ignored():
            self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with _full_disk_ignored():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "write":
            self.__dict__["write"] = lambda text: value(redact(text))
        else:
            setattr(self._stream, name, value)


@contextmanager
def _full_disk_ignored() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


def guard_output() -> None:
    """Wrap standard output and error in a SafeStream, and hide the secrets of ``sys.argv``."""
    sys.argv[:] = take_secrets(sys.argv)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))
