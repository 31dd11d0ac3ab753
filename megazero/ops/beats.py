"""What ranks say of themselves in a heartbeat, where a thread stands, and who is missing, in words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

# Where a main thread stands that waits for others: modules in whose frames the wait is.
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
INNERMOST = 8  # frames that are looked at for it
_MESSAGE = re.compile(r"(activation|gradient) of micro-batch (\d+)")  # as pp/links.py says it

Where = Mapping[str, str]  # what a rank says of itself: phase, action, unit, in words


@dataclass(frozen=True)
class Beat:
    """What one rank last said. ``count`` grows with every beat; ``since`` is how long it has not moved, in seconds.

    ``start`` is when its process started, in clock ticks since the host did: with it, a process id of this host
    means this process and no other. ``awaits`` is the message of a pipeline that it waits for: whose, which, and
    since when, in seconds since 1970.
    """

    rank: int
    count: int
    host: str
    pid: int
    start: int
    since: float
    waiting: bool
    where: Where
    stack: str
    awaits: tuple[int, str, float] | None = None

    @property
    def words(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid}), in {in_words(self.where)}"


def missing_ranks(
    silent: Sequence[Beat], busy: Sequence[Beat], never: Sequence[int], known: Sequence[Beat]
) -> str:
    """Who is missing, and why it looks so.

    silent: no beat came. busy: not in a collective. never: no beat ever came.
    """
    said = [
        f"{beat.words}: no answer, so its process is stopped or lost, or the link to it is" for beat in silent
    ]
    said += [f"{beat.words}: not in a collective but at {beat.stack}" for beat in busy]
    said += [f"rank {rank}: it never came" for rank in never]
    if not said:
        longest = max(known, key=lambda beat: beat.since)
        if starving := starved(known):
            waiting, owing = starving
            assert waiting.awaits is not None
            return (
                f"missing: {owing.words}: it waits, too, at {owing.stack}, but owes {waiting.words} the "
                f"{waiting.awaits[1]}"
            )
        return f"missing: none, all wait in collectives, longest {longest.words}, at {longest.stack}"
    return f"missing: {'; '.join(said)}"


def starved(known: Sequence[Beat]) -> tuple[Beat, Beat] | None:
    """Of ranks that all wait, the one without whose message the others would not, and who owes it.

    From a rank that waits for a message one comes to the rank that owes it, and so on: to one that waits for no
    message, or into a ring. Who waits there for a gradient has sent all activations up to its micro-batch, or should
    have. Else, in the ring, the one that began to wait first was starved: the others ran out later.
    """
    beats = {beat.rank: beat for beat in known}
    way = [beat for beat in known if beat.awaits is not None][:1]
    while way and (awaits := way[-1].awaits) is not None and awaits[0] in beats:
        other = beats[awaits[0]]
        if other in way:
            ring = way[way.index(other) :]
            due = [each for each in ring if _is_due(each, beats)]
            first = min(due or ring, key=lambda beat: beat.awaits[2] if beat.awaits else 0.0)
            return first, beats[first.awaits[0]] if first.awaits else other
        way.append(other)
    return (way[-2], way[-1]) if len(way) > 1 else None


def _is_due(waiting: Beat, beats: Mapping[int, Beat]) -> bool:
    """Whether a rank waits for an activation whose sender waits for a gradient of that micro-batch or a later one."""
    if waiting.awaits is None or (owing := beats[waiting.awaits[0]].awaits) is None:
        return False
    here, there = (_MESSAGE.fullmatch(awaits[1]) for awaits in (waiting.awaits, owing))
    if here is None or there is None or (here[1], there[1]) != ("activation", "gradient"):
        return False
    return int(here[2]) <= int(there[2])


def in_words(where: Where) -> str:
    return ", ".join(value if name == "phase" else f"{name} {value}" for name, value in where.items())


def waits(frame: FrameType | None) -> bool:
    """Whether a thread in this frame is waiting for other ranks."""
    files = [each.f_code.co_filename for each in islice(_frames(frame), INNERMOST)]
    return any(part in file for file in files for part in WAITING)


def innermost(frame: FrameType | None) -> str:
    """The innermost frame in words, and the innermost one of megazero if that is another."""
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


def started(pid: int) -> int:
    """When a process of this host started, in clock ticks since the host did; 0 if there is none."""
    fields = _stat(f"/proc/{pid}/stat")
    return int(fields[19]) if fields else 0


def is_held(pid: int) -> bool:
    """Whether the main thread of a process is stopped: a debugger may hold it alone, and the others go on."""
    return _stat(f"/proc/{pid}/task/{pid}/stat")[:1] in (["t"], ["T"])


def _stat(path: str) -> list[str]:
    """What the kernel says of a process or thread, from its state on; nothing if there is none."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []
