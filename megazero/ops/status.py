"""The status of a run, from outside: what its files say of its state, progress, speed and restarts. No torch.

This reads LOG_DIR on any machine that sees it, also while the run is under way. SLURM is not asked: whether a job
waits or was cancelled, `squeue` and `sacct` know.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from megazero.log.exit_status import ExitStatus
from megazero.log.history import EVENTS_FILE, read_events
from megazero.log.metrics import METRICS_FILE, decode
from megazero.log.units import duration
from megazero.ops.lease import FILE, SILENT_S, Leaseholder, read_lease

MOST_LINES = 20_000  # to decode; of longer files only every n-th line is decoded
LATEST = 100  # iterations over which the speed is the mean
LINE_S = 600.0  # without a line, after which a run without a lease (its log disk was full) counts as silent
_ALWAYS = (b'"eval_lm_loss"', b'"restarts"')  # in lines that are always decoded
_OURS = {"consumed_samples", "eval_lm_loss"}  # in lines of a run; others' files have this name, too

Line = Mapping[str, Any]


class State(NamedTuple):
    """The state of a run in words, and whether it needs a person."""

    words: str
    alarming: bool


@dataclass(frozen=True)
class RunFiles:
    """What the files of a run say.

    iterations: lines of metrics.jsonl, the last LATEST without gaps. heard_s: the age of the lease's last beat or,
    without a lease, of the last line.
    """

    folder: Path
    iterations: Sequence[Line]
    evaluations: Sequence[Line]
    events: Sequence[Line]
    lease: Leaseholder | None
    heard_s: float

    @property
    def iteration(self) -> int:
        return int(self.iterations[-1]["iteration"]) if self.iterations else 0

    @property
    def starts(self) -> Sequence[Line]:
        return [event for event in self.events if event.get("event") == "start"]

    @property
    def last_iteration(self) -> int | None:
        """The iteration that the run ends with; None if no start has said it."""
        return int(self.starts[-1]["last_iteration"]) if self.starts else None

    @property
    def latest(self) -> Sequence[Line]:
        """The last iterations of the last start."""
        lines = self.iterations[-LATEST:]
        begins = [place for place, line in enumerate(lines) if "restarts" in line]
        return lines[begins[-1] :] if begins else lines

    @property
    def ends(self) -> Sequence[Line]:
        """The end of the last start, and what its batch script made of it; none while the start is under way."""
        known = [event.get("lease") for event in self.events]
        if self.lease is not None and not self.lease.released and self.lease.owner not in known:
            return []  # the next start has begun, and is not among the events yet
        kept = [event for event in self.events if event.get("event") in ("start", "end", "job")]
        begins = [place for place, event in enumerate(kept) if event["event"] == "start"]
        return kept[begins[-1] + 1 :] if begins else kept

    @property
    def lives(self) -> bool:
        if self.lease is not None:
            return not self.lease.released and self.heard_s <= SILENT_S
        return self.heard_s <= LINE_S

    @property
    def seconds_left(self) -> float | None:
        """At the speed of the latest iterations, in tokens; None if the speed or the length is not known.

        The speed is the clock's, so evaluations and saves count. Iterations of --skip-train-iteration-range took no
        time.
        """
        latest, last = self.latest, self.last_iteration
        times = [when(line) for line in (latest[0], latest[-1])] if latest else []
        done = sum(line["tokens_per_s"] * line["iteration_time_s"] for line in latest[1:])
        if last is None or done <= 0 or not times[0] or not times[1]:
            return None
        left = latest[-1].get("tokens_left")
        if left is None:  # of an earlier version, whose iterations count as the latest do
            left = max(0, last - self.iteration) * done / len(latest[1:])
        return float(left) * (times[1] - times[0]).total_seconds() / done


def read_run(log_dir: str | os.PathLike[str]) -> RunFiles:
    """Read a run's files. Raises ValueError if the folder holds none; another program's metrics do not count."""
    folder = Path(log_dir)
    metrics, lease = folder / METRICS_FILE, read_lease(folder)
    events = _of_this_run(read_events(folder))
    lines = [line for line in _sampled(metrics) if _OURS & line.keys()] if metrics.exists() else []
    if not (lines or events or lease):
        raise ValueError(
            f"{folder} has neither {METRICS_FILE} nor {EVENTS_FILE} of a run: name the --log-dir of a run"
        )
    beats = folder / FILE if lease else metrics if lines else folder / EVENTS_FILE
    return RunFiles(
        folder,
        [line for line in lines if "lm_loss" in line],
        [line for line in lines if "eval_lm_loss" in line],
        events,
        lease,
        max(0.0, _clock_of(folder) - beats.stat().st_mtime),
    )


def state(run: RunFiles) -> State:
    """Return the state of a run: how it ended, or else whether its first rank is alive."""
    if run.ends:
        return _ended(run.ends)
    heard, lease = duration(run.heard_s), run.lease
    if run.lives:
        doing = f"{lease.phase or 'the start'}, for {duration(lease.phase_s)}; " if lease else ""
        return State(f"under way: {doing}last heard of {heard} ago", False)
    if lease is not None and lease.released:
        return State(f"stopped: released by {lease.words}, without a word of why", False)
    where = f" on {lease.host}" if lease else ""
    lost = "its ranks were killed, or its node was lost; squeue says whether its job starts again"
    return State(f"silent: nothing heard{where} for {heard}: {lost}", True)


def _ended(ends: Sequence[Line]) -> State:
    """Return the state after a recorded end. Its batch script may have said whether it is started again."""
    last = ends[-1]
    status, then = last["status"], last.get("then", "")
    names = {each.value: f", {each.name.lower().replace('_', ' ')}" for each in ExitStatus}
    why = f"{'; '.join(dict.fromkeys(end['why'] for end in ends))} (status {status}{names.get(status, '')})"
    goes_on = status in (ExitStatus.STOPPED, ExitStatus.RANK_LOST)
    if status == ExitStatus.FINISHED:
        return State(f"finished: {why}", False)
    if goes_on and then in ("queue", "chain"):
        return State(f"waits for its next start: {why}", False)
    cancelled = goes_on and "cancelled" in last["why"]
    asked = status in (ExitStatus.SWITCHED_OFF, ExitStatus.INTERRUPTED)
    if cancelled or asked or (status == ExitStatus.STOPPED and not then):
        return State(f"stopped: {why}", False)
    return State(f"{'gave up' if goes_on else 'failed'}: {why}", True)


# -- in words --------------------------------------------------------------------------------------------------------


def facts(run: RunFiles) -> dict[str, str]:
    """Return what an operator wants to know of a run, as text by name."""
    out = {"run": f"{run.folder}", "state": state(run).words, "position": _position(run)}
    if latest := run.latest:
        seconds = sum(line["iteration_time_s"] for line in latest)
        # Rates are totals over total time, as the console's.
        tokens, rate = (
            sum(line[name] * line["iteration_time_s"] for line in latest) / seconds if seconds else 0.0
            for name in ("tokens_per_s", "tflops_per_rank")
        )
        each = seconds / len(latest)
        out["speed"] = f"{each:.3g} s per iteration, {tokens:,.0f} tokens/s, {rate:.3g} TFLOP/s per rank"
        out["loss"] = ", ".join([f"{latest[-1]['lm_loss']:.4f}", *_evaluated(run)])
    if run.seconds_left and run.lives and not run.ends:
        done = (datetime.now().astimezone() + timedelta(seconds=run.seconds_left)).astimezone()
        out["done"] = f"in {duration(run.seconds_left)}, {done:%F %H:%M %Z}"
    out |= {"checkpoint": _checkpoint(run), "slowest rank": _slowest(run)}
    if run.starts:
        last, hosts = run.starts[-1], run.starts[-1]["hosts"]
        more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
        job = f"job {last['job_id']} on " if last["job_id"] else ""
        out |= {"restarts": f"{last['restarts']}", "runs as": f"{job}{', '.join(hosts[:8])}{more}"}
    return {name: words for name, words in out.items() if words}


def restarts(run: RunFiles) -> list[str]:
    """Return a line for every start but the first, with why the one before ended."""
    out, why = list[str](), ""
    for event in run.events:
        at = when(event)
        kind = event.get("event")
        if kind == "end" or (kind == "job" and not why):
            why = f"status {event['status']}: {event['why']}"
        elif kind == "start":
            if event is not run.starts[0]:
                clock = f"{at.astimezone():%F %T}" if at else "?"
                reason = why or "it said nothing: killed, or its node lost"
                out.append(f"{clock}  after iteration {event['iteration']}  ({reason})")
            why = ""
    return out


def when(line: Line) -> datetime | None:
    return datetime.fromisoformat(line["time"]) if "time" in line else None


def _position(run: RunFiles) -> str:
    if not run.iterations:
        return "no iteration yet"
    total = run.last_iteration
    of = f" of {total:,} ({run.iteration / total:.1%})" if total else ""
    return f"iteration {run.iteration:,}{of}, {run.iterations[-1]['consumed_samples']:,} samples"


def _evaluated(run: RunFiles) -> Iterator[str]:
    for last in run.evaluations[-1:]:
        name = f" on {last['eval_data']}" if "eval_data" in last else ""
        yield f"evaluation{name} {last['eval_lm_loss']:.4f} at iteration {last['iteration']:,}"


def _checkpoint(run: RunFiles) -> str:
    saves = list[Line]()
    for event in run.events:
        if event.get("event") == "start":  # it may go on from an older one than the last
            saves = [save for save in saves if save["iteration"] <= event["iteration"]]
        saves += [event] if event.get("event") == "save" else []
    if not saves:
        return "none" if run.starts else ""
    last, at = saves[-1], when(saves[-1])
    written = f", {at.astimezone():%F %T}" if at else ""
    return f"{last['path']}{written}, written in {duration(last['seconds'])}"


def _slowest(run: RunFiles) -> str:
    rows = [line["rank_times"] for line in run.latest if "slowest_rank" in line.get("rank_times", {})]
    if not rows:
        return ""
    (((rank, host), count),) = Counter(
        (row["slowest_rank"], row["slowest_host"]) for row in rows
    ).most_common(1)
    most, least = (sum(row[name] for row in rows) / len(rows) for name in ("most_s", "least_s"))
    works = f"the slowest works {most:.3g} s of an iteration, the fastest {least:.3g} s"
    return f"{rank} on {host}, in {count} of the last {len(rows)} iterations; {works}"


# -- files -----------------------------------------------------------------------------------------------------------


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


def report(run: RunFiles) -> str:
    """Return what is printed of a run."""
    lines = [f"{name:<12}  {words}" for name, words in facts(run).items()]
    lines += [f"{'':<12}  {line}" for line in restarts(run)[-10:]]
    return "\n".join([*lines, ""])
