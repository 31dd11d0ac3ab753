"""The exit status of a run, by which a batch script decides whether to start it again.

This needs neither torch nor numpy. The numbers are those of sysexits.h where it has a fitting one. 1 and 2 are what
Python and argparse use.
"""

from __future__ import annotations

import errno
import json
import time
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from megazero.checkpoint.errors import SaveError, error_number
from megazero.config.secrets import redact
from megazero.files import replacing
from megazero.mesh.launch import torchrun_error_file

# LOG_DIR/exit_status holds the number while no run is under way: launchers report others (torchrun always 1, srun
# the signal with which it ended ranks that were still leaving).
STATUS_FILE = "exit_status"

# Errors of the operating system that are not about what the user wrote. The first take a person; a later start, on
# another node perhaps, may not meet the second.
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LOST = {
    *(errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO, errno.ETIMEDOUT),
    *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EADDRINUSE),
}
_FORBIDDEN = {
    errno.EACCES,
    errno.EPERM,
    errno.EFBIG,
}  # a mistake, except of a run that has saved there before


class ExitStatus(IntEnum):
    """What ended a run. After STOPPED and RANK_LOST the same command goes on from the newest checkpoint."""

    FINISHED = 0  # the last iteration is done and saved
    UNEXPECTED = 1  # an error that megazero did not expect; its trace is in the log
    MISTAKE = 2  # in the flags, the data or the checkpoint; the log names the cure
    NON_FINITE = 65  # the loss, or too many gradient norms in a row, were NaN or infinite
    STORAGE = 74  # a disk is full, or may not be written any more
    STOPPED = 75  # stopped by a signal, a limit or the kill switch; what was done is saved
    RANK_LOST = (
        76  # a rank, a node, a link or the storage was lost, or hung until the time-out; a port is in use
    )
    SWITCHED_OFF = 77  # the kill switch was there at the start
    INTERRUPTED = 130  # by Ctrl-C at once, saving nothing; a shell's status for it


def status_of(error: BaseException) -> ExitStatus:
    """Return the exit status for an error that ends a run."""
    stated = getattr(error, "exit_status", None)
    if isinstance(stated, ExitStatus):
        return stated
    number, saving = error_number(error), isinstance(error, SaveError)
    if number in _FULL or saving and number in _FORBIDDEN:
        return ExitStatus.STORAGE
    if number in _LOST or saving:
        return ExitStatus.RANK_LOST
    return ExitStatus.MISTAKE if isinstance(error, (ValueError, OSError)) else ExitStatus.UNEXPECTED


def process_status(status: ExitStatus) -> int:
    """Return the status of a rank's process: the run's status, but 0 for a planned stop under torchrun.

    torchrun knows only success and failure. It would treat 75 as a failure: print traces, start the ranks again if
    --max-restarts allows it, and end with 1. LOG_DIR/exit_status has 75.
    """
    planned = status == ExitStatus.STOPPED and torchrun_error_file() is not None
    return ExitStatus.FINISHED if planned else status


def report_to_torchrun(error: str) -> None:
    """Write this rank's error to the file from which torchrun, if it started the rank, reads it.

    torchrun's report of failed ranks (30 lines and more, which no rank can prevent) then ends with this message.
    """
    file, error = torchrun_error_file(), redact(error)
    if file is not None:
        detail = {"py_callstack": error, "timestamp": f"{int(time.time())}"}
        with suppress(OSError), open(file, "w") as handle:
            json.dump({"message": {"message": error, "extraInfo": detail}}, handle)


def record_status(log_dir: str, status: ExitStatus | None, first: bool = False) -> bool:
    """Write LOG_DIR/exit_status for the batch script, or remove it (None) while the run is under way.

    first: only if there is none yet: a rank's own account is truer than what others see of it. Without it, call this
    on the first rank. Errors of the disk are ignored: the launcher's status remains. Returns False if there was one
    already.
    """
    try:
        if status is None:
            (Path(log_dir) / STATUS_FILE).unlink(missing_ok=True)
        elif first and (Path(log_dir) / STATUS_FILE).exists():
            return False
        else:
            Path(log_dir).mkdir(parents=True, exist_ok=True)  # at the start there is none
            with replacing(Path(log_dir) / STATUS_FILE) as file:
                file.write(f"{status:d}\n".encode())
    except OSError:
        pass
    return True


def read_status(log_dir: str) -> ExitStatus | None:
    """Return the status in LOG_DIR/exit_status, or None if a run is under way or has left none."""
    try:
        return ExitStatus(int((Path(log_dir) / STATUS_FILE).read_text()))
    except (OSError, ValueError):
        return None
