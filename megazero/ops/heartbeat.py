"""Heartbeats: what each rank is doing, and where its main thread is. From all of them follows who is missing.

The watchdog sends them. The beat of a lease (lease.py) is another thing: it shows other runs that this one lives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from megazero.bounded import load_json

Where = Mapping[str, str]  # what a rank is doing: phase, action, unit, in words


# What a field may hold, of those that are counted with or printed.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "count": (int,),
    "host": (str,),
    "pid": (int,),
    "since": (int, float),
    "waiting": (bool,),
    "where": (dict,),
    "stack": (str,),
}


@dataclass(frozen=True)
class Heartbeat:
    """The last report of one rank.

    count: grows with every heartbeat. since: seconds for which the rank has not moved. waiting: for other ranks
    (mesh/waiting.py).
    """

    rank: int
    count: int
    host: str
    pid: int
    since: float
    waiting: bool
    where: Where
    stack: str

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"

    @property
    def words(self) -> str:
        return f"{self.who}, in {in_words(self.where)}"


def read(text: str, rank: int) -> Heartbeat | None:
    """Return the heartbeat of a rank from the JSON of its fields, or None if it is none."""
    with suppress(ValueError, TypeError, LookupError):
        beat = Heartbeat(**{**load_json(text), "rank": rank})
        if all(type(getattr(beat, name)) in kinds for name, kinds in _KINDS.items()):
            return replace(beat, where={str(k): str(v) for k, v in beat.where.items()})
    return None


def missing_ranks(
    silent: Sequence[Heartbeat], busy: Sequence[Heartbeat], never: Sequence[int], known: Sequence[Heartbeat]
) -> str:
    """Return who is missing, and why it looks so.

    silent: their heartbeats stopped. busy: not in a collective. never: they sent no heartbeat.
    """
    found = [
        f"{each.who}, last heard in {in_words(each.where)}: no answer, so its process is stopped or lost, or the "
        "link to it is"
        for each in silent
    ]
    found += [f"{each.words}: not in a collective but at {each.stack}" for each in busy]
    found += [f"rank {rank}: it never came" for rank in never]
    if not found:
        longest = max(known, key=lambda each: each.since)
        return f"missing: none, all wait in collectives, longest {longest.words}, at {longest.stack}"
    return f"missing: {'; '.join(found)}"


def in_words(where: Where) -> str:
    return ", ".join(value if name == "phase" else f"{name} {value}" for name, value in where.items())


def innermost(frame: FrameType | None) -> str:
    """Return the innermost frame in words, and the innermost one of megazero if that is another."""
    frames = list(_frames(frame))
    ours = [each for each in frames if f"{os.sep}megazero{os.sep}" in each.f_code.co_filename]
    shown = (
        f"{Path(f.f_code.co_filename).name}:{f.f_lineno} {f.f_code.co_name}" for f in (*frames[:1], *ours[:1])
    )
    return " in ".join(dict.fromkeys(shown))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
