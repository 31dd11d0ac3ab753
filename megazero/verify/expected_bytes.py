"""The bytes that each rank should send in a step, from the configuration alone.

It takes the parameters of a decoder on the meta device and the schedule's program, lays the units out by arithmetic
of its own, and puts them into the formulas of plan/communication.py. It imports nothing of megazero.zero, whose bytes
it judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from torch import nn

from megazero.config import RunConfig, World
from megazero.config.model.spec import ParameterSpec, model_spec
from megazero.config.options.optimizers import OPTIMIZERS
from megazero.config.schedule.batch_sizes import BatchSizeRampup
from megazero.mesh.dealing import ROUND_NUMEL, Cut, Dealing
from megazero.mesh.grid import AxisSpec
from megazero.mesh.levels import INTRA
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
from megazero.verify.reference import arriving, leaving


class LayerRows(NamedTuple):
    """The rows that a rank exchanges in a layer and a micro-batch with those that share the experts."""

    layer: int
    rows: ExpertRows


class ExpectedBytes:
    """The bytes per step of every rank of a configuration. Slices are whole multiples of ``block`` elements.

    between: the counter of what goes between outer replicas.
    """

    def __init__(self, config: RunConfig, world: World, exact: bool, block: int) -> None:
        self.config, self.exact, self.block = config, exact, block
        self.shards, self.wire = config.shards(world), config.wire(world)
        self.grid = grid_of(config, world, self.shards.factors)
        self.width = DTYPES[config.precision.params_dtype].itemsize
        self.between = f"outer_{self.grid.link(0, self.grid.world_size - 1)}_bytes"
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
        moving = [self.outer is not None and each(config.outer, step) for each in (leaving, arriving)]
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
        """Return whether differences are on their way between outer replicas after a step."""
        outer = self.config.outer
        latest = range(step - outer.outer_delay + 1, step + 1) if self.outer is not None else ()
        return any(leaving(outer, each) for each in latest)

    def _step(self, rank: int, micro_batches: int, leaves: bool, arrives: bool) -> dict[str, int]:
        """Compute the bytes of one rank in one step, at whose end differences leave or arrive. Zeros are left out."""
        config, grid = self.config, self.grid
        decoder = self._decoder(rank)
        pp = grid.axis("pp").index(rank)
        schedule = make_schedule(config.pipeline_schedule, grid.pp, config.virtual_stages, micro_batches)
        program = [(str(a.kind.value), a.stage // grid.pp) for a in schedule[pp]]
        units, copies, laid_out = self._units(decoder, rank)
        formats, activation = self._formats(), Activation.of(config, self.width)
        total: Bytes = communication.model_state(units, grid, formats, copies, program, micro_batches)
        total += self._updates(laid_out, rank)
        total += self._meetings(units, leaves, arrives)
        total += communication.pipeline(schedule, grid, rank, activation)
        total += communication.inside_modules(config, decoder.stages, schedule[pp], grid, activation)
        return {f"{kind}_{link}_bytes": sent for (kind, link), sent in sorted(total.items()) if sent}

    def _meetings(self, units: Sequence[UnitShape], leaves: bool, arrives: bool) -> Bytes:
        """Return the bytes of differences: those between replicas as they leave, the rest as they arrive."""
        out = Bytes()
        for hop in (
            hop for unit in units for hop in (self.outer.hops(unit, self.grid) if self.outer else ())
        ):
            across = hop.axis.role == "outer"
            if leaves if across else arrives:
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
                    laid_out.append(self._laid_out(decoder, {n: fresh[n] for n in group}))
                    units.append(self._shape(laid_out[-1], is_tied, rank))
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

    def _laid_out(self, decoder: Decoder, params: Mapping[str, nn.Parameter]) -> LaidOut:
        tp, specs = self.grid.tp, decoder.specs
        quantises = not self.exact and bool(self.wire.codings)
        exact = {
            n
            for n, p in params.items()
            if p.numel() <= self.wire.exact_numel or quantises and specs[n].exact(tp)
        }
        if len(exact) == len(params):
            quantises, exact = False, set()
        apart = self.grid.ep_data if any(specs[n].experts for n in params) else 1
        axes = self.grid.data_axes if apart == 1 else self.grid.expert_axes
        # Outer steps reduce over one level more.
        ranks = prod(axis.size for axis in axes) * self.grid.outer
        # Parameters whose updates and sums are alike lie together: padding between them goes with the one before it.
        ordered = sorted(params, key=lambda n: (n in exact, self._likeness(params[n], specs[n])))
        starts, ends, end = dict[str, int](), list[int](), 0
        for region in ([n for n in ordered if n not in exact], [n for n in ordered if n in exact]):
            begin = end
            for name in region:
                starts[name] = end
                end += _up(params[name].numel(), self.block)
            end = begin + _up(end - begin, self.block * ranks)
            ends += [end] if region else []
        os_axes = [axis for axis in axes if axis.role in ("p", "g", "os")]
        shapes = {n: tuple(params[n].shape) for n in ordered}
        return LaidOut({n: specs[n] for n in ordered}, shapes, starts, ends, quantises, apart, os_axes)

    def _likeness(self, parameter: nn.Parameter, spec: ParameterSpec) -> tuple[int, ...]:
        """Return a key by which parameters are ordered in their unit's buffer."""
        tp, split = self.grid.tp, self._split(spec)
        copies = spec.copies(tp)
        return (
            parameter.ndim > 1,  # vectors have no weight decay
            spec.replicated(tp),
            spec.partial(tp, self.config.parallel.sequence_parallel),
            copies if copies > 1 else 0,
            self._by_matrix(spec),
            split is None,
            split or 0,
            spec.experts > 0,
        )

    def _by_matrix(self, spec: ParameterSpec) -> bool:
        """Tell whether the optimizer steps the parameter as a whole matrix."""
        by_matrix = OPTIMIZERS[self.config.optimizer.optimizer].by_matrix
        return by_matrix and spec.multiplies and not spec.vocabulary

    def _split(self, spec: ParameterSpec) -> int | None:
        """Return the dimension of a matrix that is cut over tensor-parallel ranks, which step it together."""
        return spec.cut if self._by_matrix(spec) else None

    def _shape(self, unit: LaidOut, tied: bool, rank: int) -> UnitShape:
        tp, sequence_parallel = self.grid.tp, self.config.parallel.sequence_parallel
        place, summed = [axis.index(rank) for axis in unit.os_axes], 0
        for begin, end in unit.slices(place):
            held = list(unit.held(begin, end))
            ends = [*(low for _, low, _ in held[1:]), end]
            summed += sum(
                stop - low
                for (name, low, _), stop in zip(held, ends, strict=False)
                if unit.specs[name].partial(tp, sequence_parallel)
            )
        numels = [end - begin for begin, end in unit.regions]
        return UnitShape(numels[0], sum(numels[1:]), unit.quantises, summed, tied, unit.apart)

    def _updates(self, units: Sequence[LaidOut], rank: int) -> Bytes:
        """Return the bytes of matrices on their way to their owners and, as many, of their updates."""
        out = Bytes()
        for apart in dict.fromkeys(unit.apart for unit in units):  # of units on other axes apart
            out += self._updates_of([unit for unit in units if unit.apart == apart], rank)
        return out

    def _updates_of(self, units: Sequence[LaidOut], rank: int) -> Bytes:
        """Return the same of units on the same axes."""
        out, axes, tp = Bytes(), units[0].os_axes, self.grid.tp
        cuts = [cut for unit in units for cut in self._cuts(unit)]
        shared = tp if any(cut.shared for cut in cuts) else 1
        crosses = [axis.link != INTRA for axis in axes]
        dealing = Dealing(cuts, [axis.size for axis in axes], crosses, shared, ROUND_NUMEL)
        axes = [*axes, self.grid.axis("tp")][: len(dealing.sizes)]
        width = communication.matrix_width(self.config.optimizer, self.width)
        for route in dealing.routes(tuple(axis.index(rank) for axis in axes)):
            for axis, hop in zip(axes, route.hops, strict=True):
                own = axis.index(rank)
                sent = sum(hop.sent) - hop.sent[own] + sum(hop.received) - hop.received[own]
                out["update", axis.link] += sent * width
        return out

    def _cuts(self, unit: LaidOut) -> Iterator[Cut]:
        """Yield how ranks hold each matrix of a unit; a stack of experts has one of each."""
        places = list(product(*(range(axis.size) for axis in unit.os_axes)))
        for name, spec in unit.specs.items():
            if not self._by_matrix(spec):
                continue
            *_, rows, columns = unit.shapes[name]
            size, split = rows * columns, self._split(spec)
            shards = 1 if split is None else self.grid.tp // spec.copies(self.grid.tp)
            whole = rows * (shards if split == 0 else 1), columns * (shards if split == 1 else 1)
            for first in range(unit.starts[name], unit.starts[name] + prod(unit.shapes[name]), size):
                held = {}
                for place in places:
                    for begin, end in unit.slices(place):
                        low, high = max(first, begin), min(first + size, end)
                        if low < high:
                            held[place] = low - first, high - first
                yield Cut(*whole, held, shared=shards > 1)


