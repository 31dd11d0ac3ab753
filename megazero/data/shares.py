"""Shares: how replicas that come and go divide the samples of one order among them. Pure but for ``Share``.

A share is some ranges of sample numbers, which one replica trains on between two meetings. A meeting takes back what
was not used, and deals anew, in order of names: first what was left over, then on from the highest number dealt. So
every sample is dealt once, but for those of a replica that is lost, which are dealt again. A blend's order keeps each
member's count within a sample of its weight's, so in a share of n samples that lies in k ranges no member is more
than 2k samples off, whatever the number of replicas and the period of the blend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from megazero.data.gpt import Sample
from megazero.data.source import SampleSource

Ranges = tuple[tuple[int, int], ...]  # first, last + 1


def size(ranges: Ranges) -> int:
    return sum(high - low for low, high in ranges)


def cut(ranges: Ranges, at: int) -> tuple[Ranges, Ranges]:
    """Cut ranges into their first ``at`` numbers and the rest."""
    first, rest = list[tuple[int, int]](), list[tuple[int, int]]()
    for low, high in ranges:
        middle = min(high, low + at)
        at -= middle - low
        first += [(low, middle)] if middle > low else []
        rest += [(middle, high)] if high > middle else []
    return tuple(first), tuple(rest)


def joined(ranges: Ranges) -> Ranges:
    """Return ranges in order, neighbours as one."""
    out = list[tuple[int, int]]()
    for low, high in sorted(ranges):
        if out and out[-1][1] == low:
            out[-1] = out[-1][0], high
        else:
            out.append((low, high))
    return tuple(out)


@dataclass(frozen=True)
class Dealt:
    """What is dealt of the samples. top: all below it are; holes: but for these. shares: by name, since the last
    meeting.
    """

    top: int = 0
    holes: Ranges = ()
    shares: Mapping[str, Ranges] = field(default_factory=dict)

    @property
    def consumed(self) -> int:
        """How many samples were trained on up to the last meeting."""
        return self.top - size(self.holes) - sum(map(size, self.shares.values()))

    def settled(self, used: Mapping[str, int]) -> Dealt:
        """Take back what replicas have not ``used`` of their shares: all of one that is not named."""
        left = (cut(share, used.get(name, 0))[1] for name, share in self.shares.items())
        return Dealt(self.top, joined((*self.holes, *(each for ranges in left for each in ranges))))

    def dealt(self, batches: Mapping[str, int], steps: int, limit: int) -> Dealt:
        """Deal so many steps to replicas of these batches, in order of names: fewer if ``limit`` samples in all are
        reached then, and none if not even one is left.
        """
        together = sum(batches.values())
        steps = min(steps, (limit - self.consumed) // together)
        if steps < 1:
            return self
        whole = joined((*self.holes, (self.top, self.top + steps * together)))
        shares = dict[str, Ranges]()
        for name in sorted(batches):
            shares[name], whole = cut(whole, steps * batches[name])
        top = max(self.top, *(high for ranges in shares.values() for _, high in ranges))
        return Dealt(top, tuple((low, min(high, top)) for low, high in whole if low < top), shares)

    def state(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return {"top": self.top, "holes": self.holes, "shares": dict(self.shares)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError or TypeError for what is no such state: it may come from a peer."""
        shares = {str(name): _ranges(share) for name, share in state["shares"].items()}
        return cls(int(state["top"]), _ranges(state["holes"]), shares)


def _ranges(state: Sequence[Sequence[int]]) -> Ranges:
    ranges = tuple((int(low), int(high)) for low, high in state)
    if not all(0 <= low < high for low, high in ranges):
        raise ValueError(f"{ranges} are no ranges of samples")
    return ranges


class Share(SampleSource):
    """The samples of a share, in its order, from a source of all. Its state holds what is left of the share.

    A source that does not look samples up by number is read over what lies between, and from its beginning where a
    share lies before its place.
    """

    def __init__(self, source: SampleSource, begin: int) -> None:
        """begin: the number of the sample that the source stands at."""
        self.source, self.samples, self.ordered_for = source, source.samples, source.ordered_for
        self._at, self._left = begin, Ranges()

    def batch(self, count: int, own: range) -> list[Sample]:
        taken, left = cut(self._left, count)
        if (held := size(taken)) < count:
            raise ValueError(f"a share has {held} samples left, and the next batch takes {count}")
        found = list[Sample]()
        first = 0
        for low, high in taken:
            self.go_to(low)
            inside = range(max(own.start - first, 0), min(own.stop - first, high - low))
            found += self.source.batch(high - low, inside)
            self._at, first = high, first + high - low
        self._left = left
        return found

    def go_to(self, number: int) -> None:
        """Let the source stand at this sample."""
        if number < self._at:
            self.source.load_state(0)
            self._at = 0
        if number > self._at:
            self.source.batch(number - self._at, range(0))
            self._at = number

    def state(self) -> dict[str, Any]:
        return {"source": self.source.state(), "at": self._at, "left": self._left}

    def load_state(self, state: Any) -> None:
        self.source.load_state(state["source"])
        self._at, self._left = int(state["at"]), _ranges(state["left"])

    def numbers(self, state: Any, consumed: int) -> Iterator[int]:
        return (number for low, high in state["left"] for number in range(low, high))
