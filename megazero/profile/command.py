"""The command ``megazero profile``: started on every rank. It answers --help and mistakes without torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from megazero.config import ConfigError
from megazero.mesh.launch import read_launch, take_local_rank
from megazero.profile.options import help_text, read_request


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if the cluster file is written, 2 if the flags or the launcher's words are wrong."""
    if "-h" in argv or "--help" in argv:
        print(help_text())
        return 0
    rank = 0
    try:
        local_rank, words = take_local_rank(argv)
        launch = read_launch(local_rank=local_rank)
        rank = launch.rank
        request = read_request(words)
        from megazero.profile.run import join, profile

        try:
            joined = join(request, launch)
        except ValueError as error:  # this rank alone may know: the others wait for it
            return _mistake(f"{launch.host}, rank {launch.rank}: {error}", 0)
        profile(request, launch, joined)
    except ConfigError as error:
        return _mistake(f"{error}\n--help lists the flags of profile", rank)
    except ValueError as error:
        return _mistake(f"{error}", rank)
    return 0


def _mistake(text: str, rank: int) -> int:
    """Say it on rank 0, which speaks for all. Returns the exit status."""
    if rank == 0:
        print(text, file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # a launcher ends all ranks with the first that leaves: let the one that speaks be it
    return 2