@dataclass(frozen=True)
class LaidOut:
    """How the parameters of a unit lie in its buffer: first those that are rounded, then those that are not.

    Each begins with a block of its own, and both regions are whole blocks of every rank. specs, shapes, starts: of
    the parameters by name. ends: of the regions. quantises: some of it is quantised. apart: as ``UnitShape``'s.
    os_axes: the axes that cut the optimizer states, the innermost first.
    """

    specs: Mapping[str, ParameterSpec]
    shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, int]
    ends: Sequence[int]
    quantises: bool
    apart: int
    os_axes: list[AxisSpec]

    @property
    def regions(self) -> list[tuple[int, int]]:
        return list(zip((0, *self.ends), self.ends, strict=False))

    def slices(self, place: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield where the OS slice of the rank at this place of the axes begins and ends, in each region."""
        for begin, end in self.regions:
            for index, axis in zip(place, self.os_axes, strict=True):
                part = (end - begin) // axis.size
                begin, end = begin + index * part, begin + (index + 1) * part
            yield begin, end

    def held(self, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Yield the parameters in a part of the buffer, each with the part of it: begin and end in the buffer."""
        for name, start in self.starts.items():
            low, high = max(start, begin), min(start + prod(self.shapes[name]), end)
            if low < high:
                yield name, low, high


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def mismatches(want: Mapping[str, int], got: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return 'kind_link_bytes' -> (expected, counted) where the two differ. Sums over kinds are left out."""
    sums = ("intra_", "inter_")
    keys = sorted({*want, *(key for key, sent in got.items() if sent and not key.startswith(sums))})
    return {k: (want.get(k, 0), got.get(k, 0)) for k in keys if want.get(k, 0) != got.get(k, 0)}
