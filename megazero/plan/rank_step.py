"""The step of one pipeline rank as data for the simulation: modules, gathers, reductions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megazero.plan.gathers import ModuleUse, Segment, module_uses
from megazero.plan.layout import Layout, UnitChains
from megazero.plan.units import Module
from megazero.pp.schedules import Action, Kind

# Seconds of compute, of recompute, in tensor-parallel collectives, in swaps of context parallelism, and with rows on
# their way to experts and back.
Spent = tuple[float, float, float, float, float]


class RankStep:
    """A rank's step. ``uses`` are its module uses in order, each with the gathers that begin then."""

    def __init__(self, layout: Layout, rank: int, micro_batches: int, ahead: bool = True) -> None:
        """ahead: gathers begin ahead of use."""
        self.layout, self.rank, self.base = layout, rank, layout.base
        self.units = layout.units(rank)
        chains = {unit: layout.chains_of(unit) for unit, _ in self.units.counts}
        self.chains: list[UnitChains] = [chains[unit] for unit in self.units.shapes]
        self.left = [micro_batches] * len(self.units.parts)  # backwards to come, by part
        self.staged = any(layout.states.g(unit) > 1 for unit in self.units.shapes)
        self.moving = any(w.gather for w in self.chains)
        self.seen: set[int] = set()  # parts that had their first forward
        self.uses = self._turns(layout.program(rank, micro_batches), ahead)

    def _turns(self, program: list[Segment], ahead: bool) -> Iterator[ModuleUse]:
        """Return the step's begin and every use of a module, with the gathers that begin then."""
        if not self.moving:  # no unit is gathered again: the first forward of every part is all there is
            program = list(dict.fromkeys(segment for segment in program if segment[0] == "F"))
        copies = self.layout.copies(self.rank)
        sizes = [chains.ahead_bytes for chains in self.chains]
        if ahead:
            return iter(module_uses(copies, program, sizes))
        return _at_use(module_uses(replace(copies, prefetch_bytes=0), program, sizes))

    def open(self, action: Action) -> tuple[tuple[Module, ...], bool, bool]:
        """Begin an action. Return its modules in their order, whether each is a use, and whether each is reduced."""
        part = action.stage // self.base.pp
        modules = self.units.parts[part]
        reduces = False
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            self.left[part] -= 1
            reduces = self.staged or not self.left[part]
        visits = self.moving and action.kind != Kind.WEIGHT or part not in self.seen
        self.seen.add(part)
        return (modules if action.kind == Kind.FORWARD else modules[::-1]), visits, reduces

    def spent(self, module: str, kind: Kind) -> Spent:
        """Return the times of a module in an action."""
        times = self.base.compute.times[module]
        if kind == Kind.WEIGHT:
            return times.backward_weight, 0.0, 0.0, 0.0, 0.0
        if kind == Kind.FORWARD:
            return times.forward, 0.0, times.tp_forward, times.cp_forward, times.ep_forward
        own = times.backward_input + (times.backward_weight if kind == Kind.BACKWARD else 0.0)
        return own, times.recompute, times.tp_backward, times.cp_backward, times.ep_backward


def _at_use(uses: Iterable[ModuleUse]) -> Iterator[ModuleUse]:
    """Yield the same gathers, but none before the use that it is for."""
    due: set[int] = set()
    for units, begun in uses:
        due.update(begun)
        yield ModuleUse(units, [unit for unit in units if unit in due])
        due.difference_update(units)
