"""A layout: a base layout with shards and wire formats, its memory, bytes and chains of hops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megazero.comm.wire import Coding
from megazero.config import RunConfig, World
from megazero.config.layout.outer import wires
from megazero.config.layout.wire import Wire
from megazero.config.options.optimizers import NEWTON_SCHULZ_STEPS, OPTIMIZERS
from megazero.config.options.sections import ZeroConfig
from megazero.mesh.dealing import ROUND_NUMEL
from megazero.mesh.grid import Grid
from megazero.mesh.levels import INTRA
from megazero.plan import communication
from megazero.plan.activations import loss_chunks
from megazero.plan.base_layout import BaseLayout, grid_of, schedule_of
from megazero.plan.communication import Bytes, Formats, OuterFormat, UnitShape
from megazero.plan.gathers import Copies, Segment
from megazero.plan.memory import WAITING, Memory, RankMemory, States
from megazero.plan.units import LayerMatrix, RankUnits, UnitRule
from megazero.zero.plan import EXCHANGE, Hop, Hops, UnitCut

WORTHWHILE = 0.05  # of the peak: what smaller chunks of the loss have to save
ROUNDS = 3  # of an update of matrices that are under way at once: there, computed, and back
LOCAL = "local"  # in place of a link: a lane's work on the rank's own memory


class TimedHop(NamedTuple):
    """A step of a chain: a hop over ``link``, or local work.

    latency: the part of its seconds in which others may use the link.
    """

    link: str
    seconds: float
    latency: float = 0.0


Chain = tuple[TimedHop, ...]


@dataclass(frozen=True)
class UnitChains:
    """The chains of one unit: its refresh, its gather and its reductions."""

    refresh: Chain
    gather: Chain
    every: Chain  # of a micro-batch that is not the last
    last: Chain
    ahead_bytes: float


@dataclass(frozen=True)
class Stepped:
    """Matrices of a rank that are stepped together (zero/matrix_updates.py): they lie on the same axes.

    found: each, and how many layers have it. width: the bytes of an element of a message.
    """

    found: tuple[tuple[LayerMatrix, int], ...]
    grid: Grid
    width: int

    @cached_property
    def cut(self) -> UnitCut:
        return UnitCut.of(communication.axes_of(self.found[0][0].apart, self.grid))

    @cached_property
    def owners(self) -> int:
        """How many ranks share the states."""
        return self.cut.ranks[self.cut.os]

    def _held(self, matrices: Iterable[tuple[LayerMatrix, int]]) -> float:
        return sum(n * matrix.numel for matrix, n in matrices) / self.owners

    @property
    def held(self) -> float:
        """The elements that a rank holds."""
        return self._held(self.found)

    @cached_property
    def hops(self) -> Hops[Coding]:
        """The hops to the owners. Tensor-parallel ranks send what they step together."""
        shared = self._held(each for each in self.found if each[0].cut.shared)
        more = communication.update_hops(shared, [self.grid.axis("tp")] if shared else [], self.width)
        return (*communication.update_hops(self.held, self.cut.axes[: self.cut.os], self.width), *more)

    @property
    def moving(self) -> float:
        """The bytes on their way in an update: of three rounds, on both sides of every hop."""
        largest = max(matrix.cut.rows * matrix.cut.columns for matrix, _ in self.found)
        elements = min(ROUNDS * max(ROUND_NUMEL, largest), self.held + largest)
        return max(2 * len(self.hops), 1) * self.width * elements

    @property
    def busiest(self) -> float:
        """The multiply-adds of the busiest owner's iteration: the mean, or the costliest matrix if that is more."""
        costs = [(matrix.cut, matrix.cut.cost, n * matrix.stacked) for matrix, n in self.found]
        tp = self.grid.tp
        mean = sum(cost * number / (self.owners * (tp if cut.shared else 1)) for cut, cost, number in costs)
        return max(mean, *(cost for _, cost, _ in costs))


def states_of(
    config: RunConfig, world: World, wire: Wire, width: int, sums: int | None = None, on_host: bool = False
) -> States:
    """Return the model state of a rank. width, sums: as ``Formats``. Raises ValueError for illegal shards."""
    shards = config.shards(world)
    grid, formats = grid_of(config, world, shards.factors), Formats.of(wire, width, sums)
    outer = OuterFormat.of(config.outer, formats.sums)
    return States(grid, shards, formats, config.zero.zero_prefetch_bytes, on_host, outer)


def sharding_of(base: BaseLayout, config: RunConfig, sums: int | None) -> tuple[States, Wire, UnitRule]:
    """Return what a configuration's shards and formats are. Raises ValueError if they are not legal on the world."""
    wire = config.wire(base.world)
    states = states_of(config, base.world, wire, base.compute.width, sums, base.cluster.on_host)
    os = states.shards.os
    parts = wires(config.outer, base.d)
    cut = "units", wire, os, parts, config.zero.zero_unit_layers, config.zero.zero_chunk_numel
    return states, wire, base.shared(cut, lambda: UnitRule(config, wire, base.d * parts, os))


