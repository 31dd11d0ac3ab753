"""The lease on a folder: one run at a time writes there. This needs neither torch nor synchronised clocks.

A run holds a lease on --save and --log-dir, each a file FOLDER/lease. It is one JSON object, padded with spaces to
1 KiB:

    job         the batch system's name of the job, or torchrun's of the run; '' where there is none
    host, pid   of the first rank
    started     when that took the lease, by its clock: ISO 8601 in UTC
    owner       random: names this start and no other
    beat        grows by one every BEAT_S seconds while the start lives
    phase       what the first rank is doing, in words, and phase_s: for how many seconds
    released    '' while the lease is held; when the start ended it, by its clock
    run         cluster and job, the same when SLURM requeues the job or torchrun restarts its ranks; '' if unknown
    restarts    how often that was restarted before

Who takes the lease renames a file of its own to that name. The holder before writes into the file that it has open,
which has no name any more, so it renews nothing of the next one's. No file locks are used.

A start takes a lease

- at once, if there is none or it was released,
- at once, if the holder is an earlier start of the same job (a requeue, torchrun's restart),
- otherwise when the file has not changed for SILENT_S seconds by its own monotonic clock, after a crash on the same
  host, too. No time of another host is ever compared. If the file changes before that, the holder lives: FolderInUse.

Of several starts that take it at once the last has it. The others see that at their next look, before they write.
Who takes the lease of a start that may live waits NOTICE_S before it writes: by then the other has looked.

A --save that was moved or deleted is lost, too. A lease that alone was deleted is written again.

A holder looks at its lease with every beat, before each checkpoint is begun and completed, before older ones are
deleted, and before lines are written (at most once per FRESH_S). A holder that was stopped for minutes therefore ends
instead of writing. What remains: a process that is stopped for SILENT_S just between its look and its write can add
one line, or rename the folder of one whole checkpoint, unless the next run's first save has removed that.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from megazero.bounded import load_json
from megazero.config import RunConfig
from megazero.log.line_file import NO_ROOM
from megazero.mesh.launch import Launch

BEAT_S = 5.0  # between two beats
SILENT_S = 60.0  # without a beat, after which a holder counts as dead
LOOK_S = 0.5  # between two looks at another's lease
FRESH_S = 1.0  # for which a look at the own lease counts
NOTICE_S = 3.0  # from a take-over from a holder that may live to the first write: it has noticed by then
RELEASE_S = 2.0  # that an end waits for a disk
SIZE = 1024  # bytes of a lease
SAVING = ("saving", "writing")  # how the phases begin in which a run writes checkpoints (train/trainer.py)
FILE = "lease"
_Look = tuple[str | None, float]  # the content of a lease, and when that was read


@dataclass(frozen=True)
class Leaseholder:
    """Who holds a folder: the content of a lease, as the head of this file describes it."""

    owner: str
    job: str = ""
    host: str = ""
    pid: int = 0
    started: str = ""
    beat: int = 0
    phase: str = ""
    phase_s: float = 0.0
    released: str = ""
    run: str = ""
    restarts: int = 0

    @classmethod
    def of(cls, launch: Launch) -> Self:
        """Return this process as a holder. It begins to hold now."""
        return cls(
            owner=secrets.token_hex(8),
            job=launch.job,
            host=launch.host,
            pid=os.getpid(),
            started=_now(),
            run=launch.identity,
            restarts=launch.restarts,
        )

    @classmethod
    def read(cls, text: str | None) -> Self | None:
        """Return what a lease says, or None if it is none (yet)."""
        try:
            found = load_json(text or "")
            return cls(**{name: value for name, value in found.items() if name in cls.__dataclass_fields__})
        except (ValueError, TypeError, AttributeError):
            return None

    def write(self) -> str:
        return json.dumps(asdict(self)).ljust(SIZE - 1) + "\n"

    @property
    def words(self) -> str:
        if not self.host:
            return "a run whose lease cannot be read"
        job = f"job {self.job}" if self.job else "a run"
        return f"{job} on {self.host} (process {self.pid}), started {self.started}"

    def precedes(self, other: Leaseholder) -> bool:
        """Tell whether it is an earlier start of the other's job, which has ended because that one has begun."""
        return self.run == other.run != "" and other.restarts > self.restarts


