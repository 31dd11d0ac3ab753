"""This module holds what stops a run: exit conditions, signals, non-finite losses and gradients, and dead ranks.

Every decision is the same on all ranks, or says which rank it is about. A rank that stopped alone would leave the
others waiting in a collective until the time-out.
"""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any, Self

from megazero.train.exit_status import ExitStatus

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignals:
    """Notes a signal instead of dying of it, so that the step is finished and a checkpoint is saved.

    Use it as a context manager in the main thread. A second SIGINT raises KeyboardInterrupt at once; a second one of
    the other signals changes nothing. The old handlers come back at the end.
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self.received: signal.Signals | None = None
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signal handlers can only be installed in the main thread")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)


@dataclass(frozen=True, kw_only=True)
class ExitConditions:
    """Decides when to save a checkpoint and stop before the last iteration.

    exit_interval: the run stops at iterations that this number divides. exit_duration_in_mins: the run stops once it
    has lasted that long since `began` (for example time.monotonic() of the process's start). signals: the run stops
    when one was received. halt: the run stops at this iteration, for this reason. kill_switch: the run stops when
    there is a file of this name.

    In every iteration the ranks tell each other whether they have a reason of their own, with the step's scalars.
    What comes after that counts in the next iteration.
    """

    exit_interval: int | None = None
    exit_duration_in_mins: float | None = None
    signals: StopSignals | None = None
    halt: tuple[int, str] | None = None
    kill_switch: str | None = None
    began: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if self.exit_interval is not None and self.exit_interval < 1:
            raise ValueError(f"--exit-interval {self.exit_interval} must be at least 1")
        if self.exit_duration_in_mins is not None and not self.exit_duration_in_mins > 0:
            raise ValueError(f"--exit-duration-in-mins {self.exit_duration_in_mins} must be above 0")

    def reason(self, iteration: int, own: str | None, any_rank: bool) -> str | None:
        """Return why to stop after `iteration`, or None. Every rank gets the same answer to whether to stop.

        own: what `own_reason` returned in this iteration. any_rank: whether it returned a reason on some rank.
        """
        if any_rank:
            return (
                own
                or "another rank received a signal, reached --exit-duration-in-mins or saw its kill switch"
            )
        if self.halt is not None and iteration >= self.halt[0]:
            return self.halt[1]
        if self.exit_interval is not None and iteration % self.exit_interval == 0:
            return f"iteration {iteration} is a multiple of --exit-interval {self.exit_interval}"
        return None

    def own_reason(self) -> str | None:
        """Return why this rank would stop now: a signal, or the time that the run has lasted."""
        if self.signals is not None and self.signals.received is not None:
            return f"received {self.signals.received.name}"
        if self.kill_switch is not None and os.path.exists(self.kill_switch):
            return f"--kill-switch-path {self.kill_switch} is there"
        minutes = (self.clock() - self.began) / 60
        if self.exit_duration_in_mins is not None and minutes >= self.exit_duration_in_mins:
            return f"ran {minutes:.1f} minutes, --exit-duration-in-mins is {self.exit_duration_in_mins:g}"
        return None


class NotStarted(Exception):
    """The run was told not to begin. That is no failure."""

    exit_status = ExitStatus.SWITCHED_OFF


class NonFiniteLoss(RuntimeError):
    """The loss, or the gradient norm of too many steps in a row, was NaN or infinite."""

    exit_status = ExitStatus.NON_FINITE


@dataclass(frozen=True)
class LocalStep:
    """One rank's part of an iteration. It has the rank's own loss (any normalisation) and the ids of its samples."""

    rank: int
    loss: float
    samples: tuple[int, ...]


class NonFiniteGuard:
    """Stops the run at non-finite losses, and skips steps with a non-finite gradient norm.

    A non-finite loss is an error at once. A non-finite gradient norm skips the step, and `max_skips` skipped steps in
    a row are an error. Steps whose loss scale can still fall do not count.

    Both checks take values that are equal on all ranks (the reduced loss, the global norm), so all ranks decide
    alike. `gather` collects one object per rank into a list on every rank (as all_gather_object does); it is called
    only when the run is about to stop.
    """

    def __init__(self, max_skips: int = 10) -> None:
        if max_skips < 1:
            raise ValueError(f"{max_skips} skipped steps in a row as the limit; give at least 1")
        self.max_skips = max_skips
        self.skipped_in_a_row = 0

    def check_loss(
        self, iteration: int, loss: float, local: LocalStep, gather: Callable[[LocalStep], list[LocalStep]]
    ) -> None:
        """Raises NonFiniteLoss, naming iteration, ranks, samples and the cure, if `loss` is not finite."""
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"iteration {iteration}: the loss is {loss}; {_culprits(gather(local))}. The weights of the last "
                "checkpoint are unharmed: resume from it with a lower --lr, a longer warm-up or a smaller "
                "--clip-grad, and look at the samples named (--data-path)"
            )

    def check_norm(
        self,
        iteration: int,
        norm: float,
        local: LocalStep,
        gather: Callable[[LocalStep], list[LocalStep]],
        scale_can_fall: bool = False,
    ) -> bool:
        """Return True if the step is to be skipped. Raises NonFiniteLoss after `max_skips` skipped steps in a row.

        scale_can_fall: the step's loss scale was above its minimum, so that a lower one may cure it.
        """
        if math.isfinite(norm) or scale_can_fall:
            self.skipped_in_a_row = 0
            return not math.isfinite(norm)
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.max_skips:
            raise NonFiniteLoss(
                f"iteration {iteration}: the gradient norm is {norm}, and so {self.skipped_in_a_row} steps in a "
                f"row were skipped; {_culprits(gather(local))}. Resume from the last checkpoint with a lower "
                "--lr or in a wider number format"
            )
        return True


def _culprits(steps: Sequence[LocalStep]) -> str:
    bad = [step for step in steps if not math.isfinite(step.loss)]
    if not bad:
        return "every rank's own loss is finite, so it overflowed in a sum or in the backward pass"
    named = "; ".join(f"rank {s.rank} (loss {s.loss}, samples {_shortened(s.samples)})" for s in bad[:8])
    return f"it came from {named}" + (f" and {len(bad) - 8} more ranks" if len(bad) > 8 else "")


def _shortened(samples: Sequence[int]) -> str:
    shown = ", ".join(str(sample) for sample in samples[:16])
    return f"{shown} and {len(samples) - 16} more" if len(samples) > 16 else shown


class RankFailure(RuntimeError):
    """A collective failed because another rank died, hung or left."""

    exit_status = ExitStatus.RANK_LOST


# What gloo, NCCL and the store say (torch 2.11 to 2.13), lower case, and what it means.
_SYMPTOMS: Mapping[str, str] = {
    "connection closed by peer": "its process ended",
    "connection reset by peer": "its process ended",
    "broken pipe": "its process ended",
    "connection refused": "its process ended",
    "ncclremoteerror": "its process ended",
    "timed out waiting": "it did not reach this collective within the time-out",
    "application timeout": "it did not reach an earlier collective within the time-out",
    "wait timeout after": "it did not reach this point within the time-out",
    "collective operation timeout": "it did not reach this collective within the time-out",
    "socket timeout": "it did not answer within the time-out",
    "communicator was aborted": "an earlier collective failed",
    "heartbeat": "its monitor stopped answering",
}
# Classes that mean it whatever they say, by name: importing them would import torch.
_COLLECTIVE_ERRORS = ("DistNetworkError", "DistStoreError", "DistBackendError", "CommunicationError")
_PEER = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")


@contextmanager
def readable_failures(
    *,
    rank: int,
    host: str,
    timeout_s: float,
    phase: Callable[[], str],
    hosts: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Turns the exception of a collective that failed under it into a RankFailure. Other exceptions pass unchanged.

    The RankFailure names the rank, the host, the phase, the time-out, the peer if the message tells its address, and
    the cure.

    phase() returns what this rank was doing ("backward of iteration 12"). hosts maps an address to a name with ranks
    ("10.0.0.2" -> "node2, ranks 8-15").
    """
    try:
        yield
    except RuntimeError as error:
        meaning = collective_symptom(error)
        if meaning is None:
            raise
        peer = _PEER.search(str(error))
        address = peer.group(1) if peer else None
        who = f"the peer at {hosts.get(address, address)}" if address else "another rank"
        raise RankFailure(
            f"rank {rank} on {host}, in {phase()}: a collective failed because of {who}: {meaning} "
            f"(time-out {timeout_s:g} s). The first error in that rank's log is the cause; if no rank reports "
            "one, look for a killed process (out of memory, preemption) or a broken link. If ranks are only "
            "slow, raise --distributed-timeout-minutes. Restart from the last checkpoint with --load. "
            f"Message: {_first_line(error)}"
        ) from error


def collective_symptom(error: BaseException) -> str | None:
    """Return what a failed collective's exception says about the other rank, or None if the exception is not one."""
    if isinstance(error, RankFailure):
        return None
    text = str(error).lower()
    for symptom, meaning in _SYMPTOMS.items():
        if symptom in text:
            return meaning
    if any(parent.__name__ in _COLLECTIVE_ERRORS for parent in type(error).__mro__):
        return "the communication between them failed"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
