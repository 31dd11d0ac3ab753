"""What a rank is at from the moment the ranks met until it ends, and the watch over it."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from megazero.config import RunConfig
from megazero.log.exit_status import ExitStatus, tell_torchrun
from megazero.mesh.launch import Launch
from megazero.ops.beats import Where
from megazero.ops.watch import Limit, Watch, connect
from megazero.train.ending import Ending
from megazero.train.trainer import Trainer


class Lookout:
    """Tells the watch what this rank is at: it joins the others, it prepares the run, it trains.

    While ranks join no piece of that may take longer than --distributed-init-timeout-minutes. Set ``joining`` to the
    name of the next piece, and to None when all communicators are made: the preparation that follows reads and writes
    files, which has no limit, but what waits for it in a collective has that one's. Set ``trainer`` when it is over.
    """

    def __init__(self, config: RunConfig, launch: Launch) -> None:
        self.config, self.launch, self.ending = config, launch, Ending(config, launch)
        self.joining: str | None = "the start"
        self.trainer: Trainer | None = None
        self._watch: Watch | None = None

    @property
    def phase(self) -> str:
        if self.trainer is not None:
            return self.trainer.phase
        return self.joining or "the preparation"

    def begin(self) -> None:
        """Start to watch, when all ranks are there."""
        timeout = timedelta(minutes=self.config.training.distributed_init_timeout_minutes)
        self._watch = Watch(
            connect(self.launch, timeout),
            self.launch.rank,
            self.launch.world_size,
            where=self.where,
            moved=self.moved,
            awaits=self.awaits,
            limit=self.limit,
            folder=Path(self.config.logging.log_dir) / "hang",
            end=self._end,
            host=self.launch.host,
        )
        self._watch.start()

    def ask(self, error: str) -> None:
        """A collective failed here: say who is missing, if that can be known, and end. Returns if nobody watches."""
        if self._watch is not None:
            self._watch.ask(error)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    # -- for the watch, which asks from a thread of its own -----------------------------------------

    def where(self) -> Where:
        """Return what this rank does now: the phase, and in a step the action and the units that are in use."""
        if self.trainer is None:
            return {"phase": self.phase}
        engine = self.trainer.engine
        current = engine.gatherer.program.current
        units = [unit.name for unit in engine.units if unit.active]
        action = {} if current is None else {"action": f"{current}"}
        return {"phase": self.phase, **action, **({"unit": ", ".join(units)} if units else {})}

    def moved(self) -> object:
        """Return what changes whenever this rank gets on: the phase, the bytes sent in it, the modules gone through.

        Writing and reading of files has no limit here: it sends nothing for as long as a disk takes. What waits for
        it in a collective has that one's.
        """
        if self.trainer is None:
            return self.joining or time.monotonic()
        engine = self.trainer.engine
        program = engine.gatherer.program
        order = program.orders.get(program.current) if program.current else None
        sent = sum(list(engine.traffic.bytes.values()))
        files = time.monotonic() if self.phase.startswith(("saving", "writing", "going back")) else 0
        return self.phase, sent, program.at, order.position if order else 0, files

    def awaits(self) -> tuple[int, str, float] | None:
        return None if self.trainer is None else self.trainer.pipeline.links.awaited

    def limit(self) -> Limit:
        name = "distributed_init_timeout_minutes" if self.joining else "distributed_timeout_minutes"
        return Limit(getattr(self.config.training, name) * 60, f"--{name.replace('_', '-')}")

    def _end(self, line: str | None) -> None:
        if line is not None:  # on one rank, which need not be the first
            said = f"[rank {self.launch.rank}] RankFailure: {line}"
            print(said, file=sys.stderr, flush=True)
            tell_torchrun(said)
            self.ending.tell(ExitStatus.RANK_LOST, line, first=True)
        os._exit(ExitStatus.RANK_LOST)
