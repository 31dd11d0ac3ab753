"""The meeting point: members post what they are, have and wait for, again and again, and are told what follows.

A post is a member's whole state. So nothing hangs on an answer that was lost, and a point that starts anew and
empty knows all again when each has posted once. The rules are in ``Meetings``, which sees no network; its times are
seconds of the point's clock alone.

A room has one verdict. It is done when the first of its seats has all messages; the others get theirs from whoever
has them. It opens again if a message is reported as lost before any has all, or if all that had all have died. Each
closing has a line, a random name, so an anchor is known by the line that made it: one that was made in a room which
opened again is a stray, and is replaced.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from megazero.comm.rooms.channel import Listener, SealedChannel

SUSPECT = 0.1  # of a member's silence: that it has to be heard again
BLAMED = 2  # times; then a meeting takes place without it: a rank of it hangs, or there is no way to it
KEPT = 8  # rooms of past meetings
ANCHOR = ("number", "line", "last", "about")  # what is told of others' anchor
SEAT = ("name", "header", "message", "wires")  # and of a seat


@dataclass(frozen=True)
class Post:
    """What a member posts. id: of this start of it. wires: by number, the address of the rank that shows it.

    name, same, least, call_s, patience_s, silence_s: see member.RoomSettings. run, number, line, last: see
    member.Standing. digest, about: of the anchor. header: of the seat that it takes in the room of ``number``;
    message: the name of its messages there. have: the line of the room of which it has all messages. lost: a line,
    and the names whose messages of it cannot be had. left: it has ended in good order.
    """

    name: str
    id: str
    same: Mapping[str, str]
    wires: Mapping[str, Sequence[Any]]
    least: int
    call_s: float
    patience_s: float
    silence_s: float
    run: str = ""
    number: int = 0
    line: str = ""
    last: Sequence[str] = ()
    digest: str = ""
    about: str = ""
    header: str | None = None
    message: str = ""
    have: str = ""
    lost: Sequence[Any] = ("", ())
    left: bool = False


@dataclass
class Seen:
    """A member as the point knows it. since: when it took its seat. stray: its anchor is not of the run's line.

    suspect: until it is heard again.
    """

    state: Post
    heard: float
    since: float
    stray: bool = False
    suspect: bool = False


@dataclass
class Room:
    """Of one meeting. line, seats: since it closed. holders: ids of those that have all messages.

    blamed: names whose messages were lost, once for each time that the room opened again.
    """

    line: str = ""
    seats: list[Post] = field(default_factory=list)
    holders: set[str] = field(default_factory=set)
    blamed: list[str] = field(default_factory=list)


def enough(names: set[str], last: set[str], least: int) -> bool:
    """Return whether these may meet. last: names of the last meeting that have not left.

    By default more than half of ``last``, or just half with its lowest name: of two parts one goes on.
    """
    if least:
        return len(names) >= least
    here = names & last
    return 2 * len(here) > len(last) - (min(last, default="") in here) if last else True


class Meetings:
    """What the members of one run have posted, and what follows."""

    def __init__(self, now: float) -> None:
        self.members: dict[str, Seen] = {}
        self.rooms: dict[int, Room] = {}
        self.run = ""
        self.began = self.last = now  # began: since when members of an older run are heard

    def look(self, state: Post, now: float) -> dict[str, Any]:
        """Take a member's state and return its view: ``refused`` with the reason, or what it needs to go on."""
        if now - self.last > state.silence_s / 2:  # this process was stopped or cut off
            self.began = now
        self.last = now
        others = [seen for seen in self._live(now) if seen.state.name != state.name]
        if refusal := self._refusal(state, now, others):
            return refusal
        self._note(state, now, others)
        live = self._live(now)
        latest = max((seen.state.number for seen in live if not seen.stray), default=state.number)
        stray = self.members[state.name].stray
        behind = stray or state.number < latest
        view: dict[str, Any] = {"run": self.run, "behind": behind, "called": False, "missing": ""}
        if behind:
            ahead = [each.state for each in others if each.state.number == latest and not each.stray]
            view["sources"] = [each.wires for each in ahead]
            view["anchor"] = {key: getattr(ahead[0], key) for key in ANCHOR} if ahead else {}
        elif not state.left:
            view |= self._settle(state, now)
        view["lag"] = [each.state.name for each in others if each.state.number < state.number]
        room = self.rooms.get(state.number, Room())
        if any(seat.id == state.id for seat in room.seats) or room.seats and behind and not stray:
            seats = [{key: getattr(seat, key) for key in SEAT} for seat in room.seats]
            view["room"] = {"line": room.line, "done": bool(room.holders), "seats": seats}
        self.rooms = {number: room for number, room in self.rooms.items() if number >= latest - KEPT}
        return view

    def suspect(self, state: Post, now: float) -> None:
        """Wait for a member SUSPECT of its silence: its process is gone, or others cannot get what it shows."""
        held = self.members.get(state.name)
        if held and held.state.id == state.id:
            held.heard, held.suspect = min(held.heard, now - state.silence_s * (1 - SUSPECT)), True

    def _live(self, now: float) -> list[Seen]:
        seen = self.members.values()
        return [each for each in seen if now - each.heard < each.state.silence_s and not each.state.left]

    def _refusal(self, state: Post, now: float, others: Sequence[Seen]) -> dict[str, Any]:
        """Return why a member may not take part. again: it may be let in later."""
        held = self.members.get(state.name)
        if held and held.state.id != state.id and held in self._live(now):
            return {"refused": f"the name {state.name!r} is that of a replica that is here", "again": True}
        if state.run and self.run and state.run != self.run and others:
            return {"refused": f"it is of the run {state.run}, and here the run {self.run} meets"}
        for each in (other.state for other in others):
            for key in sorted({*state.same, *each.same}):
                own, theirs = state.same.get(key), each.same.get(key)
                if own != theirs:
                    return {"refused": f"its {key} is {own}, that of replica {each.name!r} is {theirs}"}
            if (state.number, state.line) == (each.number, each.line) and state.digest != each.digest:
                return {
                    "refused": f"its anchor of meeting {state.number} has the hash {state.digest}, that of replica "
                    f"{each.name!r} has {each.digest}: start from the same weights, or load a checkpoint of this run"
                }
        return {}

    def _note(self, state: Post, now: float, others: Sequence[Seen]) -> None:
        if self.run != state.run and state.run:
            self.run, self.rooms = state.run, {}
        if not self.run:
            self.run, self.began = secrets.token_hex(8), -float("inf")
        held = self.members.get(state.name)
        seen = self.members[state.name] = Seen(state, now, now)
        if (
            held
            and held.state.header is not None
            and (held.state.id, held.state.number) == (state.id, state.number)
        ):
            seen.since = held.since
        if state.number:
            made = self.rooms.setdefault(state.number - 1, Room())
            if not made.line or made.line != state.line and all(each.stray for each in others):
                made.line, made.seats = state.line, []
            seen.stray = made.line != state.line
            if not seen.stray:
                made.holders.add(state.id)

    def _settle(self, state: Post, now: float) -> dict[str, Any]:
        """Close the room of a member's meeting, give its verdict or open it again. Returns what to say of it."""
        room = self.rooms.setdefault(state.number, Room())
        if room.line:
            here = self._here(state.number, now)
            ids = {seen.state.id for seen in here}
            room.holders |= {seen.state.id for seen in here if seen.state.have == room.line}
            lost = {name for seen in here if seen.state.lost[0] == room.line for name in seen.state.lost[1]}
            if room.holders & ids or not (room.holders or lost) and ids & {seat.id for seat in room.seats}:
                return {}
            for name in lost & self.members.keys():
                self.suspect(self.members[name].state, now)
            room = self.rooms[state.number] = Room(blamed=[*room.blamed, *lost])
        here = [seen for seen in self._here(state.number, now) if room.blamed.count(seen.state.name) < BLAMED]
        seats = [seen for seen in here if seen.state.header is not None and not seen.suspect]
        names = {seen.state.name for seen in seats}
        waited = {seen.state.name for seen in here} - names
        last = {*state.last} - {name for name, seen in self.members.items() if seen.state.left}
        missing = ""
        if not enough(names, last, max((seen.state.least for seen in seats), default=0)):
            missing = f"{', '.join(sorted(names)) or 'nobody'} there, too few to meet: " + (
                f"at least {state.least} are needed" if state.least else f"{', '.join(sorted(last))} met last"
            )
        elif waited and not any(now - seen.since > seen.state.patience_s for seen in seats):
            missing = f"waiting for {', '.join(sorted(waited))}"
        elif not (last and last <= names) and now - self.began < max(
            (each.state.silence_s for each in here), default=0.0
        ):
            missing = "the meeting point is new, others may still come to it"
        elif seats:
            room.line = f"{state.number}.{secrets.token_hex(8)}"
            room.seats = sorted((seen.state for seen in seats), key=lambda seat: seat.name)
        called = state.header is None and any(now - seen.since > seen.state.call_s for seen in seats)
        return {"called": called and not room.line, "missing": missing}

    def _here(self, number: int, now: float) -> list[Seen]:
        return [seen for seen in self._live(now) if seen.state.number == number and not seen.stray]


