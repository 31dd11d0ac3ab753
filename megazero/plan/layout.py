"""This module adds a choice of shards and wire formats to a frame: the memory, the bytes and the work of a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from megazero.config import RunConfig
from megazero.config.layout.shards import Shards
from megazero.config.layout.wire import Wire
from megazero.config.options.sections import ZeroConfig
from megazero.mesh.grid import INTER, INTRA
from megazero.plan import communication
from megazero.plan.coding import Coder
from megazero.plan.communication import Bytes, Formats
from megazero.plan.frame import Frame
from megazero.plan.gathers import Copies
from megazero.plan.memory import Memory, States, rank_memory
from megazero.plan.units import Module, RankUnits, rank_units
from megazero.pp.partition import StageSpec
from megazero.pp.schedules import make_schedule

LOCAL = "local"  # in place of a link: a lane's work on the rank's own memory


class Leg(NamedTuple):
    """A part of a chain: a hop over ``link``, or work. busy: seconds of a processor that a hop takes on a rank."""

    link: str
    seconds: float
    busy: float = 0.0


Chain = tuple[Leg, ...]


@dataclass(frozen=True)
class Work:
    """What one unit costs the lanes: a refresh, a gather, a reduction.

    stage: seconds in which the rank itself takes a micro-batch's gradients; add: the same where a sum is there.
    """

    refresh: Chain
    gather: Chain
    every: Chain  # of a micro-batch that is not the last
    last: Chain
    ahead_bytes: float
    stage: float = 0.0
    add: float = 0.0


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
        # All that the work of a unit depends on beside its shape and the cluster: frames share what they make.
        self._work_key = (
            (frame.world.world_size, frame.tp, frame.pp, self.config.parallel.use_tp_pp_dp_mapping),
            (
                self.shards.factors,
                self.shards.whole_gradients,
                wire,
                self.formats.width,
                self.formats.sums,
                all_reduce,
                frame.micro_batches == 1,
            ),
        )
        self.states = States(
            self.grid,
            self.shards,
            self.formats,
            wire.feedback,
            zero.zero_prefetch_bytes,
            frame.cluster.on_host,
        )

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
        frame, optimizer = self.frame, self.config.optimizer.optimizer
        moments = frame.activation_memory[rank]
        return rank_memory(self.units(rank), self.states, optimizer, frame.micro_batches, moments)

    @cached_property
    def memory(self) -> Memory:
        """Return the memory of the rank that needs the most."""
        return max(map(self.memory_of, self.frame.distinct_ranks), key=lambda m: m.total)

    @property
    def room(self) -> float:
        """Return the bytes that a rank has for tensors."""
        return self.frame.cluster.device.room

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
        shards = self.shards
        kept = (
            shards.keep_gathered or shards.p == 1
        )  # with P = 1 whole parameters are there after the refresh
        return Copies(uses, kept, self.states.prefetch_bytes, shards.whole_gradients)

    def modules(self, rank: int, part: int) -> tuple[Module, ...]:
        return self.units(rank).parts[part]

    def work_of(self, unit: communication.UnitShape) -> Work:
        """Return what a unit costs the lanes."""
        key = (unit, self._work_key)
        known: dict[object, Work] = self.frame.collectives.known
        if key not in known:
            known[key] = self._make_work(unit)
        return known[key]

    def _make_work(self, unit: communication.UnitShape) -> Work:
        axes, (p, _, os) = self.grid.data_axes, self.shards.factors
        coder = Coder(self.frame.compute, self.formats, p, os)
        refresh, gather = communication.weight_hops(unit, axes, self.formats)
        summed = [replace(a, role="replica") if self.all_reduce and a.role == "os" else a for a in axes]
        reduction = communication.gradient_hops(
            unit, summed, self.formats, self.frame.micro_batches, self.shards.whole_gradients
        )
        last: list[Leg] = []
        every: list[Leg] = []
        left = unit.elements
        for number, hop in enumerate(reduction):
            legs = [self._leg(hop)]
            if hop.operation == communication.EXCHANGE:  # messages are encoded, decoded and summed
                raw = number == 0 and (self.states.g > 1 or self.frame.micro_batches == 1)
                before, after = coder.exchange(unit, hop.axis, left, raw)
                legs = [*_local(before), *legs, *_local(after)]
                left //= hop.axis.size
            last += legs
            every += legs if hop.every else []
        before, after = coder.refresh(unit, bool(gather)) if refresh else (0.0, 0.0)
        decode = coder.gather(unit) if gather else 0.0
        return Work(
            refresh=(*_local(before), *map(self._leg, refresh), *_local(after)),
            gather=(*map(self._leg, gather), *_local(decode)),
            every=tuple(every),
            last=tuple(last),
            ahead_bytes=self.states.ahead_bytes(unit),
            stage=coder.staged(unit, added=False),
            add=coder.staged(unit, added=True),
        )

    def _leg(self, hop: communication.Hop) -> Leg:
        cost = self.frame.collectives.of_axis(hop.operation, hop.axis, hop.sent)
        return Leg(hop.axis.link, cost.seconds, cost.busy)

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


def _local(seconds: float) -> tuple[Leg, ...]:
    return (Leg(LOCAL, seconds),) if seconds else ()
