"""The status of a run from its files: how far it is, how fast, when it will be done, why it was restarted.

This reads only LOG_DIR/metrics.jsonl and events.jsonl and needs no torch. So it works while the run is under way, and
on any machine that sees the files.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from megazero.config.secrets import redact
from megazero.log.exit_status import ExitStatus
from megazero.log.history import EVENTS_FILE, read_events
from megazero.log.metrics import METRICS_FILE, decode
from megazero.log.units import duration

MOST_LINES = 20_000  # to decode; of longer files only every n-th line is decoded
LATEST = 100  # iterations over which the speed is the mean
SILENT_S = 600.0  # a run without a line for so long, and for many iterations' time, is called silent
_ALWAYS = (b'"eval_lm_loss"', b'"restarts"', b'"resumed_from"')  # marks of lines that are always decoded

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunStatus:
    """The lines of a run. iterations: from metrics.jsonl, the last LATEST without gaps. now: when they were read."""

    folder: Path
    iterations: Sequence[Line]
    evaluations: Sequence[Line]
    events: Sequence[Line]
    now: datetime

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
    def ended(self) -> Line | None:
        """The end of the last start, or None if the run is under way or left no end."""
        of_starts = (e for e in reversed(self.events) if e.get("event") in ("start", "end"))
        last = next(of_starts, {})
        return last if last.get("event") == "end" else None

    @property
    def seconds_per_iteration(self) -> float | None:
        """By the clock, so evaluations and saves count; by the iterations' own time before the clock is known.

        Iterations of --skip-train-iteration-range took no time. Those undone after a spike did.
        """
        latest = self.latest
        times = [when(line) for line in (latest[0], latest[-1])] if latest else []
        done = latest[-1]["iteration"] - latest[0]["iteration"] if latest else 0
        passed = (each["iterations"] for line in latest[1:] for each in line.get("left_out", ()))
        done -= sum(last - first + 1 for first, last in passed)
        if done > 0 and times[0] and times[1]:
            return (times[1] - times[0]).total_seconds() / done
        return _mean(line["iteration_time_s"] for line in latest)

    @property
    def seconds_left(self) -> float | None:
        """At the speed of the latest iterations; None if the speed or the length is not known."""
        speed, last = self.seconds_per_iteration, self.last_iteration
        return None if speed is None or last is None else max(0, last - self.iteration) * speed


def read_run(log_dir: str | os.PathLike[str], now: datetime | None = None) -> RunStatus:
    """Read a run's files. Raises ValueError if the folder holds neither of them."""
    folder = Path(log_dir)
    folder = folder.parent if folder.name == METRICS_FILE else folder
    metrics = folder / METRICS_FILE
    if not metrics.exists() and not (folder / EVENTS_FILE).exists():
        raise ValueError(
            f"{folder} has neither {METRICS_FILE} nor {EVENTS_FILE}: name the --log-dir of a run"
        )
    lines = list(_sampled(metrics)) if metrics.exists() else []
    return RunStatus(
        folder,
        [line for line in lines if "lm_loss" in line],
        [line for line in lines if "eval_lm_loss" in line],
        redact(_of_this_run(read_events(folder))),
        now or datetime.now(UTC),
    )


def _of_this_run(events: Sequence[Line]) -> list[Line]:
    """Return the events of the run that was started last, from its first start: a folder may hold an older run's."""
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


def when(line: Line) -> datetime | None:
    return datetime.fromisoformat(line["time"]) if "time" in line else None


# -- in words --------------------------------------------------------------------------------------------------------


