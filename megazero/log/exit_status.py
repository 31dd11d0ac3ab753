"""The exit status of a run, by which a batch script decides whether to start it again.

This needs neither torch nor numpy. The numbers are those of sysexits.h where it has a fitting one. 1 and 2 are what
Python and argparse use.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from megazero.checkpoint.errors import SaveError, error_number
from megazero.files import replacing
from megazero.log.line_file import NO_ROOM
from megazero.mesh.launch import torchrun_error_file

# Holds the number when a start has ended: launchers report others (torchrun always 1, srun the signal with which it
# ended ranks that were still leaving).
STATUS_FILE = "exit_status"
# The variable by which a batch script names a folder of its own for that file, new for every start. Ranks then have a
# place before they know LOG_DIR, which no earlier start and no other run has written to. Without it, it is LOG_DIR.
END_FOLDER = "MEGAZERO_END_FOLDER"
TELLING_S = 5.0  # that a rank has to print why the run ends, once it has begun to record that

# Errors of the operating system that are not about what the user wrote: a later start, on another node perhaps, may
# not meet them. NO_ROOM takes a person.
_LOST = {
    *(errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO, errno.ETIMEDOUT),
    *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EADDRINUSE),
}
# A mistake, except of a run that has saved there before.
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EFBIG}


class ExitStatus(IntEnum):
    """What ended a run. After STOPPED and RANK_LOST the same command goes on from the newest checkpoint."""

    FINISHED = 0  # the last iteration is done and saved
    UNEXPECTED = 1  # an error that megazero did not expect; its trace is in the log
    MISTAKE = 2  # in the flags, the data or the checkpoint; the log names the cure
    NON_FINITE = 65  # the loss, or too many gradient norms in a row, were NaN or infinite
    IN_USE = 73  # another run writes into a folder of this one
    STORAGE = 74  # a disk is full, or may not be written any more
    STOPPED = 75  # stopped by a signal, a limit or the kill switch; what was done is saved
    RANK_LOST = 76  # a rank, a node, a link or the storage was lost, or hung until the time-out
    SWITCHED_OFF = 77  # the kill switch was there at the start
    INTERRUPTED = 130  # by Ctrl-C at once, saving nothing; a shell's status for it


# What may only follow from another rank's loss, or from the launcher's signals after it.
_SEEN_FROM_OUTSIDE = {ExitStatus.RANK_LOST, ExitStatus.STOPPED, ExitStatus.INTERRUPTED, ExitStatus.UNEXPECTED}


def status_of(error: BaseException) -> ExitStatus:
    """Return the exit status for an error that ends a run."""
    stated = getattr(error, "exit_status", None)
    if isinstance(stated, ExitStatus):
        return stated
    number, saving = error_number(error), isinstance(error, SaveError)
    if number in NO_ROOM or saving and number in _FORBIDDEN:
        return ExitStatus.STORAGE
    if number in _LOST or saving:
        return ExitStatus.RANK_LOST
    return ExitStatus.MISTAKE if isinstance(error, (ValueError, OSError)) else ExitStatus.UNEXPECTED


def process_status(status: ExitStatus) -> int:
    """Return the status of a rank's process: the run's status, but 0 for a planned stop under torchrun.

    torchrun knows only success and failure. It would treat 75 as a failure: print traces, start the ranks again if
    --max-restarts allows it, and end with 1. The file has 75 (``record_status``).
    """
    planned = status == ExitStatus.STOPPED and torchrun_error_file() is not None
    return ExitStatus.FINISHED if planned else status


def report_to_torchrun(error: str) -> None:
    """Write this rank's error to the file from which torchrun, if it started the rank, reads it.

    torchrun's report of failed ranks (30 lines and more, which no rank can prevent) then ends with this message.
    """
    file = torchrun_error_file()
    if file is not None:
        detail = {"py_callstack": error, "timestamp": f"{int(time.time())}"}
        with suppress(OSError), open(file, "w") as handle:
            json.dump({"message": {"message": error, "extraInfo": detail}}, handle)


def end_folder(log_dir: str | None) -> Path | None:
    """Return where the batch script looks for how this start ended. log_dir: None if it is not known, or not ours."""
    folder = os.environ.get(END_FOLDER) or log_dir
    return Path(folder) if folder else None


def record_status(folder: Path | None, status: ExitStatus, tell: Callable[[], None] = lambda: None) -> bool:
    """Record in ``folder`` how this start ends, on any rank. Returns whether it did. tell: prints why, before that.

    The first rank to record counts: its failure caused those of the others, whatever kills them later. But RANK_LOST,
    which is how others see a failure, gives way to the account of the rank that failed. Errors of the disk are
    ignored: the launcher's status remains.
    """
    path = folder / STATUS_FILE if folder is not None else None
    if path is not None and not _claim(path, status):
        return False
    tell()
    if path is not None:
        with suppress(OSError), replacing(path) as handle:
            handle.write(f"{status:d}\n".encode())
    return True


def _claim(path: Path, status: ExitStatus) -> bool:
    """Tell whether this rank is to record its status. Until it has, the file is empty and other ranks wait."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # at the start there is none
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        recorded = _wait_for(path)
        return recorded is None or (recorded == ExitStatus.RANK_LOST and status not in _SEEN_FROM_OUTSIDE)
    except OSError:
        pass  # what it has to say is printed all the same
    return True


def _wait_for(path: Path) -> ExitStatus | None:
    """Return the status in a file once its rank has printed why; None if it never does."""
    deadline = time.monotonic() + TELLING_S
    while (status := read_status(path)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return status


def forget_status(log_dir: str, attempt: int) -> None:
    """Remove what an earlier start left, on the first rank. attempt: torchrun's restart, which has no new folder."""
    folder = end_folder(log_dir)
    if folder is not None and (attempt or not os.environ.get(END_FOLDER)):
        with suppress(OSError):
            (folder / STATUS_FILE).unlink(missing_ok=True)


def read_status(path: Path) -> ExitStatus | None:
    """Return the status in a STATUS_FILE, or None if it has none: a run is under way, or END_FOLDER has it."""
    try:
        return ExitStatus(int(path.read_text()))
    except (OSError, ValueError):
        return None
