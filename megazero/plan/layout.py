"""This module resolves a run's configuration on a world into what its memory, bytes and time are computed from.

A Frame is all that does not depend on how model state is sharded: stages, the schedule's order, times of modules. A
Layout is a frame with shards and wire formats. Many layouts share a frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megazero.config import RunConfig, World
from megazero.config.sections import ZeroConfig
from megazero.config.shards import Shards
from megazero.config.wire import Wire
from megazero.mesh.grid import INTER, INTRA, Grid, make_grid
from megazero.plan import communication
from megazero.plan.cluster import Cluster
from megazero.plan.communication import Bytes, Copies, Formats
from megazero.plan.compute import Compute
from megazero.plan.memory import Memory, States, activations, buffers, model_states, rank_memory
from megazero.plan.seconds import Collectives
from megazero.plan.units import Module, RankUnits, rank_units
from megazero.pp.partition import StageSpec
from megazero.pp.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    done_by,
    in_order,
    make_schedule,
    needs,
    peak_activations,
)

Chain = tuple[tuple[str, float], ...]  # (link, seconds) of each hop
SAMPLED = 16  # micro-batches, about, that are run on a clock where a step has many more
LOCAL = "local"  # in place of a link: a lane's work on the rank's own memory
Step = tuple[
    int, Action, Action, tuple[tuple[Action, bool], ...]
]  # rank, action, its event, (event, other rank)


@lru_cache(maxsize=256)
def ordered_steps(name: str, pp: int, virtual: int, micro_batches: int) -> tuple[Schedule, tuple[Step, ...]]:
    """Return a schedule and all its actions, each after what it needs."""
    schedule = make_schedule(name, pp, virtual, micro_batches)
    stages = pp * virtual
    steps = tuple(
        (rank, a, done_by(a), tuple((event, event.stage % pp != rank) for event in needs(a, stages)))
        for rank, a in in_order(schedule, stages)
    )
    return schedule, steps


class Frame:
    """A configuration on a world, less its shards and wire formats, and what it costs on a cluster."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        cluster: Cluster,
        collectives: Collectives,
        stages: Sequence[StageSpec] | None = None,
    ) -> None:
        """stages: those of the configuration, if they are known.

        Raises ValueError if the cluster's devices do not compute in the run's dtype.
        """
        self.config, self.world, self.cluster, self.collectives = config, world, cluster, collectives
        parallel = config.parallel
        self.tp, self.pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        self.virtual, self.schedule_name = config.virtual_stages, config.pipeline_schedule
        self.micro_batches = config.num_micro_batches(world)
        self.d, self.h = config.data_parallel_size(world), config.data_ranks_per_node(world)
        self.compute = Compute(config, cluster, collectives)
        self.stages = stages or config.stages()
        self.of_rank = [[s for s in self.stages if s.rank == rank] for rank in range(self.pp)]
        self.activation = self.compute.activation

    @cached_property
    def stage_seconds(self) -> list[dict[Kind, float]]:
        """Return the seconds of each action of each stage, without waits."""
        times = self.compute.times
        return [
            {
                kind: sum(
                    count * times[module].of(kind)
                    for module, count in (
                        ("embedding", s.embedding),
                        ("layer", len(s.layers)),
                        ("head", s.head),
                    )
                )
                for kind in Kind
            }
            for s in self.stages
        ]

    @cached_property
    def least_seconds(self) -> float:
        """Return a time that no layout of this frame is below: each rank's compute behind what it must wait for."""
        seconds, best, before = self.stage_seconds, 0.0, 0.0
        split = SCHEDULES[self.schedule_name].splits_backward and self.pp > 1
        back = Kind.INPUT if split else Kind.BACKWARD
        for rank in range(self.pp):
            own = [seconds[s.index] for s in self.of_rank[rank]]
            busy = self.micro_batches * sum(one[Kind.FORWARD] + one[Kind.BACKWARD] for one in own)
            best = max(best, before + busy)
            before += seconds[rank][Kind.FORWARD] + (0.0 if split else seconds[rank][back])
        return best

    @cached_property
    def sampled(self) -> tuple[int, ...]:
        """Return how many micro-batches to run on a clock: a step's or, where it has many, two smaller numbers.

        A schedule repeats itself with a period of pp micro-batches once its pipeline is full, so the time of a step
        is linear in them from there on.
        """
        few = max(SAMPLED // self.pp, 3) * self.pp
        period = max(1, SAMPLED // 2 // self.pp) * self.pp
        if self.micro_batches <= few + period:
            return (self.micro_batches,)
        return few, few + period

    def extrapolated(self, values: Sequence[float]) -> float:
        """Return the value at the step's micro-batches of what is ``values`` at those of ``sampled``."""
        if len(values) == 1:
            return values[0]
        few, more = self.sampled
        return values[1] + (values[1] - values[0]) * (self.micro_batches - more) / (more - few)

    def steps_of(self, micro_batches: int) -> tuple[Schedule, tuple[Step, ...]]:
        return ordered_steps(self.schedule_name, self.pp, self.virtual, micro_batches)

    @cached_property
    def compute_only(self) -> tuple[float, float]:
        """Return when the last rank and when the first one ends, if nothing waits for weights or gradients."""
        ends = [self._compute_only(micro_batches) for micro_batches in self.sampled]
        return self.extrapolated([last for last, _ in ends]), self.extrapolated([first for _, first in ends])

    def _compute_only(self, micro_batches: int) -> tuple[float, float]:
        done: dict[Action, float] = {}
        free = [0.0] * self.pp
        seconds, message = self.stage_seconds, self.message_seconds
        for rank, action, event, needed in self.steps_of(micro_batches)[1]:
            at = free[rank]
            for other, away in needed:
                at = max(at, done[other] + (message if away else 0.0))
            free[rank] = done[event] = at + seconds[action.stage][action.kind]
        return max(free), free[0]

    @cached_property
    def first_stage_seconds(self) -> tuple[float, float]:
        """Return the seconds of the first stage's forward and backward of one micro-batch."""
        return self.stage_seconds[0][Kind.FORWARD], self.stage_seconds[0][Kind.BACKWARD]

    @cached_property
    def least_activations(self) -> float:
        """Return the bytes of activations of the rank that has the most, so that model state has only the rest."""
        return max(sum(items.values()) for items in self.activation_memory)

    @cached_property
    def least_parameters(self) -> float:
        """Return the parameters of the first rank's layers."""
        layer = self.config.model.layer_matrix_numel / self.tp
        return sum(len(s.layers) for s in self.of_rank[0]) * layer

    @cached_property
    def message_seconds(self) -> float:
        """Return the seconds of an activation's way to the next stage, all ranks of a node sending at once."""
        if self.pp == 1:
            return 0.0
        grid = make_grid(
            self.world.world_size,
            self.cluster.ranks_per_node,
            self.tp,
            self.pp,
            dp_outermost=self.config.parallel.use_tp_pp_dp_mapping,
        )
        across = grid.axis("pp").link == INTER
        sent = self.activation.sent
        seconds = self.collectives.seconds("message", 2, 2 if across else 1, sent)
        if self.tp > 1 and not self.activation.sequence_parallel and sent < self.activation.whole:
            seconds += self.collectives.seconds("gather", self.tp, 1, (self.tp - 1) * sent)
        return seconds

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        return peak_activations(self.schedule_name, self.pp, self.virtual, self.micro_batches)

    @cached_property
    def distinct_ranks(self) -> list[int]:
        """Return one pipeline rank of each kind: ranks of a kind hold as many layers, and as many activations."""
        found: dict[object, int] = {}
        for rank, own in enumerate(self.of_rank):
            found.setdefault((self.peaks[rank], *((len(s.layers), s.embedding, s.head) for s in own)), rank)
        return list(found.values())

    @cached_property
    def activation_memory(self) -> list[dict[str, float]]:
        """Return each pipeline rank's bytes of activations and head."""
        return [
            activations(
                self.config,
                self.compute.width,
                [len(s.layers) for s in own],
                self.peaks[rank],
                any(s.embedding for s in own),
                any(s.head for s in own),
            )
            for rank, own in enumerate(self.of_rank)
        ]

    @cached_property
    def other_bytes(self) -> list[Bytes]:
        """Return the bytes between stages and inside layers that one rank of each stage sends in a step."""
        schedule = make_schedule(self.schedule_name, self.pp, self.virtual, self.micro_batches)
        grid = self.grid((1, 1, 1))
        again = communication.recomputed(
            self.config.training.recompute_granularity,
            self.activation.sequence_parallel,
            self.config.model.hidden_dropout > 0,
        )
        out = []
        for rank, own in enumerate(self.of_rank):
            world_rank = grid.rank_of(rank, 0, 0)
            total = communication.pipeline(schedule, grid, world_rank, self.activation)
            wide = max(self.compute.width, 4)
            total += communication.tensor_parallel(own, schedule[rank], self.activation, again, wide)
            out.append(total)
        return out

    def grid(self, shards: tuple[int, int, int]) -> Grid:
        return make_grid(
            self.world.world_size,
            self.config.ranks_per_node(self.world),
            self.tp,
            self.pp,
            shards,
            self.config.parallel.use_tp_pp_dp_mapping,
        )


@dataclass(frozen=True)
class Work:
    """What one unit costs the lanes: hops of a refresh, of a gather, of a reduction, each (link, seconds)."""

    refresh: Chain
    gather: Chain
    every: Chain  # of a micro-batch that is not the last
    last: Chain
    ahead_bytes: float


class Layout:
    """A frame with a choice of shards and wire formats."""

    def __init__(
        self, frame: Frame, zero: ZeroConfig, sums: int | None = None, all_reduce: bool = False
    ) -> None:
        """Make the layout; the last two arguments describe other systems than this engine.

        sums: the bytes of a sum of gradients, if not at least 4. all_reduce: sums beyond G go back to all, not only
        to who updates them.
        Raises ValueError if the choice is not legal on the frame's world.
        """
        self.frame, self.all_reduce = frame, all_reduce
        self.config: RunConfig = replace(frame.config, zero=zero)
        self.shards: Shards = self.config.shards(frame.world)
        self.wire: Wire = self.config.wire(frame.world)
        self.grid = frame.grid(self.shards.factors)
        width, wire = frame.compute.width, self.wire
        by_link = {INTRA: wire.gradients_intra, INTER: wire.gradients_inter}
        self.formats = Formats(width, sums or max(width, 4), wire.weights, by_link, wire.delta)
        self._units_of: dict[int, RankUnits] = {}
        self._known: dict[communication.UnitShape, Work] = {}
        self.states = States(self.grid, self.shards, self.formats, wire.feedback, zero.zero_prefetch_bytes)

    def _units(self, stages: Sequence[StageSpec]) -> RankUnits:
        config, frame = self.config, self.frame
        return rank_units(
            config.model,
            stages,
            frame.tp,
            config.parallel.sequence_parallel,
            self.wire,
            config.zero.zero_chunk_numel,
            frame.d,
            self.shards.os,
        )

    def units(self, rank: int) -> RankUnits:
        """Return the units of a pipeline rank."""
        if rank not in self._units_of:
            self._units_of[rank] = self._units(self.frame.of_rank[rank])
        return self._units_of[rank]

    def memory_of(self, rank: int) -> Memory:
        """Return the memory of a rank of a pipeline stage at the peak of a step."""
        units, frame = self.units(rank), self.frame
        return rank_memory(
            [
                model_states(units, self.states, self.config.optimizer.optimizer),
                buffers(units, self.states, frame.micro_batches),
                frame.activation_memory[rank],
            ]
        )

    @cached_property
    def memory(self) -> Memory:
        """Return the memory of the rank that needs the most."""
        return max(map(self.memory_of, self.frame.distinct_ranks), key=lambda m: m.total)

    @property
    def room(self) -> float:
        """Return the bytes that a rank has for tensors."""
        device = self.frame.cluster.device
        return (device.memory_gib - device.reserved_gib) * 2**30

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room

    def program(self, rank: int, micro_batches: int) -> list[tuple[str, int]]:
        """Return the segments of a rank's step of so many micro-batches, as the engine is given them."""
        frame = self.frame
        schedule = make_schedule(frame.schedule_name, frame.pp, frame.virtual, micro_batches)
        return [(str(a.kind.value), a.stage // frame.pp) for a in schedule[rank]]

    def copies(self, rank: int) -> Copies:
        uses = [[list(module.units) for module in part] for part in self.units(rank).parts]
        return Copies(uses, self.shards.keep_gathered)

    def modules(self, rank: int, part: int) -> tuple[Module, ...]:
        return self.units(rank).parts[part]

    def work_of(self, unit: communication.UnitShape) -> Work:
        """Return what a unit costs the lanes."""
        if unit in self._known:
            return self._known[unit]
        seconds, compute, axes = self.frame.collectives, self.frame.compute, self.grid.data_axes
        refresh, gather = communication.weight_hops(unit, axes, self.formats)
        summed = [replace(a, role="replica") if self.all_reduce and a.role == "os" else a for a in axes]
        reduction = communication.gradient_hops(unit, summed, self.formats, self.frame.micro_batches)
        elements, width = unit.elements, self.formats.width
        last: list[tuple[str, float]] = []
        every: list[tuple[str, float]] = []
        left = elements
        for hop in reduction:
            timed = [(hop.axis.link, seconds.of_axis(hop.operation, hop.axis, hop.sent))]
            if hop.operation == communication.EXCHANGE:  # messages are encoded, decoded and summed
                timed.append((LOCAL, compute.moved(left * (width + self.formats.sums) / 2)))
                left //= hop.axis.size
            last += timed
            every += timed if hop.every else []
        decodes = self.formats.weights is not None and unit.quantised
        moved = compute.moved(elements * 1.5 * width) if decodes else 0.0
        made = Work(
            refresh=_timed(refresh, seconds, moved if not gather and decodes else 0.0),
            gather=_timed(gather, seconds, moved),
            every=tuple(every),
            last=tuple(last),
            ahead_bytes=self.states.ahead_bytes(unit),
        )
        self._known[unit] = made
        return made

    @cached_property
    def bytes_by_stage(self) -> list[Bytes]:
        """Return the bytes that one rank of each stage sends in a step, by (kind of hop, link)."""
        out = []
        for rank in range(self.frame.pp):
            units = self.units(rank).shapes
            line = self.grid.axis("pp").ranks(self.grid.rank_of(rank, 0, 0))
            ends = self.grid.link(line[0], line[-1]) if any(u.tied for u in units) else None
            total: Bytes = Counter(self.frame.other_bytes[rank])
            total += communication.model_state(
                units,
                self.grid,
                self.formats,
                self.copies(rank),
                self.program(rank, self.frame.micro_batches),
                self.frame.micro_batches,
                ends,
            )
            out.append(total)
        return out

    @property
    def bytes_across_nodes(self) -> float:
        """Return the bytes that a node's link carries in a step: the mean over stages, times the ranks of a node."""
        sent = [sum(n for (_, link), n in total.items() if link == INTER) for total in self.bytes_by_stage]
        return sum(sent) / len(sent) * self.frame.cluster.ranks_per_node


def _timed(hops: Sequence[communication.Hop], collectives: Collectives, more: float) -> Chain:
    """Return (link, seconds) of each hop. ``more`` is what decoding takes after the last."""
    out = [(hop.axis.link, collectives.of_axis(hop.operation, hop.axis, hop.sent)) for hop in hops]
    return (*out, (LOCAL, more)) if out and more else tuple(out)
