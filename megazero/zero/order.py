"""Order of use: recorded once per kind of pass, checked ever after, hashed so that ranks can compare."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32


class Order:
    """Unit indices in order of use within one pass (one micro-batch, or one evaluation forward)."""

    def __init__(self) -> None:
        self.sequence: list[int] = []
        self.position = 0

    def begin(self) -> None:
        """Start a pass. The last one may have been shorter than the record: then its tail is forgotten."""
        if self.position:
            del self.sequence[self.position :]
            self.position = 0

    def use(self, index: int) -> None:
        """Note a use; where it differs from the record, the record is cut and made anew from here."""
        at = self.position
        if at < len(self.sequence) and self.sequence[at] != index:
            del self.sequence[at:]
        if at == len(self.sequence):
            self.sequence.append(index)
        self.position += 1

    def upcoming(self, wrap: bool) -> Iterator[int]:
        """What comes after the current position; with ``wrap`` the next pass follows."""
        yield from self.sequence[self.position :]
        if wrap:
            yield from self.sequence

    def next_is(self, index: int, wrap: bool) -> bool:
        return next(self.upcoming(wrap), None) == index


class OrderHash:
    """Hash of everything issued in a step, 32 bits: exact in a float64 that ranks exchange."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, text: str) -> None:
        self.value = crc32(text.encode(), self.value)

    def take(self) -> int:
        value, self.value = self.value, 0
        return value
