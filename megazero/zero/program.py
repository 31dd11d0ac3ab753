"""The order of use: recorded once per kind of segment, then checked, and hashed so that ranks can compare it.

A step is a program: a sequence of segments. Each is the forward (F), the backward (B, or I for the input's
gradient alone) or the weights' gradients (W) of one part of the module for one micro-batch. The program says
which segments come; the record of a segment's kind says in which order it uses units. Together they predict
every gather of a step, whatever the number of micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

FORWARD, BACKWARD, INPUT, WEIGHT, EVALUATION = "F", "B", "I", "W", "E"


class Segment(NamedTuple):
    """kind: F, B, I or W, or E, which stands for all forwards of an evaluation. part: the part of the module."""

    kind: str
    part: int = 0


Use = tuple[int, ...]  # indices of the units that one module needs


class UseOrder:
    """Records what modules need, in order of use, within one kind of segment."""

    def __init__(self) -> None:
        self.sequence: list[Use] = []
        self.position = 0

    def begin(self) -> None:
        """Start over. If the last pass was shorter than the record, its tail is forgotten."""
        if self.position:
            del self.sequence[self.position :]
            self.position = 0

    def use(self, needs: Use) -> None:
        """Note a use. Where it differs from the record, recording restarts from here."""
        at = self.position
        if at < len(self.sequence) and self.sequence[at] != needs:
            del self.sequence[at:]
        if at == len(self.sequence):
            self.sequence.append(needs)
        self.position += 1


class Program:
    """Holds the open step's segments, the place in them, and the recorded orders."""

    def __init__(self) -> None:
        self.orders: defaultdict[Segment, UseOrder] = defaultdict(UseOrder)
        self.segments: Sequence[Segment] = ()
        self.at = 0  # the current segment, or the next one
        self.current: Segment | None = None

    def open(self, segments: Sequence[Segment]) -> None:
        self.segments, self.at, self.current = segments, 0, None

    def enter(self, segment: Segment) -> None:
        """Go to the next such segment, or past the end where the program has none (for one more forward, say)."""
        self.leave()
        rest = range(self.at, len(self.segments))
        self.at = next((i for i in rest if self.segments[i] == segment), len(self.segments))
        self.current = segment
        self.orders[segment].begin()

    def leave(self) -> None:
        if self.current is not None:
            self.current = None
            self.at += 1

    def use(self, needs: Use) -> None:
        assert self.current is not None
        self.orders[self.current].use(needs)

    def upcoming(self) -> Iterator[Use]:
        """Yield what the modules of the rest of the program will need, in their order, as far as it is recorded."""
        if self.current is not None:
            order = self.orders[self.current]
            yield from order.sequence[order.position :]
        for i in self._following():
            yield from self.orders[self.segments[i]].sequence

    def returns_to(self, part: int) -> bool:
        """Whether a later segment needs the part's parameters."""
        return any(
            self.segments[i].part == part and self.segments[i].kind != WEIGHT for i in self._following()
        )

    def _following(self) -> range:
        return range(self.at + int(self.current is not None), len(self.segments))


class IssueHash:
    """A hash of everything issued in a step. It has 32 bits, so it is exact in a float64 that ranks exchange.

    history: the issued collectives, for ranks that differ (agreement.py), kept until the next step issues something.
    """

    def __init__(self) -> None:
        self.value = self.taken = 0
        self.history: list[str] = []
        self.step = 0  # that history is of

    def add(self, text: str) -> None:
        if self.step != self.taken:
            self.step, self.history = self.taken, []
        self.history.append(text)
        self.value = crc32(text.encode(), self.value)

    def take(self) -> int:
        value, self.value = self.value, 0
        self.taken += 1
        return value
