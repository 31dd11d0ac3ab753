"""Heartbeats: what each rank is doing, and where its main thread is. From all of them follows who is missing.

The watchdog sends them. The beat of a lease (lease.py) is another thing: it shows other runs that this one lives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import FrameType

from megazero.bounded import load_json

# A thread that has one of these modules on its stack waits for other ranks.
# On CUDA the host waits where it reads the step's scalars.
WAITING = (
    f"torch{os.sep}distributed{os.sep}",
    *(
        f"megazero{os.sep}{os.path.join(*path)}"
        for path in (
            ("comm", "lane.py"),
            ("pp", "links.py"),
            ("tp", "collectives.py"),
            ("zero", "grad_norm.py"),
        )
    ),
)
INNERMOST = 8  # frames that are searched for them
BACKWARD = os.path.join("torch", "autograd", "graph.py")  # where a main thread is during a backward
_MESSAGE = re.compile(r"(activation|gradient) of micro-batch (\d+)")  # as pp/links.py writes it

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

    count: grows with every heartbeat. since: seconds for which the rank has not moved. awaits: the
    pipeline message that it waits for: from which rank, which message, since when (seconds since 1970).
    """

    rank: int
    count: int
    host: str
    pid: int
    since: float
    waiting: bool
    where: Where
    stack: str
    awaits: tuple[int, str, float] | None = None

    @property
    def words(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid}), in {in_words(self.where)}"


def read(text: str, rank: int) -> Heartbeat | None:
    """Return the heartbeat of a rank from the JSON of its fields, or None if it is none."""
    with suppress(ValueError, TypeError, LookupError):
        beat = Heartbeat(**{**load_json(text), "rank": rank})
        awaits = beat.awaits and (int(beat.awaits[0]), str(beat.awaits[1]), float(beat.awaits[2]))
        if all(type(getattr(beat, name)) in kinds for name, kinds in _KINDS.items()):
            return replace(beat, awaits=awaits or None, where={str(k): str(v) for k, v in beat.where.items()})
    return None


def missing_ranks(
    silent: Sequence[Heartbeat], busy: Sequence[Heartbeat], never: Sequence[int], known: Sequence[Heartbeat]
) -> str:
    """Return who is missing, and why it looks so.

    silent: their heartbeats stopped. busy: not in a collective. never: they sent no heartbeat.
    """
    found = [
        f"{each.words}: no answer, so its process is stopped or lost, or the link to it is" for each in silent
    ]
    found += [f"{each.words}: not in a collective but at {each.stack}" for each in busy]
    found += [f"rank {rank}: it never came" for rank in never]
    if not found:
        longest = max(known, key=lambda each: each.since)
        if pair := starved(known):
            waiting, sender = pair
            assert waiting.awaits is not None
            return (
                f"missing: {sender.words}: it waits, too, at {sender.stack}, but has not sent "
                f"{waiting.words} the {waiting.awaits[1]}"
            )
        return f"missing: none, all wait in collectives, longest {longest.words}, at {longest.stack}"
    return f"missing: {'; '.join(found)}"


def starved(known: Sequence[Heartbeat]) -> tuple[Heartbeat, Heartbeat] | None:
    """Return, of ranks that all wait, the one whose missing message holds up the others, and its sender.

    Each waiting rank points to the sender it waits for. The chain ends at a rank that waits for no message, or in a
    ring. A rank in the ring that waits for a gradient should have sent all activations up to its micro-batch: if one
    is missing, its receiver was starved. Otherwise the rank that began to wait first was: the others ran out later.
    """
    ranks = {each.rank: each for each in known}
    chain = [each for each in known if each.awaits is not None][:1]
    while chain and (awaits := chain[-1].awaits) is not None and awaits[0] in ranks:
        sender = ranks[awaits[0]]
        if sender in chain:
            ring = chain[chain.index(sender) :]
            due = [each for each in ring if _is_due(each, ranks)]
            first = min(due or ring, key=lambda each: each.awaits[2] if each.awaits else 0.0)
            return first, ranks[first.awaits[0]] if first.awaits else sender
        chain.append(sender)
    return (chain[-2], chain[-1]) if len(chain) > 1 else None


def _is_due(waiting: Heartbeat, ranks: Mapping[int, Heartbeat]) -> bool:
    """Tell whether a rank waits for an activation whose sender waits for a gradient of that micro-batch or later."""
    if waiting.awaits is None or (of_sender := ranks[waiting.awaits[0]].awaits) is None:
        return False
    here, there = (_MESSAGE.fullmatch(awaits[1]) for awaits in (waiting.awaits, of_sender))
    if here is None or there is None or (here[1], there[1]) != ("activation", "gradient"):
        return False
    return int(here[2]) <= int(there[2])


def in_words(where: Where) -> str:
    return ", ".join(value if name == "phase" else f"{name} {value}" for name, value in where.items())


def at_work(main: int, frames: Mapping[int, FrameType], pythons: Collection[int]) -> FrameType | None:
    """Return the innermost frame of what a rank does: the main thread's or, in a backward on CUDA, autograd's.

    There autograd has a thread for each device, which runs the hooks. Python did not start it. frames: of all threads
    by their ids. pythons: the ids of those that Python started.
    """
    frame = frames.get(main)
    if frame is None or not frame.f_code.co_filename.endswith(BACKWARD):
        return frame
    autograds = [each for ident, each in frames.items() if ident not in pythons]
    return next((each for each in autograds if waits(each)), next(iter(autograds), frame))


def waits(frame: FrameType | None) -> bool:
    """Tell whether a thread in this frame waits for other ranks."""
    files = [each.f_code.co_filename for each in islice(_frames(frame), INNERMOST)]
    return any(part in file for file in files for part in WAITING)


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
