"""How a run ends: its exit status and one line that says what it did and why it ended, on the console and on disk."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from megazero.config import RunConfig
from megazero.log.exit_status import ExitStatus
from megazero.log.history import record_end
from megazero.log.words import duration
from megazero.mesh.launch import Launch

if TYPE_CHECKING:
    from megazero.train.trainer import Trainer

LONGEST = 500  # characters of a reason


class Ending:
    """Tells the end of one start of a run, at whose beginning it is made. trainer: once there is one."""

    def __init__(self, config: RunConfig, launch: Launch) -> None:
        self.config, self.launch, self.began = config, launch, time.monotonic()
        self.trainer: Trainer | None = None

    def tell(self, status: ExitStatus, why: str, first: bool = False) -> None:
        """Say that the run ends with this status, and why, on the first rank.

        first: on any rank, if nothing was said of it yet: what a rank said of itself is truer than what others see.
        """
        if not first and self.launch.rank != 0:
            return
        reason = (why.strip().splitlines() or [status.name])[0][:LONGEST]
        facts = self._facts()
        record_end(self.config.logging.log_dir, status, reason, facts, first)
        if self.trainer is not None:
            self.trainer.outputs.console.note(end_line(reason, facts))

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"seconds": round(time.monotonic() - self.began, 3)}
        if self.trainer is None:
            return facts
        progress, start = self.trainer.progress, self.trainer.start
        return {
            **facts,
            "iteration": progress.iteration,
            "last_iteration": self.trainer.length.last_iteration,
            "iterations": progress.iteration - start.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_samples * self.config.model.seq_length,
            "restarts": start.restarts,
            "checkpoint": progress.checkpoint,
        }


def end_line(why: str, facts: dict[str, Any]) -> str:
    """Return the end of a run in one line: how far, how long, how often restarted, the last checkpoint, and why."""
    return " | ".join(
        [
            f"ended at iteration {facts['iteration']}/{facts['last_iteration']}",
            f"{facts['consumed_samples']:,} samples, {facts['consumed_tokens']:,} tokens",
            f"this start: {facts['iterations']} iterations in {duration(facts['seconds'])}",
            f"restarts {facts['restarts']}",
            f"last checkpoint {facts['checkpoint'] or 'none'}",
            f"why: {why}",
        ]
    )
