"""What is known of a run from outside: the lines it wrote, the beat of its lease, and its job in SLURM's queue.

This reads LOG_DIR and asks squeue if there is one. It needs no torch. So it works while the run is under way, and
on any machine that sees the files. Clocks may differ, so the age of the last beat is the difference of two times of
the file system. If it is too old or lies in the future, the lease is watched for the next beat.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from megazero.config.secrets import redact
from megazero.log.history import EVENTS_FILE, read_events
from megazero.log.metrics import METRICS_FILE, decode
from megazero.ops.lease import SILENT_S, Leaseholder, lease_file, read_lease

MOST_LINES = 20_000  # to decode; of longer files only every n-th line is decoded
LATEST = 100  # iterations over which the speed is the mean
FUTURE_S = 2.0  # by which a beat may lie in the future: clocks are read at different moments
ASK_S = 20.0  # that SLURM has to answer
_ALWAYS = (b'"eval_lm_loss"', b'"restarts"', b'"resumed_from"')  # in lines that are always decoded
_JOB = re.compile(r"\d+(_\d+)?")  # of SLURM
_OURS = {"consumed_samples", "eval_lm_loss"}  # in lines of a run; others' files have this name, too
GONE = "GONE"  # stands for the state of a job that SLURM does not know, or not any more

Line = Mapping[str, Any]


@dataclass(frozen=True)
class SlurmJob:
    """A job as SLURM has it: its state in SLURM's words, or GONE; how often it was restarted, and why it waits.

    used_s: for how many seconds it runs since its last start, by SLURM's own clock.
    """

    number: str
    state: str
    restarts: int = 0
    reason: str = ""
    used_s: float = 0.0


@dataclass(frozen=True)
class Vitals:
    """What is known of a run.

    iterations: lines of metrics.jsonl, the last LATEST without gaps. now: when they were read, by the clock of the
    host that wrote them. heard_s: the age of the lease's last beat or, without a lease, of the last line; None if
    there is neither. ahead_s: by how much that host's clock is ahead of the file system's. job: None if there is no
    SLURM to ask, or it does not answer. asked: the job that the caller named.
    """

    folder: Path
    iterations: Sequence[Line]
    evaluations: Sequence[Line]
    events: Sequence[Line]
    now: datetime
    lease: Leaseholder | None = None
    heard_s: float | None = None
    ahead_s: float = 0.0
    job: SlurmJob | None = None
    asked: str = ""

    @property
    def last(self) -> Line:
        return self.iterations[-1] if self.iterations else {}

    @property
    def iteration(self) -> int:
        return int(self.last.get("iteration", 0))

    @cached_property
    def starts(self) -> Sequence[Line]:
        return [event for event in self.events if event.get("event") == "start"]

    @property
    def last_iteration(self) -> int | None:
        """The iteration that the run ends with; None if no start has it."""
        return int(self.starts[-1]["last_iteration"]) if self.starts else None

    @property
    def latest(self) -> Sequence[Line]:
        """The last iterations of the last start."""
        lines = self.iterations[-LATEST:]
        begins = [place for place, line in enumerate(lines) if "restarts" in line]
        return lines[begins[-1] :] if begins else lines

    @property
    def since_start(self) -> Sequence[Line]:
        """The start, end and job events from the last start on."""
        kept = [event for event in self.events if event.get("event") in ("start", "end", "job")]
        begins = [place for place, event in enumerate(kept) if event["event"] == "start"]
        return kept[begins[-1] :] if begins else kept

    @property
    def begins(self) -> bool:
        """Whether the lease is of a start that is not in the events yet."""
        known = {event.get("lease") for event in self.events}
        return self.lease is not None and not self.lease.released and self.lease.owner not in known

    @property
    def ended(self) -> Line | None:
        """The end of the last start, or what its batch script said if it left none; None if it is under way."""
        ends = [event for event in self.since_start if event["event"] != "start"]
        if self.begins or not ends:
            return None
        told = ends[-1]["event"] == "job" and len(ends) > 1 and ends[-2]["event"] == "end"
        return ends[-2] if told else ends[-1]

    @property
    def then(self) -> Line | None:
        """What its batch script said after the end of the last start."""
        last = self.since_start[-1:]
        return None if self.begins or not last or last[0]["event"] != "job" else last[0]

    @property
    def seconds_per_iteration(self) -> float | None:
        """By the clock, so evaluations and saves count; by the iterations' own time before the clock is known.

        Iterations of --skip-train-iteration-range took no time.
        """
        latest = self.latest
        times = [when(line) for line in (latest[0], latest[-1])] if latest else []
        done = latest[-1]["iteration"] - latest[0]["iteration"] if latest else 0
        passed = (each["iterations"] for line in latest[1:] for each in line.get("left_out", ()))
        done -= sum(last - first + 1 for first, last in passed)
        if done > 0 and times[0] and times[1]:
            return (times[1] - times[0]).total_seconds() / done
        return mean(line["iteration_time_s"] for line in latest)

    @property
    def seconds_left(self) -> float | None:
        """At the speed of the latest iterations; None if the speed or the length is not known."""
        speed, last = self.seconds_per_iteration, self.last_iteration
        return None if speed is None or last is None else max(0, last - self.iteration) * speed


def read_run(
    log_dir: str | os.PathLike[str], job: str = "", ask: Callable[[str], SlurmJob | None] | None = None
) -> Vitals:
    """Read a run's files, and ask SLURM about its job: ``job``, or the one that the files name.

    Raises ValueError if the folder holds no run's files and no job is known. Another program's metrics are none.
    """
    folder = Path(log_dir)
    folder = folder.parent if folder.name == METRICS_FILE else folder
    metrics, events = folder / METRICS_FILE, _of_this_run(read_events(folder))
    lines = [line for line in _sampled(metrics) if _OURS & line.keys()] if metrics.exists() else []
    lease, now, heard, ahead = _last_beat(folder, lines)
    starts = [event for event in events if event.get("event") == "start"]
    known = [lease.job] if lease else [event["job_id"] for event in starts[-1:]]
    number = job or next(filter(None, [*known, _job_in(folder)]), "")
    found = (ask or ask_slurm)(number)
    nothing = not (lines or events or lease)
    if nothing and (found is None or found.state == GONE):
        raise ValueError(
            f"{folder} has neither {METRICS_FILE} nor {EVENTS_FILE} of a run: name the --log-dir of a run, or the "
            "job (--job) that will write there"
        )
    return Vitals(
        folder,
        [line for line in lines if "lm_loss" in line],
        [line for line in lines if "eval_lm_loss" in line],
        redact(events),
        *(now, lease, heard, ahead, found, job),
    )


def ask_slurm(number: str) -> SlurmJob | None:
    """Return what SLURM says of a job; None if there is no SLURM here, or it does not answer."""
    if not _JOB.fullmatch(number) or shutil.which("squeue") is None:
        return None
    said = _output(
        "squeue", "-h", "-t", "all", "-j", number, "-O", "State:20,RestartCnt:10,TimeUsed:20,Reason:200"
    )
    if said is None:
        return None
    words = said.split(maxsplit=3)
    if len(words) == 4:
        return SlurmJob(number, words[0], int(words[1]), words[3].strip(), _seconds(words[2]))
    finished = (_output("sacct", "-n", "-X", "-j", number, "-o", "State%20") or "").split()
    return SlurmJob(number, finished[0].rstrip("+") if finished else GONE)  # "CANCELLED+" is cut: by whom


def when(line: Line) -> datetime | None:
    return datetime.fromisoformat(line["time"]) if "time" in line else None


def mean(values: Iterator[float] | Sequence[float]) -> float | None:
    """Return the mean of the values that are finite; None if there are none."""
    found = [value for value in values if abs(value) < float("inf")]
    return sum(found) / len(found) if found else None


def _seconds(text: str) -> float:
    """Return the seconds of SLURM's [DAYS-][HOURS:]MINUTES:SECONDS; 0 for anything else."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _output(*command: str) -> str | None:
    """Return what a command of SLURM prints, '' if it does not know the job, None if it does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    unknown = "Invalid job id" in done.stderr
    return done.stdout if done.returncode == 0 else "" if unknown else None


def _job_in(folder: Path) -> str:
    """Return the job that the batch scripts' default folder names, runs/NAME-JOB/logs; '' for another folder."""
    name = folder.resolve().parent.name.rpartition("-")
    return name[2] if name[1] and _JOB.fullmatch(name[2]) else ""


