"""The one error for everything wrong with a checkpoint. It is raised on every rank or on none."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from megazero.mesh.objects import gather_objects
from megazero.mesh.waiting import waiting

if TYPE_CHECKING:  # a checkpoint's description is read without torch
    import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read. The message names the cause and the cure."""


class SaveError(CheckpointError):
    """The storage did not take a checkpoint. ``error_number`` of it says why."""


def agree(group: dist.ProcessGroup | None, doing: str, action: Callable[[], T], *classes: type) -> list[T]:
    """Run ``action`` on every rank of ``group`` and return every rank's result, by rank.

    Raises CheckpointError with the same text on every rank when it failed on any. The results are sent, so keep them
    small; they are values of ``gather_objects``, of which ``classes`` are. Without a group the one result is returned
    in a list.
    """
    result, failures = _run(group, action)
    answers: list = [(result, failures)]
    if group is not None:
        answers = gather_objects((result, failures), *classes, group=group)
    merged = {rank: failure for _, failed in answers for rank, failure in failed.items()}
    if merged:
        texts = {rank: text for rank, (text, _) in merged.items()}
        codes = [code for _, code in merged.values() if code is not None]
        # The cause, for who decides by it: a full disk ends a run with another status than a wrong path.
        cause = OSError(codes[0], os.strerror(codes[0])) if codes else None
        raise CheckpointError(f"{doing}: {_by_cause(texts, len(answers))}") from cause
    return [value for value, _ in answers]


def agree_local(group: dist.ProcessGroup | None, doing: str, action: Callable[[], T]) -> T:
    """Do the same as ``agree``, but return each rank's own result, which is not sent."""
    results: list[T] = []
    agree(group, doing, lambda: results.append(action()))
    return results[0]


def first_bytes(group: dist.ProcessGroup | None, doing: str, action: Callable[[], bytes]) -> bytes:
    """Return on every rank of ``group`` what ``action`` returns on the first, the only one that runs it.

    Raises CheckpointError with the same text on every rank when it failed.
    """
    import torch
    import torch.distributed as dist

    made: list[bytes] = []

    def act() -> int:
        if group is None or dist.get_rank(group) == 0:
            made.append(action())
        return len(made[0]) if made else 0

    size = agree(group, doing, act)[0]
    if group is None:
        return made[0]
    data = (
        torch.frombuffer(bytearray(made[0]), dtype=torch.uint8)
        if made
        else torch.empty(size, dtype=torch.uint8)
    )
    with waiting:
        dist.broadcast(data, dist.get_global_rank(group, 0), group=group)
    return data.numpy().tobytes()


Failure = tuple[str, int | None]  # text, and the operating system's number for it


def _run(group: dist.ProcessGroup | None, action: Callable[[], T]) -> tuple[T | None, dict[int, Failure]]:
    """Return the result of ``action``, or None and the causes by rank."""
    import torch.distributed as dist

    try:
        return action(), {}
    except Exception as error:
        return None, {dist.get_rank(group) if group is not None else 0: _failure(error)}


def _failure(error: BaseException) -> Failure:
    return _text(error), error_number(error)


def error_number(error: BaseException | None) -> int | None:
    """Return the number of the first OSError among ``error`` and what caused it, or None."""
    while error is not None and not (isinstance(error, OSError) and error.errno):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error.errno if isinstance(error, OSError) else None


def _text(error: BaseException) -> str:
    return f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _by_cause(failures: dict[int, str], world_size: int) -> str:
    """Return 'cause' if all ranks have the same or there is one rank, else 'rank 1, 3: cause; rank 2: other'."""
    causes: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        causes.setdefault(text, []).append(rank)
    if len(causes) == 1 and len(failures) == world_size:
        return next(iter(causes))
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in causes.items())
