"""Where the parts of a unit lie in its flat buffer. Pure arithmetic.

Glossary
--------
unit buffer
    n elements in two regions, coded and exact (small sensitive parameters). Every parameter starts on a block
    boundary. Each region is padded to a multiple of d x block and cut by the same rule.
sub-axis j
    The j-th cut of the data-parallel ranks, innermost first. Its size is a_j; this rank's index on it is i_j.
level m
    The slice left after sub-axes 1..m. In a region of n elements it starts at
    sum over j <= m of i_j * n / (a_1 ... a_j) and has n / (a_1 ... a_m) elements. Level 0 is the whole buffer. The
    innermost sub-axis is the most significant, so slices of deeper levels are nested, and every step between
    neighbouring levels is one collective on one axis.
compact
    A level's slice stored by itself: its coded piece, then its exact piece.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import TypeVar

from megazero.comm.made_once import made_once
from megazero.comm.wire import filled

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Slot:
    """A parameter in the unit buffer: elements [start, start + numel).

    used: the first so many take part in the training (None: all). The others are padding.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    used: int | None = None

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))


@dataclass(frozen=True)
class Piece:
    """A contiguous run of the unit buffer and where it lies in some level's compact buffer."""

    start: int
    compact: int
    numel: int

    @cached_property
    def span(self) -> slice:
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True)
class GatherHop:
    """One all-gather over the sub-axis of ``level``: from the buffer's part ``own`` into its part ``into``."""

    level: int
    own: slice
    into: slice


@dataclass(frozen=True)
class UnitLayout:
    """Holds the parameters and regions of one unit, and how the data-parallel sub-axes cut it.

    regions: (start, numel) of the coded region and, if there is one, of the exact region.
    sizes, indices: the size of each sub-axis and this rank's index on it, innermost first.
    """

    slots: tuple[Slot, ...]
    regions: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    indices: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        return sum(n for _, n in self.regions)

    def level_numel(self, level: int) -> int:
        return self.numel // prod(self.sizes[:level])

    @made_once
    def pieces(self, level: int) -> tuple[Piece, ...]:
        """Return this rank's slice of the level: one piece per region, in compact order."""
        return self.pieces_of(self.indices[:level])

    def pieces_of(self, indices: Sequence[int]) -> tuple[Piece, ...]:
        """Return the slice of the rank with these sub-axis indices (innermost first, as many as the level)."""
        out, compact = [], 0
        for start, n in self.regions:
            for index, size in zip(indices, self.sizes, strict=False):
                n //= size
                start += index * n
            out.append(Piece(start, compact, n))
            compact += n
        return tuple(out)

    @made_once
    def within(self, level: int, outer: int) -> tuple[Piece, ...]:
        """Return the level's pieces with ``start`` counted in the compact buffer of an outer (smaller) level."""
        assert outer <= level
        inside = zip(self.pieces(level), self.pieces(outer), strict=True)
        return tuple(Piece(o.compact + p.start - o.start, p.compact, p.numel) for p, o in inside)

    def gather_hops(self, levels: Iterable[int], base: int) -> tuple[GatherHop, ...]:
        """Return where gathers from these levels to the next outer ones lie in a compact buffer of level ``base``.

        The layout must have one region.
        """
        hops = []
        for level in levels:
            (own,), (into,) = self.within(level, base), self.within(level - 1, base)
            hops.append(GatherHop(level, own.span, into.span))
        return tuple(hops)

    def ranges(self, level: int) -> list[tuple[Slot, int, int, int]]:
        """Return the parameters in the level's slice: (slot, first, last + 1 flat element of it, compact start)."""
        return [found for piece in self.pieces(level) for found in self.ranges_of(piece)]

    def ranges_of(self, piece: Piece) -> list[tuple[Slot, int, int, int]]:
        """Return ``ranges`` of one piece of a level."""
        out = []
        for slot in self.slots:
            low = max(slot.start, piece.start)
            high = min(slot.start + slot.numel, piece.start + piece.numel)
            if low < high:
                out.append((slot, low - slot.start, high - slot.start, piece.compact + low - piece.start))
        return out

    def runs_of(self, piece: Piece, values: Mapping[str, Value]) -> Iterator[tuple[int, int, Value]]:
        """Yield the compact ranges of a piece whose parameters have one of the ``values``, with it. Padding is in the
        range before it."""
        cuts: list[tuple[int, Value]] = []
        for slot, _, _, at in self.ranges_of(piece):
            if not cuts or cuts[-1][1] != values[slot.name]:
                cuts.append((at, values[slot.name]))
        ends = [*(start for start, _ in cuts[1:]), piece.compact + piece.numel]
        for (start, mine), stop in zip(cuts, ends, strict=False):  # a piece that is all padding has no cut
            yield start, stop, mine

    @made_once
    def gaps(self, level: int = 0) -> list[tuple[int, int]]:
        """Return the padding: runs (start, end) of the level's compact buffer that no parameter uses."""
        return [gap for piece in self.pieces(level) for gap in self._gaps_of(piece)]

    def _gaps_of(self, piece: Piece) -> Iterator[tuple[int, int]]:
        at = piece.compact
        for slot, low, high, start in self.ranges_of(piece):
            if start > at:
                yield at, start
            used = high if slot.used is None else max(low, min(high, slot.used))
            at = start + used - low
        if at < piece.compact + piece.numel:
            yield at, piece.compact + piece.numel


