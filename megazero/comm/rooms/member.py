"""A launch's side of the rooms. Rank 0, its leader, talks with the meeting point; every rank shows its own wires'
bytes and fetches others' of the same wires. Methods marked "Collective" are called on all ranks of the launch
alike.

A wire is a slice of the model that every launch cuts alike (with equal layouts: a rank's), by a number. Messages of a
wire have the same number of bytes in every launch and meeting.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch

from megazero.comm.rooms.channel import Address, Listener, Refused, SealedChannel, own_host, reach
from megazero.comm.rooms.point import Post
from megazero.comm.rooms.shelf import Shelf, Shown, fetch

POST_S = 0.05  # between two posts in a meeting
LOOK_S = 0.5  # that ranks wait for the leader's word, at most
HEADER = 4096  # bytes
STREAMS = 16  # fetches at a time
TOLD = ("name", "same", "least", "call_s", "patience_s", "silence_s")  # what the point knows of the settings

Ready = Callable[[Mapping[str, Any]], Any]
Wires = Mapping[str, Sequence[Any]]  # by number, the address of the rank that shows it


class RoomLost(RuntimeError):
    """No meeting came about within ``give_up_s``; the message says who was missing."""


@dataclass(frozen=True)
class RoomSettings:
    """Where and with whom a launch meets.

    point: host and port of ``megazero meet``. name: this launch's; seats are in order of names. secret: the run's;
    empty only for a point on this host. same: what has to be equal in all launches, by the words in which a refusal
    names it. least: fewer do not meet; 0: more than half of those of the last meeting, or half with the lowest name
    of them. Seconds: call_s, that a launch sits in a room before it calls the others; patience_s, before it meets
    without them; silence_s, without a byte, after which a launch counts as dead; give_up_s, that anything is waited
    for. journal: meetings whose messages are kept for launches that are behind.
    """

    point: Address
    name: str
    secret: bytes
    same: Mapping[str, str]
    least: int = 0
    call_s: float = 10.0
    patience_s: float = 60.0
    silence_s: float = 10.0
    give_up_s: float = 1800.0
    journal: int = 4


@dataclass(frozen=True)
class Standing:
    """Where a launch stands; a checkpoint holds it.

    run: "": of none yet. number: of its next meeting. line: of the meeting that made its anchor. last: who met there.
    """

    run: str = ""
    number: int = 0
    line: str = ""
    last: tuple[str, ...] = ()


@dataclass(frozen=True)
class Offer:
    """What this rank shows of its anchor. digests: by wire, a hash of the slice. about: rank 0's words on the
    anchor, at most HEADER bytes. pieces: by wire, its bytes, which rest until ``changing``.
    """

    digests: Mapping[int, str]
    about: bytes = b""
    pieces: Mapping[int, Shown] = field(default_factory=dict)


@dataclass(frozen=True)
class Seat:
    """What one launch brought. messages: uint8 [bytes] on the host, of this rank's wires."""

    name: str
    header: bytes
    messages: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Met:
    """A meeting that took place, with its seats in order of names. own: the index of this launch's, or None."""

    number: int
    line: str
    seats: tuple[Seat, ...]
    own: int | None


@dataclass(frozen=True)
class Fetched:
    """Another launch's anchor, after meeting number - 1; its bytes are in the memory that was given for them."""

    number: int
    line: str
    last: tuple[str, ...]
    about: bytes


