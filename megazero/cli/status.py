"""The command ``megazero status``. It needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megazero.config import run_with_arguments
from megazero.config.options.fields import option
from megazero.config.run import all_options
from megazero.ops.status import read_run, report, state

USAGE = """usage: megazero status [LOG_DIR ...] [flags below]
       */5 * * * * megazero status /shared/runs/a/logs --quiet   # cron mails what it prints

Reports the state of runs, their progress, pace and end, and why they were restarted (states: docs/guide/slurm.md).
Exit status 0: all runs are well (they train, wait or have ended as they should); 1: a run needs a person; 2: a folder
is not a run's.
"""


@dataclass(frozen=True)
class StatusOptions:
    """The words of the command."""

    log_dir: tuple[str, ...] = option(
        (all_options()["log_dir"].default,), "folders that --log-dir named in training", place="LOG_DIR"
    )
    quiet: bool = option(False, "print only one line for each run that is not well")


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0, 1 if a run is not well, or 2 if a folder is not a run's."""
    return run_with_arguments("status", argv, USAGE, StatusOptions, _status)


def _status(options: StatusOptions) -> int:
    status = 0
    for number, folder in enumerate(options.log_dir):
        try:
            run = read_run(folder)
        except (ValueError, OSError) as error:  # the other runs are reported all the same
            print(f"error: {error}", file=sys.stderr)
            status = 2
            continue
        found = state(run)
        status = max(status, int(found.alarming))
        if not options.quiet:
            print("\n" * (number > 0) + report(run), end="")
        elif found.alarming:
            print(f"{run.folder}: {found.words}")
    return status