def region_numel(numels: Iterable[int], block: int, ranks: int) -> int:
    """Return the elements of a region: parameters of so many, on blocks, padded to whole blocks of all ranks."""
    return filled(sum(filled(numel, block) for numel in numels), block * ranks)


def make_layout(
    shapes: Mapping[str, Sequence[int]],
    *,
    block: int,
    sizes: Sequence[int],
    indices: Sequence[int],
    exact: frozenset[str] = frozenset(),
    parts: int = 1,
    used: Mapping[str, int | None] = MappingProxyType({}),
) -> UnitLayout:
    """Lay out a unit's parameters in their order, coded ones first.

    block: a number of elements; a slice of any level is whole blocks. sizes: the sub-axes' sizes, innermost first;
    their product is d. exact: the names of the parameters of the exact region. parts: of whole blocks, into which a
    rank's slices are cut again. used: as ``Slot.used``, by name.
    """
    slots: list[Slot] = []
    regions: list[tuple[int, int]] = []
    end = 0
    for names in ([n for n in shapes if n not in exact], [n for n in shapes if n in exact]):
        if not names:
            continue
        begin = at = end
        for name in names:
            slots.append(Slot(name, tuple(shapes[name]), at, used.get(name)))
            at += filled(slots[-1].numel, block)
        end = begin + region_numel((prod(shapes[name]) for name in names), block, prod(sizes) * parts)
        regions.append((begin, end - begin))
    return UnitLayout(tuple(slots), tuple(regions), tuple(sizes), tuple(indices))


# -- which parameters lie together -----------------------------------------------------------------


def exact_names(numels: Mapping[Key, int], never: Collection[Key], limit: int) -> frozenset[Key]:
    """Return the parameters of a unit's exact region: those of up to ``limit`` elements, and those that are ``never``
    rounded. If these are all, nothing of the unit is quantised.
    """
    return frozenset(name for name, numel in numels.items() if numel <= limit or name in never)


def groups_of(numels: Sequence[tuple[Key, int]], tied: Collection[Key], limit: int) -> list[list[Key]]:
    """Return the parameters of each unit of a module: every tied one by itself, then, in their order, as many as have
    at most ``limit`` elements, one at least.

    numels: the parameters with their elements. tied: those that the pipeline's other end holds, too.
    """
    groups: list[list[Key]] = [[key] for key, _ in numels if key in tied]
    room = -1
    for key, numel in numels:
        if key in tied:
            continue
        if numel > room:
            groups.append([])
            room = limit
        groups[-1].append(key)
        room -= numel
    return groups