class Pulse(threading.Thread):
    """Posts the leader's state, again and again, and keeps the view that it got last. A lost point is looked for."""

    def __init__(self, settings: RoomSettings, state: Post) -> None:
        super().__init__(daemon=True, name="pulse")
        self._settings, self._state, self._serial = settings, state, 0
        self._view: dict[str, Any] = {"missing": f"no answer yet of the meeting point {settings.point}"}
        self._answered, self._closed, self._changed = -1, False, threading.Condition()
        self.start()

    def post(self, **changes: Any) -> None:
        with self._changed:
            self._state, self._serial = replace(self._state, **changes), self._serial + 1
            self._changed.notify_all()

    def look(self, ready: Ready, seconds: float) -> dict[str, Any] | None:
        """Return the answer to what was posted last once it is ready, or None after so many seconds."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._answered == self._serial and ready(self._view), seconds
            )
            return self._view if there else None

    @property
    def missing(self) -> str:
        return str(self._view.get("missing", self._view.get("refused")))

    @property
    def called(self) -> bool:
        return self._answered == self._serial and bool(self._view.get("called"))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        settings = self._settings
        channel: SealedChannel | None = None
        patience = min(settings.silence_s / 2, 5.0)  # for an answer: a link that was cut is tried anew
        seldom = min(settings.silence_s / 20, settings.call_s / 4)
        while not self._closed:
            with self._changed:
                state, serial = self._state, self._serial
            try:
                channel = channel or reach(settings.point, settings.secret, patience)
                view, pause = channel.ask(asdict(state)), POST_S if state.header is not None else seldom
            except (OSError, ValueError) as error:
                refused = {"refused": f"{error}"} if isinstance(error, Refused) else {}
                view = {"missing": f"no answer of the meeting point {settings.point}: {error}", **refused}
                serial, pause = serial if refused else -1, POST_S
                if channel:
                    channel.close()
                channel = None
            with self._changed:
                self._view, self._answered = view, serial
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or self._serial != serial >= 0, pause)  # noqa: B023
        if channel:
            channel.close()


class Member:
    """A launch, as its rank sees it. A context: it closes at the end, which to the others looks like a crash."""

    def __init__(
        self,
        settings: RoomSettings,
        wires: Mapping[int, int],
        *,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        leader: bool = True,
        port: int = 0,
        on_wait: Callable[[str], None] = lambda missing: None,
    ) -> None:
        """Collective. wires: this rank's, with the bytes of a message. gather: returns a plain value of every rank.

        port: at which this rank shows its bytes; 0: a free one. on_wait: called every LOOK_S in every wait, on every
        rank, with what is missing, or "" while bytes are on their way.
        """
        self.settings, self.wires, self.standing = settings, wires, Standing()
        self._gather, self._on_wait, self._leader = gather, on_wait, leader
        self._shelf = Shelf()
        self._listener = Listener(port, settings.secret, self._shelf.answer)
        self.id: str = gather(secrets.token_hex(8))[0]
        own = [(wire, own_host(settings.point), self._listener.port) for wire in wires]
        self._addresses = {f"{wire}": (host, port) for rank in gather(own) for wire, host, port in rank}
        self._pulse: Pulse | None = None
        self._messages: dict[str, torch.Tensor] = {}  # of the meeting
        self._meetings = 0

    # -- what the others see ---------------------------------------------------------------------------

    def join(self, standing: Standing, offer: Offer) -> None:
        """Come to the run. Collective. Raises Refused with the reason if this launch may not."""
        self.standing = standing
        known = {key: getattr(self.settings, key) for key in TOLD} | asdict(standing) | self._show(offer)
        if self._leader:
            self._pulse = Pulse(self.settings, Post(id=self.id, wires=self._addresses, **known))
        self.standing = replace(standing, run=self._follow(lambda view: True)["run"])
        self._post(run=self.standing.run)

    def commit(self, step: Met | Fetched, offer: Offer) -> None:
        """Stand where a step leads, which has been written to the anchor. Collective.

        The launches' digests are compared: the next call of a method raises Refused if they differ.
        """
        if isinstance(step, Met):
            number, last = step.number + 1, tuple(seat.name for seat in step.seats)
        else:
            number, last = step.number, step.last
        self.standing = Standing(self.standing.run, number, step.line, last)
        self._messages.clear()
        self._shelf.drop(number - self.settings.journal)
        self._post(**asdict(self.standing), **self._show(offer), header=None)

    def changing(self) -> AbstractContextManager[None]:
        """Return a context for every write of the anchor. Launches that are fetching it go on with a copy."""
        return self._shelf.changing()

    def leave(self) -> None:
        """End in good order, once nobody that lives is behind this launch: nobody will wait for it. Collective."""
        began = time.monotonic()
        with suppress(RoomLost, Refused):
            self._post()
            self._follow(lambda view: not view["lag"] or time.monotonic() - began > self.settings.patience_s)
            self._post(left=True)
            self._follow(lambda view: True)
        self.close()

    def close(self) -> None:
        if self._pulse:
            self._pulse.close()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- meetings --------------------------------------------------------------------------------------

    def called(self) -> bool:
        """Return at once whether others sit and wait for this launch; False on all ranks but the leader."""
        return self._pulse is not None and self._pulse.called

    def meet(self, header: bytes, messages: Mapping[int, torch.Tensor]) -> Met | None:
        """Meet the others. Collective. It is done when this returns: commit it.

        header: at most HEADER bytes that every launch gets. messages: uint8, of this rank's wires; they stay in the
        journal, so nobody may write to them. None: the others have met without this launch, which has ``missed``
        them. Raises RoomLost after ``give_up_s``, Refused if the anchors differ.
        """
        sizes = {wire: len(message) for wire, message in messages.items()}
        assert len(header) <= HEADER and sizes == dict(self.wires)
        number, began, self._meetings = self.standing.number, time.monotonic(), self._meetings + 1
        own = f"{number}/{self.id}/{self._meetings}"
        for wire, message in messages.items():
            self._keep(f"message/{own}/{wire}", message)
        self._post(header=base64.b64encode(header).decode(), message=own)
        while True:
            view = self._follow(lambda view: view["behind"] or "room" in view, began)
            room = view.get("room", {"seats": ()})
            if own not in [seat["message"] for seat in room["seats"]]:
                break
            line, lost = room["line"], self._pull(room, view.get("sources", ()))
            self._post(**({"lost": (line, lost)} if lost else {"have": line}))
            if not lost and self._follow(partial(_decided, line), began).get("room", {}).get("line") == line:
                return self._met(room)
            if lost and view["behind"]:
                break
            if self._gather(time.monotonic() - began > self.settings.give_up_s)[0]:
                raise RoomLost(f"meeting {number}: the messages of {', '.join(lost)} cannot be had")
        self._post(header=None)
        return None

    def missed(self, memory: Callable[[], Mapping[int, torch.Tensor]]) -> Met | Fetched | None:
        """Return a step towards the others, to be committed: a missed meeting, else their anchor. Collective.

        None: this launch is up with them. memory: returns where an anchor goes: by wire, uint8 on the host. ``own``
        of a meeting says whether the message of this launch counts in it.
        """
        began = time.monotonic()
        while True:
            self._post()
            view = self._follow(lambda view: not view["behind"] or view["sources"], began)
            if not view["behind"]:
                return None
            if "room" in view and not self._pull(view["room"], view["sources"]):
                return self._met(view["room"])
            anchor = Fetched(**view["anchor"])
            out = memory()
            jobs = {_anchor_name(anchor, wire): (wire, out[wire], view["sources"]) for wire in self.wires}
            if not any(self._gather(len(self._fetch(jobs)))):
                return replace(anchor, last=tuple(anchor.last), about=base64.b64decode(anchor.about))

    def _pull(self, room: Mapping[str, Any], sources: Sequence[Wires]) -> list[str]:
        """Fetch the messages of a room that are not here. Returns the names whose cannot be had. Collective.

        sources: others that may show them, too.
        """
        wires = [seat["wires"] for seat in room["seats"]]
        jobs = {
            f"message/{seat['message']}/{wire}": (
                wire,
                torch.empty(count, dtype=torch.uint8),
                [*wires[index:], *wires[:index], *sources],
            )
            for index, seat in enumerate(room["seats"])
            for wire, count in self.wires.items()
            if f"message/{seat['message']}/{wire}" not in self._messages
        }
        lost = self._fetch(jobs)
        names = [seat["name"] for seat in room["seats"] if any(f"/{seat['message']}/" in key for key in lost)]
        return sorted({name for rank in self._gather(names) for name in rank})

    def _met(self, room: Mapping[str, Any]) -> Met:
        """Return the meeting of a room whose messages are all here."""
        seats = tuple(
            Seat(
                seat["name"],
                base64.b64decode(seat["header"]),
                {wire: self._messages[f"message/{seat['message']}/{wire}"] for wire in self.wires},
            )
            for seat in room["seats"]
        )
        ids = [seat["message"].split("/")[1] for seat in room["seats"]]
        return Met(self.standing.number, room["line"], seats, ids.index(self.id) if self.id in ids else None)

    # -- bytes -----------------------------------------------------------------------------------------

    def _show(self, offer: Offer) -> dict[str, str]:
        """Show this rank's part of the anchor. Returns the digest of all parts, and the words about it."""
        assert len(offer.about) <= HEADER
        for wire, piece in offer.pieces.items():
            self._shelf.put(_anchor_name(self.standing, wire), self.standing.number, piece, passing=True)
        parts = sorted(part for rank in self._gather([*offer.digests.items()]) for part in rank)
        digest = hashlib.sha256(f"{parts}".encode()).hexdigest()[:16]
        return {"digest": digest, "about": base64.b64encode(offer.about).decode()}

    def _keep(self, name: str, message: torch.Tensor) -> None:
        """Keep a message, and show it to the others."""
        self._messages[name] = message
        self._shelf.put(name, self.standing.number, Shown.of(message.numpy().data))

    def _fetch(self, jobs: Mapping[str, tuple[int, torch.Tensor, Sequence[Wires]]]) -> list[str]:
        """Fetch bytes, some at a time. jobs: by name, the wire, where they go and who may show them.

        Returns the names that nobody shows. Messages are shown on as soon as they are here.
        """

        def take(name: str, wire: int, out: torch.Tensor, sources: Sequence[Wires]) -> None:
            places = dict.fromkeys((host, port) for each in sources for host, port in [each[f"{wire}"]])
            fetch(name, [*places], self.settings.secret, self.settings.silence_s, out.numpy().data)
            if name.startswith("message/"):
                self._keep(name, out)

        lost = []
        with ThreadPoolExecutor(STREAMS, "rooms") as pool:
            taken = {name: pool.submit(take, name, *job) for name, job in jobs.items()}
            while wait(taken.values(), LOOK_S).not_done:
                self._on_wait("")
        for name, future in taken.items():
            try:
                future.result()
            except LookupError:
                lost.append(name)
        return lost

    # -- the leader's word -----------------------------------------------------------------------------

    def _post(self, **changes: Any) -> None:
        if self._pulse:
            self._pulse.post(**changes)

    def _follow(self, ready: Ready, began: float | None = None) -> Mapping[str, Any]:
        """Return the point's answer to the last post once it is ready: the leader waits, and tells. Collective.

        began: since when this is waited for.
        """
        began = time.monotonic() if began is None else began
        while True:
            told = self._gather(self._word(ready, began))[0]
            if "refused" in told:
                raise Refused(f"replica {self.settings.name!r} may not meet the others: {told['refused']}")
            if "lost" in told:
                raise RoomLost(
                    f"no meeting {self.standing.number} in {self.settings.give_up_s:g} s: {told['lost']}"
                )
            if "view" in told:
                view: Mapping[str, Any] = told["view"]
                return view
            self._on_wait(told["missing"])

    def _word(self, ready: Ready, began: float) -> dict[str, Any]:
        if not self._pulse:
            return {}
        settings, waited = self.settings, time.monotonic() - began
        again = waited < 2 * settings.silence_s  # the name may be that of this launch's last start

        def decided(view: Mapping[str, Any]) -> bool:
            return not (again and "again" in view) if "refused" in view else bool(ready(view))

        view = self._pulse.look(decided, LOOK_S)
        if view is None:
            return {"lost" if waited > settings.give_up_s else "missing": self._pulse.missing}
        return {"refused": view["refused"]} if "refused" in view else {"view": view}


def _anchor_name(where: Standing | Fetched, wire: int) -> str:
    return f"anchor/{where.number}/{where.line}/{wire}"


def _decided(line: str, view: Mapping[str, Any]) -> bool:
    """Return whether a room is done, or is no longer that of this line."""
    room = view.get("room", {})
    return room.get("line") != line or room["done"]
