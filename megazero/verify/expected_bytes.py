"""The bytes that each rank should send in a step, from the configuration alone.

It builds the units of a decoder on the meta device and the schedule's program, and puts them into the formulas of
plan/communication.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import nn

from megazero.config import RunConfig, World
from megazero.config.model.spec import model_spec
from megazero.config.schedule.batch_sizes import BatchSizeRampup
from megazero.mesh.grid import INTER, INTRA, AxisSpec
from megazero.models import Decoder
from megazero.models.dtypes import DTYPES
from megazero.moe import ExpertParallel
from megazero.plan import communication
from megazero.plan.base_layout import grid_of
from megazero.plan.communication import (
    Activation,
    Bytes,
    ExpertRows,
    Formats,
    OuterFormat,
    UnitShape,
    expert_rows,
)
from megazero.plan.gathers import Copies
from megazero.plan.units import chunks
from megazero.pp.schedules import make_schedule
from megazero.tp import TensorParallel
from megazero.train.parallelize import matrix_traits
from megazero.verify.reference import arriving, fragment_of, leaving
from megazero.zero.layout import UnitLayout, make_layout
from megazero.zero.matrix_updates import deal_matrices
from megazero.zero.optimizer import Traits

BETWEEN = "outer_inter_node_bytes"  # between outer replicas


class LayerRows(NamedTuple):
    """The rows that a rank exchanges in a layer and a micro-batch with those that share the experts."""

    layer: int
    rows: ExpertRows


class ExpectedBytes:
    """The bytes per step of every rank of a configuration. Slices are whole multiples of ``block`` elements."""

    def __init__(self, config: RunConfig, world: World, exact: bool, block: int) -> None:
        self.config, self.exact, self.block = config, exact, block
        self.shards, self.wire = config.shards(world), config.wire(world)
        self.grid = grid_of(config, world, self.shards.factors)
        self.width = DTYPES[config.precision.params_dtype].itemsize
        self.outer = OuterFormat.of(config.outer, self.grid.outer, self._formats().sums)
        self._cached = lru_cache(maxsize=None)(self._step)

    def bytes_of(
        self, rank: int, step: int, after_save: bool, rows: Iterable[LayerRows] = ()
    ) -> dict[str, int]:
        """Return 'kind_link_bytes' -> bytes of a rank in a step, which is counted from 0 and is not the run's first.

        What is on its way between outer replicas counts in the step in which it leaves. after_save: the run saved
        just before this step. Under the delta refresh a save brings every copy up to date. rows: those that it
        exchanged with the ranks that share the experts.
        """
        config, sizes = self.config, BatchSizeRampup.of(self.config, self.grid.batch_ranks)
        count = sizes.micro_batches(sizes.consumed_after(step))
        moving = [each(config.outer, step) if self.outer else None for each in (leaving, arriving)]
        found = self._cached(rank, count, *moving)
        refreshed = after_save and not self.exact and self.wire.delta
        found = {key: sent for key, sent in found.items() if not (refreshed and key.startswith("refresh"))}
        return found | self._exchanged(rows)

    def _exchanged(self, rows: Iterable[LayerRows]) -> dict[str, int]:
        """Return the bytes of rows on their way to experts and back, and of their gradients, by link."""
        layers, activation = model_spec(self.config.model).by_place, Activation.of(self.config, self.width)
        moved: Counter[str] = Counter()
        for each in rows:
            for way in expert_rows(self.config, layers[each.layer], self.grid, activation, each.rows):
                moved.update({f"ep_{link}_bytes": int(n) for link, n in way.items()})
        return dict(+moved)

    def under_way(self, step: int) -> bool:
        """Return whether a fragment is on its way between outer replicas after a step."""
        outer = self.config.outer
        latest = range(step - outer.outer_delay + 1, step + 1) if self.outer is not None else ()
        return any(leaving(outer, each) is not None for each in latest)

    def _step(self, rank: int, micro_batches: int, leaves: int | None, arrives: int | None) -> dict[str, int]:
        """Compute the bytes of one rank in one step, at whose end fragments leave and arrive. Zeros are left out."""
        config, grid = self.config, self.grid
        decoder = self._decoder(rank)
        pp = grid.axis("pp").index(rank)
        schedule = make_schedule(config.pipeline_schedule, grid.pp, config.virtual_stages, micro_batches)
        program = [(str(a.kind.value), a.stage // grid.pp) for a in schedule[pp]]
        units, copies, laid_out = self._units(decoder, rank)
        formats, activation = self._formats(), Activation.of(config, self.width)
        total: Bytes = communication.model_state(units, grid, formats, copies, program, micro_batches)
        total += self._updates(laid_out, rank)
        total += self._meetings(units, laid_out, leaves, arrives)
        total += communication.pipeline(schedule, grid, rank, activation)
        total += communication.tensor_parallel(config, decoder.stages, schedule[pp], activation)
        total += communication.context_parallel(config, decoder.stages, schedule[pp], grid, activation)
        total += communication.expert_balance(config, decoder.stages, schedule[pp], grid)
        return {f"{kind}_{link}_bytes": sent for (kind, link), sent in sorted(total.items()) if sent}

    def _meetings(
        self, units: Sequence[UnitShape], laid_out: Sequence[LaidOut], leaves: int | None, arrives: int | None
    ) -> Bytes:
        """Return the bytes of fragments: of one that leaves those between replicas, of one that arrives the rest."""
        out = Bytes()
        for unit, held in zip(units, laid_out, strict=True):
            # A table that the pipeline's two ends hold is the embedding's at both.
            fragment = 0 if unit.tied else fragment_of(next(iter(held.traits)), self.config)
            for hop in self.outer.hops(unit, self.grid) if self.outer else ():
                across = hop.axis.role == "outer"
                if fragment == (leaves if across else arrives):
                    out["outer" if across else "reduce", hop.axis.link] += hop.sent
        return out

    def _decoder(self, rank: int) -> Decoder:
        """Return the decoder of a rank on the meta device."""
        pp, tp = (self.grid.axis(name).index(rank) for name in ("pp", "tp"))
        context = TensorParallel(
            None, tp, self.grid.tp, sequence_parallel=self.config.parallel.sequence_parallel
        )
        experts = ExpertParallel(self.grid.ep_axis.index(rank), self.grid.ep)
        own = [stage for stage in self.config.stages() if stage.rank == pp]
        return Decoder(self.config.model, context, ep=experts, stages=own, device="meta")

    def _formats(self) -> Formats:
        return Formats(self.width, max(self.width, 4)) if self.exact else Formats.of(self.wire, self.width)

    def _units(self, decoder: Decoder, rank: int) -> tuple[list[UnitShape], Copies, list[LaidOut]]:
        """Return the units in the order of use, which modules need which units, and how they are laid out.

        Each module's own parameters are cut into chunks.
        """
        tied, owner = decoder.tied_ends(), dict[int, int]()
        units, laid_out = list[UnitShape](), list[LaidOut]()
        names = {id(p): name for name, p in decoder.named_parameters()}
        uses: list[list[list[int]]] = []
        for part in decoder.units_of_parts(self.config.zero.zero_unit_layers):
            uses.append([])
            for modules in part:
                held = (p for module in modules for p in module.parameters())
                fresh = {names[id(p)]: p for p in held if id(p) not in owner}
                for group, is_tied in self._groups(decoder, fresh, tied):
                    owner.update({id(fresh[name]): len(units) for name in group})
                    laid_out.append(self._laid_out(decoder, {n: fresh[n] for n in group}, rank))
                    units.append(self._shape(laid_out[-1], is_tied))
                for module in modules:
                    uses[-1].append(list(dict.fromkeys(owner[id(p)] for p in module.parameters())))
        shards, ahead = self.shards, self.config.zero.zero_prefetch_bytes
        return units, Copies(uses, shards.keep_gathered, ahead, shards.whole_gradients), laid_out

    def _groups(
        self, decoder: Decoder, fresh: Mapping[str, nn.Parameter], tied: Mapping[str, str]
    ) -> list[tuple[list[str], bool]]:
        """Return the names of each unit, and whether it is a tied parameter, which has a unit of its own.

        So have experts that data-parallel ranks share.
        """
        apart = {n for n in fresh if decoder.specs[n].experts and self.grid.ep_data > 1}
        others, experts = (
            [n for n in fresh if n not in tied and (n in apart) is each] for each in (False, True)
        )
        most = self.config.zero.zero_chunk_numel
        cut = [
            chunk
            for names in (others, experts)
            for chunk in chunks(names, [fresh[name].numel() for name in names], most)
        ]
        own = [([name], True) for name in fresh if name in tied]
        return own + [(chunk, False) for chunk in cut]

    def _laid_out(self, decoder: Decoder, params: Mapping[str, nn.Parameter], rank: int) -> LaidOut:
        partial, replicated = decoder.partial_gradients(), decoder.replicated_parameters()
        plain, limit = decoder.no_weight_decay(), self.wire.exact_numel
        matrices = matrix_traits(decoder, self.config)
        quantises = not self.exact and bool(self.wire.codings)
        # Parameters of like traits lie together: padding between them goes with the one before it.
        traits = {
            n: Traits(
                (("weight_decay", 0.0),) if n in plain else (),
                n in replicated,
                n in partial,
                span=decoder.replica_span(n),
                rounded=decoder.specs[n].experts > 0,
                **matrices.get(n, {}),
            )
            for n in params
        }
        exact = {n for n, p in params.items() if p.numel() <= limit or quantises and traits[n].exact}
        if len(exact) == len(params):
            quantises, exact = False, set()
        ordered = sorted(params, key=lambda n: repr(traits[n]))
        apart = self.grid.ep_data if any(decoder.specs[n].experts for n in params) else 1
        axes = self.grid.data_axes if apart == 1 else self.grid.expert_axes
        cuts = axes  # outer steps reduce over one level more
        cuts += (self.grid.axis("outer"),) if self.grid.outer > 1 else ()
        layout = make_layout(
            {n: params[n].shape for n in ordered},
            block=self.block,
            sizes=[a.size for a in cuts],
            indices=[a.index(rank) for a in cuts],
            exact=frozenset(exact),
        )
        return LaidOut(layout, traits, quantises, apart, _os_axes(axes))

    def _shape(self, unit: LaidOut, tied: bool) -> UnitShape:
        layout, traits = unit.layout, unit.traits
        numels = [n for _, n in layout.regions]
        summed = 0
        for piece in layout.pieces(len(unit.os_axes)):
            starts = [(at, traits[slot.name]) for slot, _, _, at in layout.ranges_of(piece)]
            ends = [*(at for at, _ in starts[1:]), piece.compact + piece.numel] if starts else []
            summed += sum(stop - at for (at, mine), stop in zip(starts, ends, strict=True) if mine.partial)
        return UnitShape(numels[0], sum(numels[1:]), unit.quantises, summed, tied, unit.apart)

    def _updates(self, units: Sequence[LaidOut], rank: int) -> Bytes:
        """Return the bytes of matrices on their way to their owners and, as many, of their updates."""
        out = Bytes()
        for apart in dict.fromkeys(unit.apart for unit in units):  # of units on other axes apart
            out += self._updates_of([unit for unit in units if unit.apart == apart], rank)
        return out

    def _updates_of(self, units: Sequence[LaidOut], rank: int) -> Bytes:
        """Return the same of units on the same axes."""
        out, axes = Bytes(), units[0].os_axes
        traits = {name: mine for unit in units for name, mine in unit.traits.items()}
        cuts = [(axis.size, axis.link) for axis in axes]
        dealing, _ = deal_matrices([unit.layout for unit in units], traits, cuts, self.grid.tp)
        axes = [*axes, self.grid.axis("tp")][: len(dealing.sizes)]
        width = communication.matrix_width(self.config.optimizer, self.width)
        for route in dealing.routes(tuple(axis.index(rank) for axis in axes)):
            for axis, hop in zip(axes, route.hops, strict=True):
                own = axis.index(rank)
                sent = sum(hop.sent) - hop.sent[own] + sum(hop.received) - hop.received[own]
                out["update", axis.link] += sent * width
        return out


class LaidOut(NamedTuple):
    """A unit on one rank. quantises: some of it is quantised. apart: as ``UnitShape``'s. os_axes: they cut states."""

    layout: UnitLayout
    traits: dict[str, Traits]
    quantises: bool
    apart: int
    os_axes: list[AxisSpec]


def _os_axes(axes: Sequence[AxisSpec]) -> list[AxisSpec]:
    return [axis for axis in axes if axis.role in ("p", "g", "os")]


def mismatches(want: Mapping[str, int], got: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return 'kind_link_bytes' -> (expected, counted) where the two differ. Sums over kinds are left out."""
    sums = (f"{INTRA}_bytes", f"{INTER}_bytes")
    keys = sorted({*want, *(key for key, sent in got.items() if sent and key not in sums)})
    return {k: (want.get(k, 0), got.get(k, 0)) for k in keys if want.get(k, 0) != got.get(k, 0)}
