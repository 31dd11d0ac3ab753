"""When each unit is gathered over P in a step, by the engine's rule (zero/plan.py: coming), from sizes alone.

A segment of the program (a forward or backward of one part) depends on the units held when it begins and on the
segments after it. Both soon repeat, so a long step costs little more than a short one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megazero.zero.plan import coming, window

Segment = tuple[str, int]  # kind, as in zero/program.py, and part
Units = frozenset[int]


@dataclass(frozen=True)
class Copies:
    """How long copies live.

    ``uses`` gives, for each part, the units that its modules need, in order of the forward. prefetch_bytes: how many
    bytes of parameters may be here ahead of use, beyond those of the next module. whole_gradients: gradients are
    accumulated whole and reduced once per step.
    """

    uses: Sequence[Sequence[Sequence[int]]]
    keep_gathered: bool = False
    prefetch_bytes: int = 0
    whole_gradients: bool = False


class ModuleUse(NamedTuple):
    """A use of a module: the units that it needs, and those whose gathers begin then, its own before those ahead."""

    units: Sequence[int]
    begun: Sequence[int]


class GatheredUnits(NamedTuple):
    """The gathered units. in_use: in use or kept between uses. ahead: gathered or in flight for a later module."""

    in_use: Units = frozenset()
    ahead: Units = frozenset()


def gathers(copies: Copies, program: Sequence[Segment], sizes: Sequence[int]) -> Counter[int]:
    """Return how often each unit, of ``sizes`` bytes, is gathered over P in a step. A unit that is still there is not
    gathered again.
    """
    return Counter(unit for use in module_uses(copies, program, sizes) for unit in use.begun)


def module_uses(copies: Copies, program: Sequence[Segment], sizes: Sequence[float]) -> Sequence[ModuleUse]:
    """Return the step's begin, which needs nothing and looks ahead, and then every use of a module.

    After a use a unit stays if a coming module needs it: the next one, or one within the bytes that may be held
    ahead. With ``keep_gathered`` it stays as long as its part comes again. In a backward it is in use until its last
    module there has run.
    """
    uses = tuple(tuple(map(tuple, modules)) for modules in copies.uses)
    rule = _rule(uses, copies.keep_gathered, copies.prefetch_bytes, tuple(sizes))
    return rule.of(tuple(program))


@lru_cache(maxsize=256)
def _rule(
    uses: tuple[tuple[tuple[int, ...], ...], ...],
    keep_gathered: bool,
    prefetch_bytes: int,
    sizes: tuple[float, ...],
) -> _Rule:
    """Return the rule for these copies. Ranks and layouts that are alike share what was found."""
    return _Rule(Copies(uses, keep_gathered, prefetch_bytes), sizes)


class _Rule:
    """Which gathers begin at a use, and what stays after it."""

    def __init__(self, copies: Copies, sizes: Sequence[float]) -> None:
        self.copies, self.sizes = copies, sizes
        self.known: dict[object, tuple[Sequence[ModuleUse], GatheredUnits]] = {}  # what happened in a segment
        self.programs: dict[tuple[Segment, ...], Sequence[ModuleUse]] = {}
        self.window = window(len(sizes), sum(len(modules) for modules in copies.uses))
        self.part_of: dict[int, int] = {}  # the first part that uses the unit
        for part, modules in enumerate(copies.uses):
            for units in modules:
                for unit in units:
                    self.part_of.setdefault(unit, part)

    def of(self, program: tuple[Segment, ...]) -> Sequence[ModuleUse]:
        """Return the uses of a program."""
        if program not in self.programs:
            self.programs[program] = list(self._of(program))
        return self.programs[program]

    def _of(self, program: Sequence[Segment]) -> Iterator[ModuleUse]:
        last = {part: i for i, (kind, part) in enumerate(program) if kind != "W"}
        begun = tuple(
            self.coming(self.visits(program[: self.reach(program, 0)])[: self.window], GatheredUnits())
        )
        yield ModuleUse((), begun)
        held = GatheredUnits(ahead=frozenset(begun))
        for i, segment in enumerate(program):
            following = tuple(program[i + 1 : self.reach(program, i + 1)])
            returning = frozenset(part for part, end in last.items() if end > i)
            key = segment, following, returning, held
            if key not in self.known:
                self.known[key] = self.run(segment, following, returning, held)
            seen, held = self.known[key]
            yield from seen

    def visits(self, segments: Iterable[Segment]) -> list[Sequence[int]]:
        """Return the units that each module of these segments needs, in the order of use."""
        out: list[Sequence[int]] = []
        for kind, part in segments:
            modules = self.copies.uses[part]
            out += [] if kind == "W" else modules if kind == "F" else reversed(modules)
        return out

    def reach(self, program: Sequence[Segment], start: int) -> int:
        """Return the end of the segments from ``start`` that have as many uses as are looked at."""
        left = self.window
        while left > 0 and start < len(program):
            kind, part = program[start]
            left -= 0 if kind == "W" else len(self.copies.uses[part])
            start += 1
        return start

    def run(
        self, segment: Segment, following: Sequence[Segment], returning: Units, held: GatheredUnits
    ) -> tuple[Sequence[ModuleUse], GatheredUnits]:
        """Return the uses of a segment, and what is held after it. returning: the parts that come again."""
        own, uses = self.visits([segment]), []
        every = own + self.visits(following)
        again = self._again(segment[0], own)
        for at, units in enumerate(own):
            missing = [u for u in units if u not in held.in_use and u not in held.ahead]
            held = GatheredUnits(held.in_use.union(units), held.ahead.difference(units))
            coming = self.coming(every[at + 1 : at + 1 + self.window], held)
            more = [u for u in coming if u not in held.in_use and u not in held.ahead]
            uses.append(ModuleUse(units, (*missing, *more)))
            stay = {u for u in held.in_use if u in again[at] or self._kept(u, returning)}
            ahead = held.ahead.union(more, (u for u in held.in_use if u not in stay and u in coming))
            held = GatheredUnits(frozenset(stay), ahead)
        return uses, held

    def _kept(self, unit: int, returning: Units) -> bool:
        return self.copies.keep_gathered and self.part_of[unit] in returning

    @staticmethod
    def _again(kind: str, visits: Sequence[Sequence[int]]) -> list[set[int]]:
        """Return, for each use in a segment, the units that are in use after it.

        They are those of later modules of the same backward. A backward of the input alone ends a module's use when
        the module before it has begun.
        """
        out: list[set[int]] = []
        later: set[int] = set()
        for units in reversed(visits):
            out.append(later.union(units) if kind == "I" and out else later)
            later = later.union(units) if kind != "F" else later
        return out[::-1]

    def coming(self, later: Iterable[Sequence[int]], held: GatheredUnits) -> dict[int, None]:
        """Return the units gathered for later modules."""
        here, keeps = held.in_use.__contains__, self.copies.keep_gathered
        found = coming(later, here, held.ahead, lambda _: keeps, self.sizes, self.copies.prefetch_bytes)
        return dict.fromkeys(found)
