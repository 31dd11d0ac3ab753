"""The history of a run over its restarts: its id, and when and why each start ended. This needs no torch.

The run's id is in its checkpoints and, before there is one, in SAVE/run_id. So a run that is killed before its first
save continues its curve at outside loggers, too. LOG_DIR/events.jsonl has a line for every start, save and end.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.config.secrets import redact
from megazero.files import replacing
from megazero.log.exit_status import ExitStatus, end_folder, record_status
from megazero.log.line_file import LineFile
from megazero.log.metrics import encode, now, read_lines
from megazero.mesh.launch import Launch

EVENTS_FILE = "events.jsonl"
RUN_FILE = "run_id"
RESOLVED_FILE = "config.yaml"  # every option, and what was chosen in its comments
IDS = ("run_id", "job_id", "lease")  # in events
MOST_HOSTS = 8  # named in the header


@dataclass(frozen=True)
class Start:
    """One start of a run.

    run_id: the run's id at outside loggers, the same over all starts. restarts: how often it was started before.
    job: the batch system's name of the job, or ''. hosts: the host of every rank. iteration: the last one before it.
    notes: for the user. lease: of the folders that this start writes into, by its owner.
    """

    run_id: str
    restarts: int = 0
    job: str = ""
    hosts: tuple[str, ...] = ()
    iteration: int = 0
    notes: tuple[str, ...] = ()
    lease: str = ""

    def facts(self) -> dict[str, Any]:
        """Return the keys that this start adds to its first line of metrics and to its line in events.jsonl."""
        return {"job_id": self.job, "restarts": self.restarts, "hosts": list(dict.fromkeys(self.hosts))}

    def header(self) -> dict[str, str]:
        """Return the same as text, for the head of a log."""
        counts = Counter(self.hosts)
        names = [f"{name} ({count} ranks)" if count > 1 else name for name, count in counts.items()]
        more = f" and {len(names) - MOST_HOSTS} more" if len(names) > MOST_HOSTS else ""
        hosts = {"hosts": ", ".join(names[:MOST_HOSTS]) + more}
        job = {"job": self.job} if self.job else {}
        return {"clock": now(), **job, "restarts": f"{self.restarts}", **hosts}


def identify(save: str | None, log_dir: str, run_id: str, launch: Launch) -> Start:
    """Return which run this starts, and how often it was started before. Call it on the first rank.

    run_id: from the checkpoint that the run begins from, or ''. Then the id is the one in the folder, of a run that
    was stopped before its first checkpoint, or a new one, which is written there.
    """
    notes: tuple[str, ...] = ()
    if not run_id and save is not None:
        run_id, notes = _of_folder(Path(save) / RUN_FILE)
    run_id = run_id or new_run_id()
    starts = [event for event in read_events(log_dir) if event.get("event") == "start"]
    before = sum(start.get("run_id") == run_id for start in starts)
    if starts and (other := starts[-1].get("run_id")) != run_id:
        notes = (
            *notes,
            f"--log-dir {log_dir} has the lines of another run, {other}: those of iterations after this start "
            "move to metrics.superseded.jsonl; nearest: a --log-dir of its own for each run",
        )
    return Start(run_id, max(before, launch.restarts), launch.job, notes=notes)


def new_run_id() -> str:
    """Return a fresh run id: 8 characters, as wandb's own, independent of the training seed."""
    return secrets.token_hex(4)


def _of_folder(file: Path) -> tuple[str, tuple[str, ...]]:
    """Return the id in this file, or a new one that is written there; with notes."""
    try:
        if file.exists() and re.fullmatch(r"\w+", known := file.read_text().strip()):
            return known, (f"{file}: this continues run {known}, which had saved nothing yet",)
        file.parent.mkdir(parents=True, exist_ok=True)
        run_id = new_run_id()
        with replacing(file) as handle:
            handle.write(f"{run_id}\n".encode())
        return run_id, ()
    except OSError as error:
        lost = "a start of this run before its first checkpoint is another run at outside loggers"
        return "", (f"{file} is not there ({error.strerror}): {lost}",)


# -- events ----------------------------------------------------------------------------------------------------------


def event_line(event: str, values: Mapping[str, Any]) -> bytes:
    """Return the line of an event. Its texts are for people, so secrets are hidden; the ids are compared."""
    ids = {name: values[name] for name in IDS if name in values}
    return encode({"event": event, "time": now(), **redact(values), **ids})


def read_events(log_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of LOG_DIR/events.jsonl in order, none where there is no file."""
    file = Path(log_dir) / EVENTS_FILE
    return [line for _, line in read_lines(file.read_bytes())[0]] if file.exists() else []


def record_end(log_dir: str | None, status: ExitStatus, why: str, progress: Mapping[str, Any]) -> None:
    """Record the exit status (``record_status``), and the end in LOG_DIR/events.jsonl. A full log disk does no harm.

    log_dir: None if another run writes there. progress: how far the run came. Call it on any rank that knows why the
    run ends; the first one counts.
    """
    if not record_status(end_folder(log_dir), status) or log_dir is None:
        return
    try:
        file = LineFile(Path(log_dir) / EVENTS_FILE)
        file.append(event_line("end", {"status": int(status), "why": why, **progress}))
        file.close()
    except OSError:
        pass  # the disk is full or gone: a run does not fail for a line about its end, and the status has it
