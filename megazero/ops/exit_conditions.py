"""Exit conditions, which stop a run before its last iteration: signals, limits, the kill switch. No torch is needed.

Every decision is the same on all ranks: a rank that stopped alone would leave the others waiting in a collective.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from megazero.config.options.sections import TrainingConfig
from megazero.config.options.skipping import due
from megazero.log.exit_status import ExitStatus

SAME_S = 1.0  # within which a second signal is the first one again: the terminal's, handed on by torchrun
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class NotStarted(BaseException):  # as KeyboardInterrupt: no handler of errors on the way may swallow it
    """The run may not begin, or stops before it has trained. There is nothing to save."""

    def __init__(self, text: str, exit_status: ExitStatus = ExitStatus.SWITCHED_OFF) -> None:
        super().__init__(text)
        self.exit_status = exit_status


class StopSignals:
    """Records a signal instead of dying of it, so that the step is finished and a checkpoint is saved.

    Use it as a context manager in the main thread; at its end the old handlers come back. Before ``hold()`` there is
    nothing to finish or save: a signal raises NotStarted at once. Afterwards it is recorded. A second SIGINT, more
    than SAME_S seconds later, raises KeyboardInterrupt at once; other signals that follow change nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._held, self._at = False, 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signal handlers can only be installed in the main thread")
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def hold(self) -> None:
        """Record signals from now on: training begins, or the run ends with an error and keeps its status."""
        self._held = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT and self._held and time.monotonic() - self._at > SAME_S:
                raise KeyboardInterrupt
            return
        self.received, self._at = signal.Signals(number), time.monotonic()
        if not self._held:
            raise NotStarted(
                f"received {self.received.name} during the start: nothing was trained, nothing is to be saved",
                ExitStatus.STOPPED,
            )


@dataclass(frozen=True, kw_only=True)
class ExitConditions:
    """Decides when to save a checkpoint and stop before the last iteration.

    exit_interval: the run stops at multiples of this number; if a skipped range holds one, after that range.
    exit_duration_in_mins: the run stops once it has lasted that long since `began` (time.monotonic() at the start of
    the process). signals: the run stops when one was received. halt: the run stops at this iteration, for this
    reason. kill_switch: the run stops when a file of this name exists.

    Ranks exchange whether they have a reason of their own: in every iteration with the step's scalars, and between
    the batches of an evaluation.
    """

    exit_interval: int | None = None
    exit_duration_in_mins: float | None = None
    signals: StopSignals | None = None
    halt: tuple[int, str] | None = None
    kill_switch: str | None = None
    began: float = 0.0
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(
        cls, training: TrainingConfig, signals: StopSignals | None, halt: tuple[int, str] | None, began: float
    ) -> Self:
        """Return the conditions that a run's flags ask for."""
        return cls(
            exit_interval=training.exit_interval,
            exit_duration_in_mins=training.exit_duration_in_mins,
            signals=signals,
            halt=halt,
            kill_switch=training.kill_switch_path,
            began=began,
        )

    @property
    def can_stop_at_once(self) -> bool:
        """Whether any condition could stop the run between two planned iterations."""
        return any(each is not None for each in (self.signals, self.exit_duration_in_mins, self.kill_switch))

    def agreed_reason(self, own: str | None, any_rank: bool) -> str | None:
        """Return why to save and stop at once, or None. All ranks agree on whether to stop.

        own: what `own_reason` returned. any_rank: whether it returned a reason on some rank.
        """
        others = "another rank received a signal, reached --exit-duration-in-mins or saw its kill switch"
        return own or others if any_rank else None

    def planned(self, since: int, iteration: int) -> str | None:
        """Return why to stop after this iteration and what belongs to it, or None. ``since`` is as in ``due``."""
        if self.halt is not None and iteration >= self.halt[0]:
            return self.halt[1]
        if self.exit_interval is not None and due(self.exit_interval, since, iteration):
            multiple = iteration - iteration % self.exit_interval
            return f"iteration {multiple} is a multiple of --exit-interval {self.exit_interval}"
        return None

    def own_reason(self) -> str | None:
        """Return why this rank would stop now: a signal, the kill switch, or the time that the run has lasted."""
        if self.signals is not None and self.signals.received is not None:
            return f"received {self.signals.received.name}"
        if self.kill_switch is not None and os.path.exists(self.kill_switch):
            return f"--kill-switch-path {self.kill_switch} is there"
        minutes = (self.clock() - self.began) / 60
        if self.exit_duration_in_mins is not None and minutes >= self.exit_duration_in_mins:
            return f"ran {minutes:.1f} minutes, --exit-duration-in-mins is {self.exit_duration_in_mins:g}"
        return None
