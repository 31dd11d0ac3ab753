"""The command ``megazero meet``: the meeting point of one run's launches. It needs no torch."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path

from megazero.comm.rooms.point import Point
from megazero.config import run_with_arguments
from megazero.config.options.fields import option
from megazero.mesh.sealed import BYTES, made_secret

USAGE = """usage: megazero meet --port PORT [--secret-file FILE]
       megazero meet --port 29600 --secret-file run.secret

Runs the meeting point of the launches that train with --outer-meet HOST:PORT, one for each run, until SIGTERM or
Ctrl-C. Launches find a point again that was started anew. FILE holds the run's secret, for this host and the
launches; it is made if it is missing. Without it the point is for launches on this host alone. Exit status 0: it
was ended; 2: a flag or the port is wrong.
"""
EVERY_S = 60.0  # between two lines that say who is there


@dataclass(frozen=True)
class MeetOptions:
    """The flags of the command."""

    port: int = option(MISSING, "port at which launches find the point", required=True, low=1)
    secret_file: str | None = option(
        None, "file of the run's secret, of mode 0600; it is made if it is missing"
    )


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    return run_with_arguments("meet", argv, USAGE, MeetOptions, meet)


def meet(options: MeetOptions) -> int:
    """Run the point until a signal ends it. Raises ValueError if the port or the file cannot be had."""
    say = partial(print, flush=True)
    secret = _secret(options.secret_file) if options.secret_file else b""
    try:
        point = Point(options.port, secret, lambda host: say(f"refused: {host} has another secret"))
    except OSError as error:
        raise ValueError(f"--port {options.port}: {error.strerror}; choose a free port") from error
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with point:
        where = socket.gethostname() if secret else "127.0.0.1"
        say(f"launches meet here: --outer-meet {where}:{point.port}")
        told: list[str] = []
        while not ended.wait(EVERY_S):
            if (here := point.here()) != told:
                say("; ".join(here) or "nobody is here")
                told = here
    return 0


def _secret(file: str) -> bytes:
    try:
        if Path(file).exists() and 0 < (size := Path(file).stat().st_size) < BYTES:
            raise ValueError(
                f"--secret-file {file}: it has {size} bytes, a secret has {BYTES} or more; remove it"
            )
        return made_secret(file)
    except OSError as error:
        raise ValueError(f"--secret-file {file}: {error.strerror}") from error
