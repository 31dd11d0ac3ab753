"""Bytes that a rank shows to others by name, and fetching them: by ranges, from whoever has them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

from megazero.comm.rooms.channel import FRAME, Address, Buffer, SealedChannel, reach


@dataclass(frozen=True)
class Shown:
    """So many bytes. read: (offset, count) -> these bytes. Other threads call it."""

    size: int
    read: Callable[[int, int], Buffer]

    @classmethod
    def of(cls, data: Buffer) -> Self:
        """Return a piece of bytes that stay as they are."""
        view = memoryview(data).cast("B")
        return cls(len(view), lambda offset, count: view[offset : offset + count])


@dataclass
class _Held:
    """A piece of a meeting. passing: shown until its owner's next ``changing``. owned: it is the owner's memory."""

    piece: Shown
    number: int
    passing: bool
    owned: bool
    readers: int = 0  # that are on their way


class Shelf:
    """What this rank shows. A name never comes again for other bytes."""

    def __init__(self) -> None:
        self._shown: dict[str, _Held] = {}
        self._names, self._rest = threading.Lock(), threading.Lock()

    def put(self, name: str, number: int, piece: Shown, *, passing: bool = False) -> None:
        with self._names:
            self._shown[name] = _Held(piece, number, passing, passing)

    def drop(self, before: int) -> None:
        """Drop what belongs to meetings before this one."""
        with self._names:
            self._shown = {k: each for k, each in self._shown.items() if each.number >= before}

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Inside, the owner may change what passes. Whoever is fetching it goes on with a copy, made here."""
        with self._rest:
            with self._names:
                self._shown = {k: each for k, each in self._shown.items() if each.readers or not each.passing}
                read = [each for each in self._shown.values() if each.owned]
            for each in read:
                each.piece = Shown.of(bytes(each.piece.read(0, each.piece.size)))
                each.owned = False
            yield

    def answer(self, channel: SealedChannel, request: Any) -> None:
        """Send what has the name ``get``, from the byte ``from``."""
        with self._names:
            if shown := self._shown.get(request["get"]):
                shown.readers += 1
        if shown is None:
            channel.say({"size": None})
            return
        try:
            channel.say({"size": shown.piece.size})
            for offset in range(int(request["from"]), shown.piece.size, FRAME):
                with self._rest if shown.owned else nullcontext():
                    data = bytes(shown.piece.read(offset, min(FRAME, shown.piece.size - offset)))
                channel.send(data)
        finally:
            with self._names:
                shown.readers -= 1


def fetch(name: str, sources: Sequence[Address], secret: bytes, silence_s: float, out: Buffer) -> None:
    """Fill ``out`` with the bytes of a name, from the first of the sources that has them, and on with the next.

    Raises LookupError when no source gives any more: each is lost, was silent for ``silence_s``, or has none of this
    name and size.
    """
    view = memoryview(out).cast("B")
    order, failed, at, why = deque(sources), 0, 0, "no source"
    while at < len(view):
        if failed == len(order):
            raise LookupError(f"{name}: {why}")
        try:
            with reach(order[0], secret, silence_s) as channel:
                if channel.ask({"get": name, "from": at}) != {"size": len(view)}:
                    raise LookupError(f"not there with {len(view)} bytes")
                while at < len(view):
                    channel.receive_into(part := view[at : at + FRAME])
                    at, failed = at + len(part), 0
        except (OSError, ValueError, LookupError) as error:
            why, failed = f"{order[0][0]}:{order[0][1]}: {error}", failed + 1
            order.rotate(-1)
