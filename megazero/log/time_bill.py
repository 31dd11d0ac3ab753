"""The breakdown of an iteration's seconds into items that add up to the iteration (``time_bill`` in metrics.jsonl).

Spans may nest. A moment belongs to the innermost span only, so nothing is counted twice. The waits of the engine are
spans inside the trainer's `compute`: `shard(timed=bill.span)`. Spans use the host's clock. Waits on CUDA, which the
host does not see, are measured by events and added with `add`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Self

from megazero.comm.timing import Label, no_label
from megazero.mesh.levels import links_of, short

# Waits for communication, by hop and link: of gathers, of reductions, ...; updates of whole matrices; swaps of
# context parallelism; rows of experts; of the pipeline with the bubble; of the exchange of scalars for the slowest
# rank.
KINDS = ("refresh", "gather", "reduce", "update", "cp", "ep", "pipeline", "scalar")
_TOLERANCE = 1e-6  # seconds; clocks tick in nanoseconds, float sums of an iteration err by less


def items_over(links: Sequence[str] = links_of()) -> tuple[str, ...]:
    """Return the items of a bill where ranks are joined by these links. Tensor parallelism never leaves a node."""
    inside, *across = map(short, links)
    waits = [f"{kind}_{link}" for kind in KINDS for link in (inside, *across)]
    waits += [f"tp_{inside}", "outer"]
    return ("compute", *(f"exposed_{wait}" for wait in waits), "optimizer", "data", "other")


class TimeBill:
    """The seconds of each item since the last `close`; `other` is the time outside of all spans.

    links: by which waits are told apart (`Mesh.links`).
    One thread at a time: the autograd thread may enter spans while the caller waits in backward.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, links: Sequence[str] = links_of()
    ) -> None:
        self._clock = clock
        self._items = dict.fromkeys(items_over(links), 0.0)
        self._seconds: dict[str, float] = {}
        self._added: defaultdict[str, float] = defaultdict(float)  # of the seconds, those measured elsewhere
        self._begin()
        self._open: list[_Span] = []
        self.label: Label = no_label  # a profiler's, while it records

    def span(self, name: str) -> _Span:
        """A context manager. Its seconds, without those of the spans inside it, are added to item `name`."""
        return _Span(self, self._known(name))

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere. They are taken from the span that is open now, if any."""
        self._seconds[self._known(name)] += seconds
        self._added[name] += seconds
        if self._open:
            self._open[-1].inside += seconds

    def close(self, total: float) -> dict[str, float]:
        """Return the bill of an iteration of `total` seconds, in the order of its items, and begin the next one.

        Seconds that were measured elsewhere may have passed while the host was in another span: a device waits while
        Python pauses. What was booked twice is taken from them.

        Raises RuntimeError if an item came out negative without them, or the items exceed the total: something was
        counted twice, or the total does not cover every span.
        """
        assert not self._open, f"the bill is closed inside the span {self._open[-1].name!r}"
        seconds, added = self._seconds, self._added
        self._begin()
        seconds["other"] += total - sum(seconds.values())
        wrong = {name: value for name, value in seconds.items() if value < -_TOLERANCE}
        twice, elsewhere = -sum(wrong.values()), sum(added.values())
        if twice > elsewhere:
            raise RuntimeError(
                f"time bill of an iteration of {total:.6f} s has negative items {wrong}: a time was booked "
                f"twice, or outside the iteration; all items: {seconds}"
            )
        if wrong:
            seconds |= dict.fromkeys(wrong, 0.0)
            seconds |= {name: seconds[name] - twice * part / elsewhere for name, part in added.items()}
        return seconds

    def reset(self) -> None:
        """Forget what was added since the last close: evaluation and saving belong to no iteration."""
        assert not self._open, f"the bill is reset inside the span {self._open[-1].name!r}"
        self._begin()

    def _begin(self) -> None:
        self._seconds, self._added = dict(self._items), defaultdict(float)

    def _known(self, name: str) -> str:
        if name not in self._items:
            raise ValueError(f"time bill item {name!r} is not one of {', '.join(self._items)}")
        return name


class _Span:
    """One `with`: `inside` collects the seconds of the spans and additions within it."""

    __slots__ = ("bill", "name", "inside", "began", "labelled")

    def __init__(self, bill: TimeBill, name: str) -> None:
        self.bill, self.name, self.inside = bill, name, 0.0

    def __enter__(self) -> Self:
        bill = self.bill
        bill._open.append(self)
        self.labelled = None if bill.label is no_label else bill.label(self.name, "")
        if self.labelled is not None:
            self.labelled.__enter__()
        self.began = bill._clock()
        return self

    def __exit__(self, *_: object) -> None:
        bill = self.bill
        elapsed = bill._clock() - self.began
        if self.labelled is not None:
            self.labelled.__exit__(None, None, None)
        assert bill._open[-1] is self, "spans must close in the reverse order of their opening"
        bill._open.pop()
        bill._seconds[self.name] += elapsed - self.inside
        if bill._open:
            bill._open[-1].inside += elapsed
