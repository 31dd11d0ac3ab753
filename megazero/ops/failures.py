"""The failures that end a run: losses and gradients that are not finite, and ranks that died or hang.

The decision is the same on all ranks, or names the rank that it is about. A rank that stopped alone would leave the
others waiting in a collective until the time-out.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megazero.log.exit_status import ExitStatus

MOST_SKIPS = 10  # steps in a row


class NonFiniteLoss(RuntimeError):
    """The loss, or the gradient norm of too many steps in a row, was NaN or infinite."""

    exit_status = ExitStatus.NON_FINITE


@dataclass(frozen=True)
class LocalStep:
    """One rank's part of an iteration: its own loss (any normalisation) and the ids of its samples."""

    rank: int
    loss: float
    samples: tuple[int, ...]


class NonFiniteGuard:
    """Stops the run at a non-finite loss, and after MOST_SKIPS steps in a row with a non-finite gradient norm.

    The engine skips such steps. Those whose loss scale can still fall do not count.

    Both checks take values that are equal on all ranks (the reduced loss, the global norm), so all ranks decide
    alike. `gather` collects one object per rank into a list on every rank (as gather_objects does); it is called
    only when the run is about to stop.
    """

    def __init__(self) -> None:
        self.skipped_in_a_row = 0

    def check_loss(
        self, iteration: int, loss: float, local: LocalStep, gather: Callable[[LocalStep], list[LocalStep]]
    ) -> None:
        """Raise NonFiniteLoss, naming iteration, ranks, samples and the cure, if `loss` is not finite."""
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
    ) -> None:
        """Raise NonFiniteLoss if this is the MOST_SKIPS-th skipped step in a row.

        scale_can_fall: the step's loss scale was above its minimum, so a lower one may cure it.
        """
        if math.isfinite(norm) or scale_can_fall:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MOST_SKIPS:
            raise NonFiniteLoss(
                f"iteration {iteration}: the gradient norm is {norm}, and so {self.skipped_in_a_row} steps in a "
                f"row were skipped; {_culprits(gather(local))}. Resume from the last checkpoint with a lower "
                "--lr or in a wider number format"
            )


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
    """A collective failed because another rank died, hung or left. reported_elsewhere: another rank prints it."""

    exit_status = ExitStatus.RANK_LOST

    def __init__(self, text: str, reported_elsewhere: bool = False) -> None:
        super().__init__(text)
        self.reported_elsewhere = reported_elsewhere


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
def readable_failures(*, rank: int, host: str, timeout_s: float, phase: Callable[[], str]) -> Iterator[None]:
    """Turn the exception of a failed collective into a RankFailure. Other exceptions pass unchanged.

    The RankFailure names the rank, the host, the phase, the time-out, the cure, and the peer if the message has its
    address.

    phase() returns what this rank was doing ("backward of iteration 12").
    """
    try:
        yield
    except RuntimeError as error:
        meaning = collective_symptom(error)
        if meaning is None:
            raise
        peer = _PEER.search(str(error))
        who = f"the peer at {peer.group(1)}" if peer else "another rank"
        raise RankFailure(
            f"in {phase()}: a collective failed because of {who}: {meaning}, as rank {rank} on {host} sees it "
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


def reported_elsewhere(error: Exception) -> bool:
    """Tell whether another rank reports it. Most mistakes of users are the same on all ranks."""
    if isinstance(error, RankFailure):
        return error.reported_elsewhere
    return isinstance(error, ValueError) and not _first_to_report(f"{error}")


def _first_to_report(text: str) -> bool:
    """True on one of the ranks that fail with this text, and wherever the store no longer answers."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return True
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        return dist.distributed_c10d._get_default_store().add(f"megazero/reported/{digest}", 1) == 1
    except RuntimeError:
        return True
