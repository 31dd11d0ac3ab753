"""The saver saves synchronously or (--async-save) in the background, from a copy in host memory.

A background save is the synchronous one (checkpoint/saving.py), but a thread does its parts. The thread issues no
collectives. That this rank's part has ended travels with the step's scalars; when it has on all ranks, the main
threads run the collectives between two parts, at the end of that step. So only one thread uses the training's process
groups, a save needs no groups of its own, and all ranks learn of an error in the same step.

There is one save at a time. After a failed one there is a warning, and the training goes on. The next save is
synchronous: if it succeeds, all is well again; if it fails, too, that is an error. When the training ends or stops,
the saver waits for the last save, and tries once more if it failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

from megazero.checkpoint import store
from megazero.log.console import TrainConsole
from megazero.train.state.checkpointing import Checkpointing
from megazero.train.state.progress import Progress


class Saver:
    """Saves one run.

    saved: called on every rank when a checkpoint is complete, with its iteration, its path, and the seconds since the
    save began. limit_s: a background save fails if the disk does not move for so many seconds.
    """

    def __init__(
        self,
        checkpointing: Checkpointing,
        console: TrainConsole,
        saved: Callable[[int, Path, float], None],
        limit_s: float,
    ) -> None:
        self._checkpointing, self._console = checkpointing, console
        self._saved, self._limit_s = saved, limit_s
        self._in_background = checkpointing.config.checkpoint.async_save
        self._staging = store.Staging()
        self._parts: Generator[store.Part, None, Path] | None = None
        self._part: store.Part | None = None
        self._failed: store.CheckpointError | None = None
        self._began, self._iteration = 0.0, 0

    def save(self, progress: Progress) -> None:
        """Save, or begin to. Collective.

        Raises CheckpointError, the same on every rank, if that fails. If the save before this one failed, this one is
        complete on return.
        """
        self.wait()
        lost, self._failed = self._failed, None
        self._begin(progress)
        if lost is not None:
            self.wait()
            if self._failed is not None:
                raise self._failed
            self._console.warning(
                f"iteration {progress.iteration} is saved; the save before it failed: {lost}"
            )

    def finish(self, progress: Progress) -> None:
        """Wait until all is saved; save ``progress`` if the last save failed. Collective. Raises as ``save`` does."""
        self.wait()
        if self._failed is not None:
            self.save(progress)

    def _begin(self, progress: Progress) -> None:
        self._began, self._iteration = time.perf_counter(), progress.iteration
        if not self._in_background:
            self._complete(self._checkpointing.save(progress))
            return
        self._parts = self._checkpointing.saving(progress, self._staging)
        self._next_part()
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
        """Continue the save under way after every rank's part has ended, or warn that it failed. Collective."""
        try:
            self._next_part()
        except store.CheckpointError as error:
            self._part, self._failed = None, error
            self._console.warning(
                f"{error}. The training goes on; the next save is waited for, and ends it if it fails, too"
            )

    def wait(self) -> None:
        """Wait until no save is under way. Collective. A failure is a warning, and kept for the next save."""
        while self._part is not None:
            self._part.wait(self._limit_s)
            self.go_on()

    def export(self, iteration: int, folder: str) -> None:
        """Write the folder of --save-hf from the checkpoint of ``iteration``, once it is complete. Collective."""
        self.wait()
        began = time.perf_counter()
        written = self._checkpointing.export(iteration, Path(folder))
        seconds = time.perf_counter() - began
        self._console.note(f"wrote {written} in {seconds:.1f} s" if written else "--save-hf is there already")

    def _next_part(self) -> None:
        assert self._parts is not None
        try:
            self._part = next(self._parts)
        except StopIteration as end:
            self._part = None
            self._complete(end.value)
            return
        # A daemon: the process can end even if a disk hangs for ever.
        threading.Thread(target=self._part.run, name="save", daemon=True).start()

    def _complete(self, path: Path) -> None:
        self._saved(self._iteration, path, time.perf_counter() - self._began)
