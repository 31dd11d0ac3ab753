"""The order of use: recorded once per kind of segment, then checked.

A step is a program: a sequence of segments. Each is the forward (F), the backward (B, or I for the input's
gradient alone) or the weights' gradients (W) of one part of the module for one micro-batch. The program says
which segments come; the record of a segment's kind says in which order it uses units. Together they predict
every gather of a step, whatever the number of micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

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

    @property
    def position(self) -> tuple[int, int]:
        """The place in the program, and in the current segment."""
        order = self.orders.get(self.current) if self.current else None
        return self.at, order.position if order else 0

    def upcoming(self) -> Iterator[Use]:
        """Return what the modules of the rest of the program will need, in their order, as far as it is recorded."""
        rest: Sequence[Use] = ()
        if self.current is not None:
            order = self.orders[self.current]
            rest = order.sequence[order.position :]
        return chain(
            rest, chain.from_iterable(self.orders[self.segments[i]].sequence for i in self._following())
        )

    def returns_to(self, part: int) -> bool:
        """Whether a later segment needs the part's parameters."""
        return any(
            self.segments[i].part == part and self.segments[i].kind != WEIGHT for i in self._following()
        )

    def _following(self) -> range:
        return range(self.at + int(self.current is not None), len(self.segments))
