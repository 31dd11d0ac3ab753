"""What stands between a rank and its standard output and error: secrets are hidden, a full disk does no harm.

This needs no torch. It comes first of all, so that whatever is printed goes through it.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from megazero.config.secrets import environ_of_helper, redact, take_secrets
from megazero.log.lines import NO_ROOM

# A launcher or a batch system may send these to all processes of a job: the copies go on to the end of the stream.
_NOT_FOR_COPIES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_copies: list[subprocess.Popen[bytes]] = []
_before: dict[int, int] = {}  # of the descriptors that are copied, what they were


class SafeStream:
    """A text stream that hides secrets, and drops what a full disk does not take instead of raising OSError.

    Everything else is the stream's own. A ``write`` that is set on it (wandb's, around the one that it found) is
    called with what is safe.
    """

    def __init__(self, stream: TextIO) -> None:
        self.__dict__["_stream"] = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(redact(text))
        except OSError as error:
            if _pass_if_full(error) and getattr(self._stream, "write_through", False):
                self._stream.write(redact(text))  # it is in no buffer
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            _pass_if_full(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "write":
            self.__dict__["write"] = lambda text: value(redact(text))
        else:
            setattr(self._stream, name, value)


def _pass_if_full(error: OSError) -> bool:
    """Raise all but a full disk and the death of what copies the output, after which True says: go on without it."""
    if error.errno == errno.EPIPE and _before:
        while _before:
            number, before = _before.popitem()
            os.dup2(before, number)
            os.close(before)
        with suppress(OSError):  # nobody may read that, either
            os.write(2, b"what copies the output for --log-each-rank has died: the rank's log ends here\n")
        return True
    if error.errno not in NO_ROOM:
        raise error
    return False


def guard_output() -> None:
    """Put a SafeStream before standard output and error, and hide the secrets of ``sys.argv``."""
    sys.argv[:] = take_secrets(sys.argv)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream))


def log_each_rank(log_dir: str, rank: int) -> Path:
    """Copy what this process writes to its standard output and error to LOG_DIR/ranks/rank_N.log, too.

    That is done for the file descriptors by another process (log/copying.py), so what libraries in C print is in
    it, and the last words of a process that is killed; secrets are hidden there, too. What a full disk does not take
    is missing. Raises ValueError if the file cannot be written for another reason.
    """
    path = Path(log_dir) / "ranks" / f"rank_{rank}.log"
    head = f"--- rank {rank}, process {os.getpid()} on {os.uname().nodename}, {datetime.now():%F %T}\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(head)
    except OSError as error:
        if error.errno not in NO_ROOM:
            cure = "name another --log-dir"
            raise ValueError(f"--log-each-rank cannot write {path} ({error.strerror}); {cure}") from error
    sys.stdout.flush()
    sys.stderr.flush()
    pipes = {number: os.pipe() for number in (1, 2)}
    command = [sys.executable, "-P", "-m", "megazero.log.copying", str(path)]
    copies = subprocess.Popen(
        [*command, *(f"{source}={number}" for number, (source, _) in pipes.items())],
        stdin=subprocess.DEVNULL,
        env=environ_of_helper(),
        pass_fds=[source for source, _ in pipes.values()],
        preexec_fn=_ignore_signals,
        start_new_session=True,
    )
    _copies.append(copies)
    for number, (source, sink) in pipes.items():
        _before[number] = os.dup(number)
        os.dup2(sink, number)
        os.close(sink)
        os.close(source)
    return path


def _ignore_signals() -> None:
    for number in _NOT_FOR_COPIES:
        signal.signal(number, signal.SIG_IGN)
