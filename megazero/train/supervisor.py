"""The supervisor of a rank, from the start of its process to its end: its watchdog, and the report of the end."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megazero.bounded import load_json
from megazero.config import RunConfig
from megazero.log.exit_status import ExitStatus, report_to_torchrun
from megazero.log.history import record_end
from megazero.log.units import duration, plural
from megazero.mesh.launch import Launch
from megazero.mesh.sealed import SealedStore, job_secret
from megazero.mesh.waiting import waiting
from megazero.ops.failures import RankFailure
from megazero.ops.heartbeat import Where
from megazero.ops.lease import SAVING, FolderInUse, Lease
from megazero.ops.watchdog import Limit, Watchdog, connect
from megazero.train.trainer import Trainer

LONGEST, LONGEST_PHASE = 10_000, 100  # characters of a reason, and of a phase in the lease


class Supervisor:
    """Knows what its rank is doing (joining the others, preparing the run, training) and reports how that ends.

    While ranks join, no step of that may take longer than --distributed-init-timeout-minutes. Set ``joining`` to the
    name of the next step, and to None when all communicators are made. The preparation that follows reads and writes
    files: it has no limit of its own, but a rank that waits for it in a collective has that collective's limit. Set
    ``trainer`` when the preparation is over.
    """

    def __init__(self, config: RunConfig, launch: Launch, lease: Lease | None = None) -> None:
        self.config, self.launch, self.began = config, launch, time.monotonic()
        self.lease = lease or Lease.of(config, launch)
        self.lease.lost, self.lease.look = self.lose, self.look
        self._seen = "", self.began  # the phase, and since when
        self.trainer: Trainer | None = None
        self.joining: str | None = f"waiting for {plural(launch.world_size - 1, 'other rank')}"
        self.refused: str | None = None  # on the first rank: which run holds a folder of this one
        self._watchdog: Watchdog | None = None
        self._told = ""  # of the error that was printed here: its kind

    @property
    def phase(self) -> str:
        if self.trainer is not None:
            return self.trainer.phase
        return self.joining or "the preparation"

    def start_watchdog(self) -> None:
        """Start the watchdog. Call this when all ranks have joined."""
        log_dir, store = Path(self.config.logging.log_dir), connect(self.launch, self.limit().seconds)
        secret = job_secret(self.config.checkpoint.save, self.launch.rank)
        self._watchdog = Watchdog(store, self.launch, self, log_dir, secret)
        self._watchdog.start()
        self._share_owner(
            SealedStore(store, secret)
        )  # the store may not answer: that is watched from here on

    def _share_owner(self, store: SealedStore) -> None:
        """Tell all ranks which lease is theirs. One that ends before the first collective then knows its folder."""
        if self.launch.rank == 0:
            store.set("lease", json.dumps([self.lease.holder.owner, self.lease.numbers]))
            return
        # Rank 0 is stopped, or its store is; or another program has written there.
        with suppress(RuntimeError, ValueError, TypeError):
            with waiting:
                told = store.wait("lease")
            owner, numbers = load_json(told or "")
            self.lease.adopt(f"{owner}", {folder: int(number) for folder, number in dict(numbers).items()})

    def stop_watchdog(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def find_missing(self, error: str) -> None:
        """Report who is missing after a collective failed here, and end. Returns only if there is no watchdog."""
        if self._watchdog is not None:
            self._watchdog.find_missing(error)

    # -- what the watchdog asks, from a thread of its own ---------------------------------------------

    def where(self) -> Where:
        """Return what this rank is doing: the phase and, in a step, the action and the units in use."""
        if self.trainer is None:
            return {"phase": self.phase}
        engine = self.trainer.engine
        current, units = engine.segment_now, engine.units_now
        action = {} if current is None else {"action": f"{current}"}
        return {"phase": self.phase, **action, **({"unit": ", ".join(units)} if units else {})}

    def progress(self) -> object:
        """Return a value that changes whenever this rank moves on: its phase, bytes sent, modules run.

        Reading and writing files has no limit: for as long as a disk takes, it sends nothing.
        """
        if self.trainer is None:
            return self.joining or time.monotonic()
        engine = self.trainer.engine
        sent = sum(list(engine.traffic.bytes.values()))
        files = time.monotonic() if self.phase.startswith(SAVING) else 0
        return self.phase, sent, *engine.position, files

    def look(self) -> dict[str, Any]:
        """Return the phase and for how long it lasts, for the lease, which `megazero status` reads."""
        phase, now = self.phase, time.monotonic()
        if phase != self._seen[0]:
            self._seen = phase, now
        return {"phase": phase[:LONGEST_PHASE], "phase_s": round(now - self._seen[1], 1)}

    def limit(self) -> Limit:
        name = "distributed_init_timeout_minutes" if self.joining else "distributed_timeout_minutes"
        return Limit(getattr(self.config.training, name) * 60, f"--{name.replace('_', '-')}")

    def report(self, line: str) -> None:  # on one rank, not necessarily the first
        self.tell(RankFailure.__name__, line)
        self.report_end(ExitStatus.RANK_LOST, line)

    def end(self) -> None:
        os._exit(ExitStatus.RANK_LOST)

    def lose(self, why: str) -> None:
        """End the process at once, from any thread: another run has taken a folder of this one."""
        self.tell(FolderInUse.__name__, why)
        self.report_end(ExitStatus.IN_USE, why)
        os._exit(ExitStatus.IN_USE)

    # -- the end ---------------------------------------------------------------------------------------

    def tell(self, kind: str, text: str) -> None:
        """Print an error in one line. This rank's number is the last word: it need not be the rank that failed."""
        self._told, line = kind, f"{kind}: {text} (reported by rank {self.launch.rank})"
        print(line, file=sys.stderr, flush=True)
        report_to_torchrun(line)

    def report_end(self, status: ExitStatus, why: str) -> None:
        """Record that the run ends with this status, and why, and print one line about it on the first rank.

        The first rank to call this counts. Nothing is written into a folder that another run holds.
        """
        reason = (why.strip().splitlines() or [status.name])[0][:LONGEST]
        facts = self._facts()
        log_dir = self.config.logging.log_dir
        ours = self.lease.taker(log_dir) is None
        if ours and self.trainer is not None:
            self.trainer.outputs.close_lines()  # lines that waited for room come before the end, and whole
        record_end(log_dir if ours else None, status, reason, facts)
        if self.trainer is not None:
            why = f"{self._told}, as above" if self._told else reason
            self.trainer.outputs.console.note(end_line(why, facts))
            if ours and self.trainer.outputs.page is not None:
                self.trainer.outputs.page.close()
        if self.launch.rank == 0:
            self.lease.release()

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "seconds": round(time.monotonic() - self.began, 3),
            "lease": self.lease.holder.owner,
        }
        if self.trainer is None:
            return facts
        progress, start = self.trainer.progress, self.trainer.outputs.start_of
        return {
            **facts,
            "iteration": progress.iteration,
            "last_iteration": self.trainer.length.last_iteration,
            "iterations": progress.iteration - start.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.tokens,
            "restarts": start.restarts,
            "checkpoint": progress.checkpoint,
        }


def end_line(why: str, facts: dict[str, Any]) -> str:
    """Return the end of a run in one line: how far, how long, how often restarted, the last checkpoint, and why."""
    return " | ".join(
        [
            f"ended at iteration {facts['iteration']}/{facts['last_iteration']}",
            f"{facts['consumed_samples']:,} samples, {facts['consumed_tokens']:,} tokens",
            f"this start: {plural(facts['iterations'], 'iteration')} in {duration(facts['seconds'])}",
            f"restarts {facts['restarts']}",
            f"last checkpoint {facts['checkpoint'] or 'none'}",
            f"why: {why}",
        ]
    )
