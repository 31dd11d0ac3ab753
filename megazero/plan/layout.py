"""This module adds a choice of shards and wire formats to a frame: the memory, the bytes and the work of a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megazero.config import RunConfig
from megazero.config.sections import ZeroConfig
from megazero.config.shards import Shards
from megazero.config.wire import Wire
from megazero.mesh.grid import INTER, INTRA
from megazero.plan import communication
from megazero.plan.communication import Bytes, Formats
from megazero.plan.frame import Frame
from megazero.plan.gathers import Copies
from megazero.plan.memory import Memory, States, buffers, model_states, rank_memory
from megazero.plan.seconds import Collectives
from megazero.plan.units import Module, RankUnits, rank_units
from megazero.pp.partition import StageSpec
from megazero.pp.schedules import (
    make_schedule,
)

Chain = tuple[tuple[str, float], ...]  # (link, seconds) of each hop
LOCAL = "local"  # in place of a link: a lane's work on the rank's own memory


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
        seconds, compute, axes = self.frame.collectives, self.frame.compute, self.grid.data_axes
        refresh, gather = communication.weight_hops(unit, axes, self.formats)
        summed = [replace(a, role="replica") if self.all_reduce and a.role == "os" else a for a in axes]
        reduction = communication.gradient_hops(
            unit, summed, self.formats, self.frame.micro_batches, self.shards.whole_gradients
        )
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
        return Work(
            refresh=_timed(refresh, seconds, moved if not gather and decodes else 0.0),
            gather=_timed(gather, seconds, moved),
            every=tuple(every),
            last=tuple(last),
            ahead_bytes=self.states.ahead_bytes(unit),
        )

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