class Layout:
    """A base layout with a choice of shards and wire formats."""

    def __init__(
        self, base: BaseLayout, zero: ZeroConfig, sums: int | None = None, all_reduce: bool = False
    ) -> None:
        """Make the layout; the last two arguments describe other systems than this engine.

        sums: the bytes of a sum of gradients, if not at least 4. all_reduce: sums beyond G return to all ranks, not
        only to those that update them. Raises ValueError if the choice is not legal on the base's world.
        """
        self.base, self.zero, self.all_reduce = base, zero, all_reduce
        self.states, self.wire, self.rule = base.shared(
            ("sharding", zero, sums), lambda: sharding_of(base, self.given, sums)
        )
        self.shards, self.grid, self.formats = self.states.shards, self.states.grid, self.states.formats

    @cached_property
    def given(self) -> RunConfig:
        """The configuration of the layout, in which --loss-chunk-tokens may be auto."""
        return replace(self.base.config, zero=self.zero)

    def units(self, rank: int) -> RankUnits:
        """Return the units of a pipeline rank."""
        base, rule = self.base, self.rule
        return base.shared((base.partition.keys[rank], rule), lambda: RankUnits(base.of_rank[rank], rule))

    @cached_property
    def config(self) -> RunConfig:
        """The configuration of the layout, with a number, or none, in place of --loss-chunk-tokens auto."""
        return replace(self.given, training=replace(self.given.training, loss_chunk_tokens=self.loss_chunk))

    @cached_property
    def loss_chunk(self) -> int | None:
        """The tokens whose logits a rank holds at once; None: all.

        This is the largest of the allowed sizes whose peak is at most WORTHWHILE above the least.
        """
        sizes = loss_chunks(self.base.config)
        if len(sizes) == 1:
            return sizes[0]
        least = min(self._fullest(size).total for size in sizes)
        return next(size for size in sizes if (1 - WORTHWHILE) * self._fullest(size).total <= least)

    def memory_of(self, rank: int, loss_chunk: int | None, pooled: bool = True) -> Memory:
        """Return the memory of a rank of a pipeline stage at the peak of a step, with logits of so many tokens.

        pooled: with transient buffers, whose bytes take the longest to count.
        """
        base, units, states, optimizer = self.base, self.units(rank), self.states, self.base.config.optimizer
        passes = min(base.micro_batches, WAITING)
        held = base.shared((units, states, passes), lambda: RankMemory(units, states, optimizer, passes))
        moments = base.activation_memory(rank, loss_chunk)
        return held.at_peak(moments, self.update_bytes(rank) if pooled else None)

    def _fullest(self, loss_chunk: int | None, pooled: bool = True) -> Memory:
        each = (self.memory_of(rank, loss_chunk, pooled) for rank in self.base.distinct_ranks)
        return max(each, key=lambda memory: memory.total)

    @cached_property
    def memory(self) -> Memory:
        """Return the memory of the rank that needs the most."""
        return self._fullest(self.loss_chunk)

    @property
    def room(self) -> float:
        """Return the bytes that a rank has for tensors."""
        return self.base.cluster.device.room

    @property
    def fits(self) -> bool:
        least = min(self._fullest(size, pooled=False).total for size in loss_chunks(self.base.config))
        return least <= self.room and self.memory.total <= self.room

    def program(self, rank: int, micro_batches: int) -> list[Segment]:
        """Return the segments of a rank's step of so many micro-batches, as the engine is given them."""
        base = self.base
        schedule = schedule_of(base.schedule_name, base.pp, base.virtual, micro_batches)
        return [(str(a.kind.value), a.stage // base.pp) for a in schedule[rank]]

    def copies(self, rank: int) -> Copies:
        return self.states.copies(self.units(rank))

    def chains_of(self, unit: UnitShape) -> UnitChains:
        """Return the chains of a unit."""
        return self.base.shared(
            (unit, self.states, self.all_reduce, self.base.micro_batches == 1),
            lambda: self._make_chains(unit),
        )

    def _make_chains(self, unit: UnitShape) -> UnitChains:
        compute, plan = self.base.compute, self.states.plan(unit)
        summed = plan
        if self.all_reduce:
            summed = replace(plan, cut=replace(plan.cut, os=UnitCut.of(plan.cut.axes).g))
        last: list[TimedHop] = []
        every: list[TimedHop] = []
        left = unit.elements
        for hop in summed.reduction(True, self.base.micro_batches == 1):
            hops = [self._timed_hop(hop)]
            if hop.verb == EXCHANGE:  # messages are encoded, decoded and summed
                hops += _local(compute.summed(left, self.formats.sums))
                left //= hop.axis.size
            last += hops
            every += hops if hop.level <= plan.cut.g else []
        # What came in few bits is decoded by the gather, or without one by the refresh.
        decoded = _local(compute.decoded(unit.elements) if plan.codecs.weights else 0.0)
        return UnitChains(
            refresh=(
                *map(self._timed_hop, plan.refresh),
                *(decoded if plan.refresh and not plan.gather else ()),
            ),
            gather=(*map(self._timed_hop, plan.gather), *(decoded if plan.gather else ())),
            every=tuple(every),
            last=tuple(last),
            ahead_bytes=plan.ahead_bytes,
        )

    def meeting_seconds(self, unit: UnitShape) -> float:
        """Return the seconds that an outer step takes of a unit inside its replica, one hop after the other."""
        outer, compute = self.states.outer, self.base.compute
        assert outer is not None
        own = unit.elements / self.states.plan(unit).shards[2] * outer.sums
        share = outer.replicas * unit.elements * unit.apart / self.grid.dp
        # The difference is taken (3 slices), then the anchor and the master weights are written (4, momentum 2).
        local = compute.moved((7 + 2 * outer.momentum) * own) + compute.summed(share, self.formats.sums)
        return local + sum(self._timed_hop(hop).seconds for hop in self.states.plan(unit).sharing)

    @cached_property
    def _matrix_width(self) -> int:
        """Return the bytes of an element of a matrix on its way; 0 if the optimizer is elementwise."""
        optimizer = self.base.config.optimizer
        if not OPTIMIZERS[optimizer.optimizer].by_matrix:
            return 0
        return communication.matrix_width(optimizer, self.formats.width)

    def _stepped(self, rank: int) -> list[Stepped]:
        """Return the matrices of a pipeline rank, those on the same axes together: none if the optimizer is
        elementwise."""
        layers = self.units(rank).layers.items() if self._matrix_width else ()
        found = [(matrix, n) for kind, n in layers for matrix in self.rule.matrices[kind]]
        return [
            Stepped(tuple(each for each in found if each[0].apart == apart), self.grid, self._matrix_width)
            for apart in dict.fromkeys(matrix.apart for matrix, _ in found)
        ]

    def update_hops(self, rank: int) -> Hops[Coding]:
        """Return the hops of a pipeline rank's matrices to their owners: none if the optimizer is elementwise."""
        return tuple(hop for each in self._stepped(rank) for hop in each.hops)

    def update_bytes(self, rank: int) -> float:
        """Return the bytes of matrices on their way in an update."""
        return max((each.moving for each in self._stepped(rank)), default=0.0)

    def matrix_seconds(self, rank: int) -> float:
        """Return the seconds in which the matrices of a pipeline rank are stepped by their owners, messages included.

        What is shorter, messages or products, is hidden but for one round. Those on other axes are stepped after.
        """
        steps, total = 2 * NEWTON_SCHULZ_STEPS, 0.0
        for each in self._stepped(rank):
            products = steps * each.busiest / self.base.compute.matrix_rate
            messages = 2 * sum(self._timed_hop(hop).seconds for hop in each.hops)
            total += max(products, messages) + min(products, messages) / max(each.held / ROUND_NUMEL, 1.0)
        return total

    def _timed_hop(self, hop: Hop[Coding]) -> TimedHop:
        collectives = self.base.collectives
        cost = collectives.of_axis(hop.verb, hop.axis, hop.sent)
        return TimedHop(collectives.link_of(hop.axis), cost.seconds, cost.latency)

    @cached_property
    def bytes_by_stage(self) -> list[Bytes]:
        """Return the bytes that one rank of each stage sends in a step, by (kind of hop, link)."""
        return [self.base.other_bytes[rank] + self._model_state_bytes(rank) for rank in range(self.base.pp)]

    def _model_state_bytes(self, rank: int) -> Bytes:
        count = self.base.micro_batches
        units, program, updates = self.units(rank).shapes, self.program(rank, count), self.update_hops(rank)
        return communication.model_state(
            units, self.grid, self.formats, self.copies(rank), program, count, updates
        )

    @property
    def bytes_of_meetings(self) -> tuple[float, float]:
        """Return the bytes that other replicas take from a rank of the stage with the most: the mean of a step, and
        in a meeting."""
        outer = self.states.outer
        if outer is None:
            return 0.0, 0.0
        every = (self.units(rank).shapes for rank in range(self.base.pp))
        most = (outer.replicas - 1) * max(
            sum(outer.message(self.states.plan(unit)) for unit in units) for units in every
        )
        return most / outer.config.outer_interval, most

    @property
    def bytes_across_nodes(self) -> float:
        """Return the bytes that a node's link carries in a step: the mean over stages, times the ranks of a node.

        A meeting's bytes count as those of a step on average.
        """
        sent = [sum(n for (_, link), n in total.items() if link != INTRA) for total in self.bytes_by_stage]
        return (sum(sent) / len(sent) + self.bytes_of_meetings[0]) * self.base.cluster.ranks_per_node


def _local(seconds: float) -> tuple[TimedHop, ...]:
    return (TimedHop(LOCAL, seconds),) if seconds else ()