def _last_beat(
    folder: Path, lines: Sequence[Line]
) -> tuple[Leaseholder | None, datetime, float | None, float]:
    """Return the lease, the time by the clock of the run's first rank, heard_s and ahead_s (``Vitals``)."""
    lease, file = read_lease(folder), lease_file(folder)
    if lease is None or file is None:
        file = folder / METRICS_FILE if lines else folder / EVENTS_FILE
    if not file.exists():
        return lease, datetime.now(UTC), None, 0.0
    here, written = _clock_of(folder), file.stat().st_mtime
    heard = here - written
    if lease is not None and not lease.released and not -FUTURE_S <= heard <= SILENT_S:
        heard, lease = _watch(folder, lease, heard)
    said = when(lines[-1]) if lease is None and lines else None
    said = datetime.fromisoformat(lease.at or lease.started) if lease is not None else said
    if said is None:
        return lease, datetime.now(UTC), heard, 0.0
    return lease, said + timedelta(seconds=max(0.0, heard)), heard, said.timestamp() - here + max(0.0, heard)


def _watch(folder: Path, lease: Leaseholder, heard: float) -> tuple[float, Leaseholder]:
    """Watch a lease whose last beat is too old or in the future. Returns that age, 0 if it beats, and the lease."""
    deadline = time.monotonic() + 2 * lease.every_s + 1
    while time.monotonic() < deadline:
        time.sleep(0.5)
        newer = read_lease(folder)
        if newer is not None and (newer.owner, newer.beat) != (lease.owner, lease.beat):
            return 0.0, newer
    return max(heard, SILENT_S + 1), lease


def _clock_of(folder: Path) -> float:
    """Return the time of the folder's file system, as a file that is written now has it; seconds since 1970."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
            file.write(b"x")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # it is not ours to write, or full
        return time.time()


def _of_this_run(events: Sequence[Line]) -> list[Line]:
    """Return the events of the run that was started last, from its first start: a folder may hold an older run's."""
    events = [event for event in events if "event" in event]  # other programs have a file of this name, too
    ids = [event.get("run_id") for event in events]
    last = next((name for name in reversed(ids) if name), None)
    return list(events[ids.index(last) :] if last else events)


def _sampled(path: Path) -> Iterator[Line]:
    """Yield every n-th line, the last ones, and those with one of the marks. Torn lines are skipped."""
    rows = path.read_bytes().split(b"\n")
    step = max(1, len(rows) // MOST_LINES)
    for place, row in enumerate(rows):
        if place % step == 0 or place > len(rows) - LATEST - 2 or any(mark in row for mark in _ALWAYS):
            try:
                yield decode(row)
            except ValueError:
                continue
