"""The saver saves synchronously or (--async-save) in the background, from a copy in host memory.

There is one way to save (checkpoint/saving.py): threads do its parts, and issue no collectives. A synchronous save
waits for them. In the background, each rank tells the others with the step's scalars whether its part has ended. When
all have, the main threads run the collectives between two parts, at the end of that step. So only one thread uses the
training's process groups, a save needs no groups of its own, and all ranks learn of an error in the same step.

There is one save at a time. If the storage refuses, the save is tried again for --save-retry-minutes, in the
background while the training goes on; then it is an error. A save that falls due meanwhile replaces one that waits
for its next attempt, because memory holds something newer. When the training ends, the saver waits for the last save.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path

from megazero.checkpoint import store
from megazero.log.console import TrainConsole
from megazero.mesh.mesh import world_group
from megazero.train.state.checkpointing import Checkpointing
from megazero.train.state.progress import Progress


class Saver:
    """Saves one run.

    saved: called on every rank when a checkpoint is complete, with its iteration, its path, and the seconds since the
    save began. limit_s: an attempt to save fails if the disk does not move for so many seconds.
    """

    def __init__(
        self,
        checkpointing: Checkpointing,
        console: TrainConsole,
        saved: Callable[[int, Path, float], None],
        limit_s: float,
    ) -> None:
        options = checkpointing.config.checkpoint
        self._checkpointing, self._console = checkpointing, console
        self._saved, self._limit_s = saved, limit_s
        self._staging = store.Staging() if options.async_save else None
        self._retry = store.Retry(options.save_retry_minutes * 60, console.warning)
        self._parts: Generator[store.Part, None, Path] | None = None
        self._part: store.Part | None = None
        self._began, self._iteration = 0.0, 0

    def save(self, progress: Progress) -> None:
        """Save, or begin to. Collective.

        Raises CheckpointError, the same on every rank, if this save fails, or one that was under way.
        """
        self.wait(replacing=True)
        if self._part is not None:
            self._console.warning(f"iteration {progress.iteration} is saved instead of {self._iteration}")
            self._retry.pause_s = 0.0
        self._began, self._iteration = time.perf_counter(), progress.iteration
        self._parts = self._checkpointing.saving(progress, self._staging, self._retry)
        self.go_on()
        if self._staging is None:
            self.wait()
            return
        taken = time.perf_counter() - self._began
        self._console.note(
            f"saving iteration {progress.iteration} behind the training: rank 0 copied "
            f"{self._staging.nbytes / 1e9:.3g} GB in {taken:.1f} s"
        )

    @property
    def under_way(self) -> bool:
        """Whether a save is not yet complete."""
        return self._part is not None

    @property
    def part_ended(self) -> bool:
        """Whether this rank's part has ended, so that it waits for the others. This does not block."""
        return self._part is not None and self._part.ended(self._limit_s)

    def go_on(self) -> None:
        """Continue the save under way after every rank's part has ended. Collective. Raises as ``save`` does."""
        assert self._parts is not None
        self._part = None  # unless there is another one
        try:
            self._part = next(self._parts)
        except StopIteration as end:
            self._saved(self._iteration, end.value, time.perf_counter() - self._began)
        else:
            self._part.start()

    def wait(self, replacing: bool = False) -> None:
        """Wait until no save is under way, or if ``replacing`` one that waits to be tried again. Collective.

        Raises as ``save`` does.
        """
        while self._part is not None and not (replacing and self._part.pause):
            self._part.wait_for_all(world_group(), self._limit_s)
            self.go_on()