class Point:
    """The meeting point as a server."""

    def __init__(self, port: int, secret: bytes, refused: Callable[[str], None] = lambda host: None) -> None:
        """refused: called with the host of a stranger. Raises OSError if the port is taken."""
        self.meetings, self._lock = Meetings(time.monotonic()), threading.Lock()
        self._posted: dict[str, tuple[SealedChannel, Post]] = {}  # by name, where a member posted last
        self._listener = Listener(port, secret, self._answer, self._ended, refused)
        self.port = self._listener.port

    def _answer(self, channel: SealedChannel, words: Any) -> None:
        try:
            state = Post(**words)
        except TypeError as error:
            channel.say({"refused": f"the meeting point is of another version of megazero ({error})"})
            return
        with self._lock:
            view = self.meetings.look(state, time.monotonic())
            self._posted[state.name] = channel, state
        channel.say(view)

    def _ended(self, channel: SealedChannel) -> None:
        """Notice at once that a process has died: its connection ends."""
        with self._lock:
            for last, state in self._posted.values():
                if last is channel:
                    self.meetings.suspect(state, time.monotonic())

    def here(self) -> list[str]:
        """Return a line for each member that is here."""
        with self._lock:
            live = self.meetings._live(time.monotonic())
        return [f"{seen.state.name}: meeting {seen.state.number}" for seen in live]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
