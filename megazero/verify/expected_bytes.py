"""The bytes that each rank should send in a step, from the configuration alone.

Units, their layouts and what moves for them are those of the engine's own plan (plan/units.py, zero/layout.py,
zero/plan.py), laid out here as a rank has them. tests/byte_formula.py is a formula that shares nothing with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megazero.config import RunConfig, World
from megazero.config.layout.wire import Wire
from megazero.config.model.spec import model_spec
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.models.dtypes import DTYPES
from megazero.plan import communication
from megazero.plan.communication import Activation, Bytes, ExpertRows, UnitShape, expert_rows
from megazero.plan.layout import states_of
from megazero.plan.units import RankUnits, UnitRule
from megazero.pp.schedules import make_schedule
from megazero.train.parallelize import traits_of
from megazero.zero import Traits
from megazero.zero.build import lay_out
from megazero.zero.layout import UnitLayout
from megazero.zero.matrix_updates import deal_matrices


class LayerRows(NamedTuple):
    """The rows that a rank exchanges in a layer and a micro-batch with those that share the experts."""

    layer: int
    rows: ExpertRows


class LaidOut(NamedTuple):
    """A unit as a rank has it. traits: of its parameters, which have names of their own here."""

    shape: UnitShape
    layout: UnitLayout
    traits: Mapping[str, Traits]


class ExpectedBytes:
    """The bytes per step of every rank of a configuration. Slices are whole multiples of ``block`` elements."""

    def __init__(self, config: RunConfig, world: World, exact: bool, block: int) -> None:
        self.config, wire = config, config.wire(world)
        # In the exact pass the same parameters lie apart.
        self.wire = replace(Wire(exact_numel=wire.exact_numel) if exact else wire, least_block=block)
        self.states = states_of(config, world, self.wire, DTYPES[config.precision.params_dtype].itemsize)
        self.grid, os = self.states.grid, self.states.shards.os
        self.activation = Activation.of(config, self.states.formats.width)
        self.rule = UnitRule(config, self.wire, self.grid.dp, os)
        self._cached = lru_cache(maxsize=None)(self._step)

    def bytes_of(
        self, rank: int, step: int, after_save: bool, rows: Iterable[LayerRows] = ()
    ) -> dict[str, int]:
        """Return 'kind_link_bytes' -> bytes of a rank in a step, which is counted from 0 and is not the run's first.

        after_save: the run saved just before this step. Under the delta refresh a save brings every copy up to date.
        rows: those that it exchanged with the ranks that share the experts.
        """
        sizes = BatchSizes.of(self.config, self.grid.batch_ranks)
        count = sizes.micro_batches(sizes.consumed_after(step))
        found = self._cached(rank, count)
        refreshed = after_save and self.wire.delta
        found = {key: sent for key, sent in found.items() if not (refreshed and key.startswith("refresh"))}
        return found | self._exchanged(rows)

    def _exchanged(self, rows: Iterable[LayerRows]) -> dict[str, int]:
        """Return the bytes of rows on their way to experts and back, and of their gradients, by link."""
        layers = model_spec(self.config.model).by_place
        moved: Counter[str] = Counter()
        for each in rows:
            for way in expert_rows(self.config, layers[each.layer], self.grid, self.activation, each.rows):
                moved.update({f"ep_{link}_bytes": int(n) for link, n in way.items()})
        return dict(+moved)

    def _step(self, rank: int, micro_batches: int) -> dict[str, int]:
        """Compute the bytes of one rank in one step. Zeros are left out."""
        config, grid, states = self.config, self.grid, self.states
        pp = grid.axis("pp").index(rank)
        schedule = make_schedule(config.pipeline_schedule, grid.pp, config.virtual_stages, micro_batches)
        program = [(str(a.kind.value), a.stage // grid.pp) for a in schedule[pp]]
        stages = [stage for stage in config.stages() if stage.rank == pp]
        held = RankUnits(stages, self.rule)
        units = [self._laid_out(held, number, rank) for number in range(len(held.shapes))]
        shapes = [unit.shape for unit in units]
        copies, formats = states.copies(held), states.formats
        total = communication.model_state(shapes, grid, formats, copies, program, micro_batches)
        for apart in dict.fromkeys(shape.apart for shape in shapes):  # matrices on other axes are dealt apart
            total += self._updates([unit for unit in units if unit.shape.apart == apart], rank)
        total += communication.pipeline(schedule, grid, rank, self.activation)
        total += communication.inside_modules(config, stages, schedule[pp], grid, self.activation)
        return {f"{kind}_{link}_bytes": sent for (kind, link), sent in sorted(total.items()) if sent}

    def _laid_out(self, held: RankUnits, number: int, rank: int) -> LaidOut:
        """Return a unit as a rank has it."""
        shape, cut = held.shapes[number], self.states.plan(held.shapes[number]).cut
        group = {f"{number}.{place}": p for place, p in enumerate(held.groups[number])}
        traits = {name: traits_of(p, self.config) for name, p in group.items()}
        layout, _ = lay_out(
            {name: p.local_shape(self.grid.tp) for name, p in group.items()},
            traits,
            block=self.wire.block,
            exact_numel=self.wire.exact_numel,
            quantises=bool(self.wire.codings),
            sizes=[axis.size for axis in cut.axes],
            indices=[axis.index(rank) for axis in cut.axes],
        )
        runs = [run for piece in layout.pieces(cut.os) for run in layout.runs_of(piece, traits)]
        partial = sum(stop - start for start, stop, mine in runs if mine.partial)
        return LaidOut(replace(shape, partial=partial), layout, traits)

    def _updates(self, units: Sequence[LaidOut], rank: int) -> Bytes:
        """Return the bytes of matrices on their way to their owners and, as many, of their updates."""
        out, cut = Bytes(), self.states.plan(units[0].shape).cut
        axes = cut.axes[: cut.os]
        traits = {name: each for unit in units for name, each in unit.traits.items()}
        layouts, sides = [unit.layout for unit in units], [(axis.size, axis.link) for axis in axes]
        dealing, _ = deal_matrices(layouts, traits, sides, self.grid.tp)
        axes = (*axes, self.grid.axis("tp"))[: len(dealing.sizes)]
        width = communication.matrix_width(self.config.optimizer, self.states.formats.width)
        for route in dealing.routes(tuple(axis.index(rank) for axis in axes)):
            for axis, hop in zip(axes, route.hops, strict=True):
                own = axis.index(rank)
                sent = sum(hop.sent) - hop.sent[own] + sum(hop.received) - hop.received[own]
                out["update", axis.link] += sent * width
        return out


def mismatches(want: Mapping[str, int], got: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return 'kind_link_bytes' -> (expected, counted) where the two differ. Sums over kinds are left out."""
    sums = ("intra_", "inter_")
    keys = sorted({*want, *(key for key, sent in got.items() if sent and not key.startswith(sums))})
    return {k: (want.get(k, 0), got.get(k, 0)) for k in keys if want.get(k, 0) != got.get(k, 0)}