def facts(run: RunStatus) -> dict[str, str]:
    """Return what an operator wants to know of a run, as text by name."""
    out = {"run": f"{run.folder}", "state": state(run), "position": _position(run)}
    latest = run.latest
    if latest:
        tokens = _mean(line["tokens_per_s"] for line in latest) or 0.0
        seconds = _mean(line["iteration_time_s"] for line in latest) or 0.0
        rate = _mean(line["tflops_per_rank"] for line in latest) or 0.0
        out["speed"] = f"{seconds:.3g} s per iteration, {tokens:,.0f} tokens/s, {rate:.3g} TFLOP/s per rank"
        out["loss"] = ", ".join([f"{run.last['lm_loss']:.4f}", *_evaluated(run)])
    if run.seconds_left and not run.ended:
        done = (run.now + timedelta(seconds=run.seconds_left)).astimezone()
        out["done"] = f"in {duration(run.seconds_left)}, {done:%F %H:%M %Z}"
    out |= {"checkpoint": _checkpoint(run), "slowest rank": _slowest(run)}
    if run.starts:
        out["restarts"] = f"{run.starts[-1]['restarts']}"
        hosts = run.starts[-1]["hosts"]
        job = f"job {run.starts[-1]['job_id']} on " if run.starts[-1]["job_id"] else ""
        out["runs as"] = (
            f"{job}{', '.join(hosts[:8])}{f' and {len(hosts) - 8} more' if len(hosts) > 8 else ''}"
        )
    return {name: words for name, words in out.items() if words}


def state(run: RunStatus) -> str:
    """Return whether the run is under way, or how it ended."""
    if run.ended is not None:
        try:
            name = ExitStatus(run.ended["status"]).name.lower().replace("_", " ")
        except ValueError:
            name = f"ended with status {run.ended['status']}"
        return f"{name}: {run.ended['why']}"
    last = when(run.last) or (when(run.starts[-1]) if run.starts else None)
    if last is None:
        return "not known: these files were written before runs recorded it"
    silent = (run.now - last).total_seconds()
    usual = run.seconds_per_iteration or 0.0
    if silent > max(SILENT_S, 20 * usual):
        return f"silent for {duration(silent)}: killed, hung, or its node lost"
    return f"under way, last heard of {duration(max(0.0, silent))} ago"


def restarts(run: RunStatus) -> list[str]:
    """Return a line for every start but the first, with why the one before ended, and for every rollback."""
    out, why = list[str](), ""
    for event in run.events:
        at = when(event)
        clock = f"{at.astimezone():%F %T}" if at else "?"
        kind = event.get("event")
        if kind == "end":
            why = f"status {event['status']}: {event['why']}"
        elif kind == "rollback":
            out.append(f"{clock}  back to iteration {event['first'] - 1}  ({event['why']})")
        elif kind == "start":
            if event is not run.starts[0]:
                reason = why or "it said nothing: killed, or its node lost"
                out.append(f"{clock}  after iteration {event['iteration']}  ({reason})")
            why = ""
    return out


def _position(run: RunStatus) -> str:
    if not run.iterations:
        return "no iteration yet"
    total = run.last_iteration
    of = f" of {total:,} ({run.iteration / total:.1%})" if total else ""
    return f"iteration {run.iteration:,}{of}, {run.last['consumed_samples']:,} samples"


def _evaluated(run: RunStatus) -> list[str]:
    if not run.evaluations:
        return []
    last = run.evaluations[-1]
    name = f" on {last['eval_data']}" if "eval_data" in last else ""
    return [f"evaluation{name} {last['eval_lm_loss']:.4f} at iteration {last['iteration']:,}"]


def _checkpoint(run: RunStatus) -> str:
    saves = list[Line]()
    for event in run.events:
        if event.get("event") == "start":  # it may go on from an older one than the last
            saves = [save for save in saves if save["iteration"] <= event["iteration"]]
        saves += [event] if event.get("event") == "save" else []
    if not saves:
        return "none" if run.starts else ""
    at = when(saves[-1])
    age = f", {duration((run.now - at).total_seconds())} ago" if at else ""
    return f"{saves[-1]['path']}{age}, written in {duration(saves[-1]['seconds'])}"


def _slowest(run: RunStatus) -> str:
    rows = [line["rank_times"] for line in run.latest if "slowest_rank" in line.get("rank_times", {})]
    if not rows:
        return ""
    (rank, host), count = Counter((row["slowest_rank"], row.get("slowest_host")) for row in rows).most_common(
        1
    )[0]
    most, least = _mean(row["most_s"] for row in rows), _mean(row["least_s"] for row in rows)
    where = f" on {host}" if host else ""
    works = f"the slowest works {most:.3g} s of an iteration, the fastest {least:.3g} s"
    return f"{rank}{where}, in {count} of the last {len(rows)} iterations; {works}"


def _mean(values: Iterator[float] | Sequence[float]) -> float | None:
    found = [value for value in values if math.isfinite(value)]
    return sum(found) / len(found) if found else None
