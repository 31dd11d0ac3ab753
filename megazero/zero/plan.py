"""What moves for a unit: its hops and their bytes, the buffers that these take, and what is gathered ahead. No torch.

The engine runs the hops of a ``UnitPlan`` and asks ``coming`` which units it gathers ahead. The planner times these
hops, the forecast sums them, ``verify`` compares them with what was counted. layout.py has the words: level, region.
On an axis of a ranks, a gather of m bytes per rank sends (a - 1) m bytes; an all-to-all of rows of m bytes as much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from operator import mul
from typing import Generic

from megazero.comm.made_once import made_once
from megazero.comm.wire import Codecs, Format, MessageFormat
from megazero.mesh.grid import AxisSpec

GATHER, EXCHANGE = "gather", "exchange"  # all-gather, all-to-all


@dataclass(frozen=True)
class UnitCut:
    """The data axes of a unit, innermost first; p, g, os: how many of them cut the
    parameters, the accumulated gradients (0 where these are whole for the step) and the optimizer states.
    """

    axes: tuple[AxisSpec, ...]
    p: int
    g: int
    os: int

    @classmethod
    def of(cls, axes: Iterable[AxisSpec], whole_gradients: bool = False) -> UnitCut:
        """Return how the roles of axes say that they cut."""
        axes = tuple(axes)
        p, g, os = (
            sum(axis.role in roles for axis in axes) for roles in (("p",), ("p", "g"), ("p", "g", "os"))
        )
        return cls(axes, p, 0 if whole_gradients else g, os)

    @property
    def all(self) -> int:
        return len(self.axes)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """How many ranks share what the first 0, 1, 2, ... axes cut."""
        return tuple(accumulate((axis.size for axis in self.axes), mul, initial=1))


@dataclass(frozen=True, eq=False)  # made once for each unit: equal is identical
class Hop(Generic[Format]):
    """One collective over ``axis``, between the slices of ``level`` - 1 and of ``level``.

    kind: as counters and communicators know it, 'refresh', 'gather' or 'reduce'. verb: GATHER or EXCHANGE.
    format: of its messages; None sends elements as they are, sums in at least fp32 and, with ``raw``, values of the
    parameters' dtype. sent: the bytes that a rank sends.
    """

    kind: str
    verb: str
    level: int
    axis: AxisSpec
    format: Format | None
    sent: int
    raw: bool = False


Hops = tuple[Hop[Format], ...]


@dataclass(frozen=True, eq=False)
class UnitPlan(Generic[Format]):
    """What moves for a unit of ``coded`` and ``exact`` elements, the sizes of its regions.

    codecs: the formats; Codecs() where nothing is quantised. width, sums: the bytes of a parameter, and of a master
    weight or a sum of gradients.
    """

    coded: int
    exact: int
    cut: UnitCut
    codecs: Codecs[Format]
    width: int
    sums: int

    @property
    def elements(self) -> int:
        return self.coded + self.exact

    @cached_property
    def shards(self) -> tuple[int, int, int]:
        """P, G and OS."""
        cut = self.cut
        return cut.ranks[cut.p], cut.ranks[cut.g], cut.ranks[cut.os]

    @property
    def delta(self) -> bool:
        """Whether refreshes send differences."""
        return self.codecs.delta and self.cut.p < self.cut.os

    @property
    def direct(self) -> bool:
        """Whether the messages of gathers are the parameters themselves."""
        return (self.codecs.weights is None or self.delta) and not self.exact

    def message(self, parts: int, format: MessageFormat | None, width: int, exact_width: int) -> int:
        """Return the bytes of one of ``parts`` equal slices. An element that is sent as it is has ``width`` bytes, in
        the exact region of a message with a format ``exact_width``."""
        coded, exact = self.coded // parts, self.exact // parts
        return format.message_bytes(coded, exact * exact_width) if format else (coded + exact) * width

    # -- weights -----------------------------------------------------------------------------------

    @cached_property
    def own(self) -> int:
        """The bytes of a rank's message in a refresh: of its OS slice."""
        return self.message(self.shards[2], self.codecs.weights, self.width, self.width)

    @cached_property
    def refresh(self) -> Hops[Format]:
        """The hops from the OS slices to the P copy, outermost first."""
        os = self.cut.os
        return self._gathers("refresh", os, self.cut.p, self.shards[2] * self.own, self.codecs.weights)

    @cached_property
    def gather(self) -> Hops[Format]:
        """The hops from the P copy to the full parameters. They send the messages received or, with delta, R."""
        if self.delta:
            return self._gathers("gather", self.cut.p, 0, self.elements * self.width, None)
        return self._gathers("gather", self.cut.p, 0, self.shards[2] * self.own, self.codecs.weights)

    def _gathers(
        self, kind: str, deepest: int, outer: int, whole: int, format: Format | None
    ) -> Hops[Format]:
        """Return the gathers from level ``deepest`` to ``outer``. All messages of the unit have ``whole`` bytes."""
        hops = []
        for level in range(deepest, outer, -1):
            axis = self.cut.axes[level - 1]
            sent = (axis.size - 1) * (whole // self.cut.ranks[level])
            hops.append(Hop(kind, GATHER, level, axis, format, sent, raw=kind != "reduce"))
        return tuple(hops)

    # -- gradients ---------------------------------------------------------------------------------

    @made_once
    def reduction(self, last: bool, alone: bool = False, exact: bool = False) -> Hops[Format]:
        """Return the hops of a micro-batch's reduction: down to G and, with the step's last one, over all axes; then
        sums go back to replicas of the OS slice.

        alone: it is the step's only micro-batch. exact: formats are off. Raw gradients may leave on the first axis
        alone: where each micro-batch is reduced, or there is one. Later hops, and those of the step's sum, send sums.
        """
        cut, descent, back = self.cut, list[Hop[Format]](), list[Hop[Format]]()
        for level in range(1, (cut.all if last else cut.g) + 1):
            axis, parts = cut.axes[level - 1], cut.ranks[level]
            raw, format = level == 1 and (cut.g > 0 or alone), self._of_gradients(axis, exact)
            row = self.message(parts, format, self.width if raw else self.sums, self.sums)
            descent.append(Hop("reduce", EXCHANGE, level, axis, format, (axis.size - 1) * row, raw))
            if level > cut.os:
                share = self.message(parts, format, self.sums, self.sums)
                back.append(Hop("reduce", GATHER, level, axis, format, (axis.size - 1) * share))
        return (*descent, *reversed(back))

    @made_once
    def ends(self, axis: AxisSpec, exact: bool = False) -> Hop[Format]:
        """Return the hop in which the pipeline's two ends, on ``axis``, give each other their sums of a tied unit."""
        format = self._of_gradients(axis, exact)
        sent = self.message(self.shards[2], format, self.sums, self.sums)
        return Hop("reduce", GATHER, self.cut.os, axis, format, sent)

    def _of_gradients(self, axis: AxisSpec, exact: bool) -> Format | None:
        return None if exact else self.codecs.gradients.get(axis.link)

    @cached_property
    def sharing(self) -> Hops[Format]:
        """The hops of an outer step, by which ranks' equal parts of sums come to all copies of the OS slice."""
        return self._gathers("reduce", self.cut.all, self.cut.os, self.elements * self.sums, None)

    # -- buffers, in bytes -------------------------------------------------------------------------

    @property
    def copy_bytes(self) -> int:
        """The P copy: parameters or, as they were received, messages."""
        p, _, os = self.shards
        return self.elements // p * self.width if p == 1 or self.delta else os // p * self.own

    def master_in_copy(self, kept: bool) -> bool:
        """Return whether the master weights are a part of the P copy. kept: the copy is never dropped."""
        return kept and self.direct and not self.delta and self.width == self.sums

    @cached_property
    def ahead_bytes(self) -> int:
        """What a gather ahead of use adds to what is held: full parameters; if P = 1, transient messages."""
        p, _, os = self.shards
        if p > 1:
            return self.elements * self.width
        return os * self.own if self.delta or not self.direct else 0

    @property
    def transient_bytes(self) -> int:
        """The most transient bytes of a refresh and gather: messages that are not kept, or not the parameters."""
        p, _, os = self.shards
        if not self.delta:
            return 0 if self.direct else os * self.own
        gathered = 0 if self.direct or p == 1 else self.elements * self.width
        return max(gathered, os // p * self.own)


# -- what is gathered ahead ------------------------------------------------------------------------


def window(units: int, modules: int) -> int:
    """Return how many uses are looked at: to a unit's next one. A long evaluation is one segment of many forwards."""
    return 2 * max(units, modules)


def coming(
    later: Iterable[Collection[int]],
    here: Callable[[int], bool],
    ahead: Collection[int],
    stays: Callable[[int], bool],
    sizes: Sequence[float],
    budget: float,
) -> Iterator[int]:
    """Yield the units that are gathered, or stay, for later modules: all of the next one, and more within a budget.

    later: the units that each of them needs, in the order of use. The next one is the first that needs a unit that is
    not ``here``, which is in use now. ahead: units that are gathered or on their way for a later module: they count
    first. stays: whether a unit that is here stays anyway, and takes nothing. sizes: what each unit takes ahead.
    """
    later, seen, following = iter(later), set[int](), tuple[int, ...]()
    for following in map(tuple, later):
        if seen.issuperset(following):  # of small models all fit, and most uses look at all of them
            continue
        seen.update(following)
        yield from following
        if not all(map(here, following)):
            break
    budget -= sum(sizes[unit] for unit in ahead if unit not in following)
    for unit in dict.fromkeys(chain.from_iterable(later)):
        if unit in seen:
            continue
        if unit not in ahead and not (here(unit) and stays(unit)):
            budget -= sizes[unit]
        if budget < 0:
            return
        yield unit