def read_lease(folder: str | os.PathLike[str]) -> Leaseholder | None:
    """Return what the lease of a folder says, also of one that was released. None if there is none."""
    return Leaseholder.read(_content(Path(folder)))


NOBODY = Leaseholder("")  # has a folder that was moved or deleted


class FolderInUse(Exception):
    """Another run holds the folder."""


class Place(NamedTuple):
    """A folder that a run writes into, and the flag that names it."""

    folder: Path
    flag: str


class Lease:
    """A run's hold on its folders, taken and renewed by the first rank.

    look: called before each beat, from another thread; returns the values of phase and phase_s.
    folders: those whose lease is held; on other ranks from ``adopt``. lost: called once, from any thread, with a
    sentence, when another run has taken a folder; it ends the process.
    """

    def __init__(
        self,
        places: tuple[Place, ...],
        holder: Leaseholder,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.places, self.holder = places, holder
        self.folders: list[str] = []
        self.lost: Callable[[str], None] = _refuse
        self.look: Callable[[], Mapping[str, Any]] = dict
        self._clock, self._sleep = clock, sleep
        self._files = dict[str, IO[bytes]]()  # the leases that are held, by folder
        self._looked = dict[str, float]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lease")

    @classmethod
    def of(cls, config: RunConfig, launch: Launch) -> Self:
        """Return the lease that a run needs, not yet taken."""
        # A folder with two flags has the rules of the last, so --save, whose are the strictest, comes once more.
        save = "--save", config.checkpoint.save
        named = (save, ("--log-dir", config.logging.log_dir), save)
        places = {Path(folder).resolve(): flag for flag, folder in named if folder}
        return cls(tuple(Place(folder, flag) for folder, flag in places.items()), Leaseholder.of(launch))

    def take(self, note: Callable[[str], None] = lambda text: None) -> None:
        """Take the lease of every folder, and renew them until ``release``. Touches nothing else in the folders.

        note: called with a sentence before a wait of up to SILENT_S. Raises FolderInUse if another run holds a
        folder, and OSError if a lease cannot be written.
        """
        looks: dict[Place, _Look] = {}
        # All folders are looked at now: one wait is enough for one dead run.
        for place in self.places:
            with suppress(OSError):
                looks[place] = _content(place.folder), self._clock()
        may_live = False
        try:
            for place in self.places:
                try:
                    may_live = self._take(place, note, looks.get(place)) or may_live
                except OSError as error:
                    if place.flag == "--save" or error.errno not in NO_ROOM:
                        raise  # a run does not end for a full log disk
                    note(
                        f"{place.flag} {place.folder} takes no lease: nothing keeps other runs out ({error})"
                    )
        except BaseException:
            self.release()
            raise
        if may_live:
            self._sleep(NOTICE_S)
        self._thread.start()

    def adopt(self, owner: str, folders: Sequence[str]) -> None:
        """Learn on another rank what the first one holds."""
        self.holder, self.folders = replace(self.holder, owner=owner), list(folders)

    def taker(self, folder: str) -> Leaseholder | None:
        """Return who has taken a folder over from this run, or None if nobody has, as far as the disk answers.

        NOBODY has a folder that is there no more.
        A rank that does not know yet what the first rank holds gets whoever else seems to hold it.
        """
        place = Path(folder).resolve()
        held = f"{place}" in self.folders
        with suppress(OSError):  # of a disk that does not answer: it takes no writes either
            text = _content(place)
            holder = Leaseholder.read(text)
            if text is None:  # it was deleted by hand, or with its folder
                return NOBODY if held and _is_gone(place) else None
            if held:
                return holder if holder is not None and holder.owner != self.holder.owner else None
            if holder is None or not (holder.released or self._is_job_of(holder)):
                return holder or Leaseholder("")
        return None

    def _is_job_of(self, holder: Leaseholder) -> bool:
        return holder.run == self.holder.run != ""

    def check(self, folder: str, fresh: bool = False) -> None:
        """Call this before a write into a folder: it ends the run (``lost``) if another one has taken that.

        fresh: look now, however short ago the last look was. Call it on the first rank; nodes may see old listings.
        """
        now = self._clock()
        if not fresh and now - self._looked.get(folder, -inf) < FRESH_S:
            return
        place = Path(folder).resolve()
        held = f"{place}" in self.folders  # a full log disk took no lease
        taker = self.taker(folder) if held else None
        if taker is NOBODY and Place(place, "--save") in self.places:
            # The next save would make the folder anew; a start before that would find no checkpoint, and begin again.
            self.lost(
                f"--save {folder} was moved or deleted under this run, which ends here and writes nothing more: give "
                "the next start its new place"
            )
        elif taker is not None and taker is not NOBODY:
            self.lost(
                f"{folder} was taken over by {taker.words}: this run was silent for more than {SILENT_S:g} s, its "
                "job was started again, or both began at once; it ends here and writes nothing more"
            )
        self._looked[folder] = now

    def beat(self) -> None:
        """Look whether the leases are still held, and renew them."""
        for folder in list(self.folders):
            self.check(folder, fresh=True)
        self.holder = replace(self.holder, beat=self.holder.beat + 1, **self.look())
        self._write(self.holder)

    def release(self) -> None:
        """End the leases: another run may take the folders at once. A disk that hangs holds this up for RELEASE_S."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(RELEASE_S)
        else:
            self._end()

    def _end(self) -> None:
        self._write(replace(self.holder, released=_now()))
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        self.folders, self._files = [], {}

    def _write(self, holder: Leaseholder) -> None:
        for folder, file in list(self._files.items()):
            with suppress(OSError):  # a full disk, or one that hangs: the next beat tries again
                file.seek(0)
                file.write(holder.write().encode())
                os.fsync(file.fileno())
                if not holder.released and _content(Path(folder)) is None and not _is_gone(Path(folder)):
                    self._put(Path(folder))  # deleted by hand, not taken over

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_S):
            self.beat()
        self._end()

    def _take(self, place: Place, note: Callable[[str], None], look: _Look | None) -> bool:
        """Take the lease of one folder. Returns whether the holder before may live.

        look: what was there before, and when.
        """
        watched, since = look if look is not None and look[0] else (None, 0.0)
        told = False
        while True:
            text = _content(place.folder)
            holder = Leaseholder.read(text)
            free = text is None or (holder is not None and holder.released != "")
            if free or (holder is not None and holder.precedes(self.holder)):
                break
            if watched is not None and text != watched and text:
                who = (holder or Leaseholder("")).words
                raise FolderInUse(
                    f"{place.flag} {place.folder} is in use: {who}, writes there and is alive. Give "
                    f"this run another {place.flag}, or end that one first"
                )
            if text != watched:
                watched, since = text, self._clock()
            if self._clock() - since >= SILENT_S:
                break
            if not told:
                who = holder.words if holder is not None else "a run that is starting"
                note(
                    f"{place.flag} {place.folder} is held by {who}: waiting up to {SILENT_S:g} s to see "
                    "whether it lives"
                )
            told = True
            self._sleep(LOOK_S)
        self._put(place.folder)
        return not free

    def _put(self, folder: Path) -> None:
        """Make this run the holder of a folder, whoever was."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f".{FILE}.{self.holder.owner}"
        file = open(path, "wb", buffering=0)  # noqa: SIM115 - it stays open
        try:
            file.write(self.holder.write().encode())
            os.fsync(file.fileno())
            os.replace(path, folder / FILE)
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._files[f"{folder}"] = file
        self.folders = list(self._files)


def _content(folder: Path) -> str | None:
    """Return the lease of a folder, None if there is none. It is opened anew, so that NFS asks its server."""
    try:
        return (folder / FILE).read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_gone(folder: Path) -> bool:
    """Tell whether there is no such folder. One on a disk that does not answer is not gone."""
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _refuse(text: str) -> None:
    raise FolderInUse(text)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
