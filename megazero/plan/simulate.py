"""Simulates a step of a layout: the schedule's actions, and the engine's gathers and reductions.

The order is the engine's. A rank runs its actions in the schedule's order, each when its inputs are there. A module
waits for the gathers of its units, which begin where zero/gather.py starts them (gathers.py). Reductions follow a
backward as zero/reduce.py submits them, and a backward waits if more are in flight than the policy allows. Each
direction is a lane with at most two chains in flight. A lane has one communicator on a link, whose hops follow each
other, latency included. Hops of both lanes share the link's rate, one at a time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megazero.config.options.sections import OuterConfig
from megazero.mesh.grid import INTRA
from megazero.plan.communication import ends_hop
from megazero.plan.layout import LOCAL, Chain, Layout
from megazero.plan.memory import PENDING_REDUCTIONS, STREAMS
from megazero.plan.rank_step import RankStep, Spent
from megazero.pp.schedules import Action, Kind


@dataclass(frozen=True)
class Execution:
    """How a system runs a step. The defaults are this engine's.

    ahead: gathers run ahead of use. behind: reductions run behind the backward; else it waits for each.
    early_refresh: all refreshes come before the first forward and are fully exposed. recomputed: the share of a
    recompute that is done. tensor: the share of tensor-parallel messages that nothing hides.
    """

    ahead: bool = True
    behind: bool = True
    early_refresh: bool = False
    recomputed: float = 1.0
    tensor: float = 1.0


ENGINE = Execution()
# The items of a step's bill, in words. Waits are exposed ones; those for other stages include messages. The update
# includes the exchange of scalars. A meeting counts by its seconds over the steps from one to the next.
BILL: Mapping[str, str] = {
    "compute": "forward and backward",
    "recompute": "recompute",
    "tensor": "tensor-parallel messages",
    "context": "context-parallel messages",
    "experts": "rows on their way to experts",
    "pipeline": "waits for other stages",
    "gather": "waits for weights",
    "reduce": "waits for gradients",
    "contention": "computing beside messages",
    "update": "norm and update",
    "outer": "meetings of replicas",
}
SPENT = ("compute", "recompute", "tensor", "context", "experts")  # of them, what a module spends


@dataclass
class Timing:
    """The seconds of a step and their bill, as means over the pipeline's ranks."""

    seconds: float
    bill: dict[str, float]


@dataclass
class _Lane:
    """One direction's chains. ``free``: when each stream is free again; ``over``: when the last hop on a link is."""

    free: deque[float] = field(default_factory=lambda: deque([0.0] * STREAMS))
    over: dict[str, float] = field(default_factory=dict)
    moving: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # seconds in which a message occupies a link
    working: float = 0.0  # seconds of the rank's own work

    def run(self, chain: Chain, start: float, links: dict[str, float]) -> float:
        """Run a chain not before ``start`` and return when it ends."""
        at = max(start, self.free.popleft())
        for link, seconds, _, latency in chain:
            if link == LOCAL:
                self.working += seconds
            else:
                self.moving[link] += seconds - latency
                if (free := links.get(link, 0.0)) > at:  # max() takes longer
                    at = free
                if (over := self.over.get(link, 0.0)) > at:
                    at = over
                links[link], self.over[link] = at + seconds - latency, at + seconds
            at += seconds
        self.free.append(at)
        return at


class _Rank(RankStep):
    """The clock of one pipeline rank. All ranks of a stage do the same at the same time."""

    def __init__(self, layout: Layout, rank: int, execution: Execution, micro_batches: int) -> None:
        super().__init__(layout, rank, micro_batches, execution.ahead)
        self.execution = execution
        self.now = 0.0
        self.links: dict[str, float] = {}
        self.gathers, self.reductions = _Lane(), _Lane()
        self.pending: deque[float] = deque()
        self.bill = dict.fromkeys(BILL, 0.0)
        # What modules and whole parts spend in an action, with its sum, and how often.
        self.paid: dict[tuple[str | int, Kind], tuple[Spent, float]] = {}
        self.times: defaultdict[tuple[str | int, Kind], int] = defaultdict(int)
        self.here: dict[int, float] = {}  # when the latest gather of a unit ends
        if execution.early_refresh:
            self._refresh_all()
        self._take_turn()  # as begin_step does: refreshes move while a stage waits for its first forward

    def _refresh_all(self) -> None:
        for chains in self.chains:
            self.now = self.gathers.run(chains.refresh, self.now, self.links)
        self.bill["gather"] += self.now

    def wait_until(self, time: float, item: str) -> None:
        if time > self.now:
            self.bill[item] += time - self.now
            self.now = time

    def run(self, action: Action) -> None:
        """Run one action, module by module where something moves for its units."""
        part, kind = action.stage // self.base.pp, action.kind
        modules, visits, reduces = self.open(action)
        if not visits and not reduces:
            self._spend(part, kind)
            return
        for module in modules:
            if visits:
                self._take_turn()
            self._spend(module.kind, kind)
            if reduces:
                self._reduce(module.units, part)

    def _spend(self, what: str | int, kind: Kind) -> None:
        """Spend what a module takes in an action, or with the number of a part what all of its modules take."""
        key = what, kind
        if key not in self.paid:
            modules = [what] if isinstance(what, str) else [m.kind for m in self.units.parts[what]]
            compute, again, tensor, context, experts = (
                sum(column) for column in zip(*(self.spent(module, kind) for module in modules), strict=True)
            )
            shown, crowded = self.execution.tensor, self.base.cluster.device.contention
            again, tensor = again * self.execution.recomputed, tensor * (shown + (1 - shown) * crowded)
            paid = compute, again, tensor, context, experts
            self.paid[key] = paid, sum(paid)
        self.times[key] += 1
        self.now += self.paid[key][1]

    def _take_turn(self) -> None:
        """Start what the engine starts at this use of a module, and wait for what the use needs."""
        units, begun = next(self.uses)
        for unit in begun:
            chains = self.chains[unit]
            refresh = () if unit in self.here or self.execution.early_refresh else chains.refresh
            chain = refresh + chains.gather
            self.here[unit] = self.gathers.run(chain, self.now, self.links) if chain else 0.0
        for unit in units:
            self.wait_until(self.here[unit], "gather")

    def _reduce(self, units: tuple[int, ...], part: int) -> None:
        for unit in reversed(units):
            chain = self.chains[unit].every if self.left[part] else self.chains[unit].last
            if not chain:
                continue
            self.pending.append(self.reductions.run(chain, self.now, self.links))
            allowed = PENDING_REDUCTIONS if self.staged else len(self.pending)
            while len(self.pending) > (allowed if self.execution.behind else 0):
                self.wait_until(self.pending.popleft(), "reduce")

    def finish(self) -> None:
        for key, times in self.times.items():
            for item, seconds in zip(SPENT, self.paid[key][0], strict=True):
                self.bill[item] += times * seconds
        self.wait_until(max(self.pending, default=0.0), "reduce")
        self.wait_until(self.now + self._contended(), "contention")

    def _contended(self) -> float:
        """Return what the device loses to messages, and to work on them, beside which it computes.

        A message costs the device what it would cost inside the node: bytes that a slow link lets through seldom
        take its memory and its processors seldom.
        """
        lanes, cluster = (self.gathers, self.reductions), self.base.cluster
        working = sum(lane.working for lane in lanes)
        moving = sum(lanes[0].moving.values()) + sum(lanes[1].moving.values())
        if not moving + working or cluster.on_host:  # processors are shared out elsewhere
            return 0.0
        collectives = self.base.collectives
        costs = sum(
            seconds * min(1.0, collectives.rate(link) / collectives.rate(INTRA))
            for lane in lanes
            for link, seconds in lane.moving.items()
        )
        waited = self.bill["gather"] + self.bill["reduce"]
        hidden = max(0.0, 1 - waited / (moving + working))
        return hidden * (working + cluster.device.contention * costs)


def simulate(layout: Layout, execution: Execution = ENGINE) -> Timing:
    """Return the time of one step in the middle of a run; with outer replicas the mean of those from one meeting to
    the next."""
    return whole_step(layout, lambda micro_batches: _run(layout, execution, micro_batches))


def whole_step(layout: Layout, run: Callable[[int], Timing]) -> Timing:
    """Return the timing of a step from ``run``, which times some micro-batches without outer steps."""
    base = layout.base
    runs = [run(micro_batches) for micro_batches in base.sampled]
    seconds = base.extrapolated([run.seconds for run in runs])
    bill = {name: base.extrapolated([run.bill[name] for run in runs]) for name in BILL}
    outer = layout.states.outer
    bill["outer"] = 0.0 if outer is None else _outer_seconds(layout, outer.config, seconds)
    return Timing(seconds + bill["outer"], bill)


def _outer_seconds(layout: Layout, outer: OuterConfig, step: float) -> float:
    """Return the seconds that outer steps add to a step of ``step`` seconds: what a delay does not hide."""
    return max(meeting_seconds(layout) - outer.outer_delay * step, 0.0) / outer.outer_interval


def meeting_seconds(layout: Layout) -> float:
    """Return the seconds of an outer step, in which ranks wait for the slowest stage."""
    return max(_meeting(layout, rank) for rank in range(layout.base.pp))


def _meeting(layout: Layout, rank: int) -> float:
    """Return the seconds of a rank's outer step (zero/outer.py): its chains on one lane, and nothing else."""
    lane, links = _Lane(), dict[str, float]()
    chains = {unit: layout.meeting_chain(unit) for unit, _ in layout.units(rank).counts}
    return max((lane.run(chains[unit], 0.0, links) for unit in layout.units(rank).shapes), default=0.0)


def _run(layout: Layout, execution: Execution, micro_batches: int) -> Timing:
    base = layout.base
    ranks = [_Rank(layout, rank, execution, micro_batches) for rank in range(base.pp)]
    done: dict[int, float] = {}
    message = base.message_seconds
    for rank, action, event, needed in base.steps_of(micro_batches)[1]:
        clock = ranks[rank]
        ready = [
            done[other] + (message[base.link(source, rank)] if source != rank else 0.0)
            for other, source in needed
        ]
        if ready:
            clock.wait_until(max(ready), "pipeline")
        clock.run(action)
        done[event] = clock.now
    for clock in ranks:
        clock.finish()
    update = update_seconds(layout)
    end = max(clock.now for clock in ranks)
    for clock in ranks:
        clock.wait_until(end, "pipeline")
        clock.bill["update"] += update
    return Timing(end + update, mean_bill([clock.bill for clock in ranks]))


def mean_bill(bills: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of the ranks' bills."""
    return {name: sum(bill[name] for bill in bills) / len(bills) for name in BILL}


def update_seconds(layout: Layout) -> float:
    """Return the seconds of the norm's exchange, the update and, across a pipeline, the sum of tied embeddings.

    Updates of whole matrices add ``matrix_seconds``.
    """
    base, collectives = layout.base, layout.base.collectives
    largest = max(layout.units(rank).elements for rank in base.distinct_ranks)
    nodes, node = layout.grid.row_axes
    scalars = collectives.steps(node.size, 1)
    if nodes.size > 1:
        scalars += collectives.latency(collectives.link_of(nodes))
    matrices = max(layout.matrix_seconds(rank) for rank in base.distinct_ranks)
    return base.compute.update(largest / layout.shards.os) + scalars + matrices + sum(_tied(layout))


def _tied(layout: Layout) -> Iterator[float]:
    """Yield the seconds in which the pipeline's ends add up their gradients of each tied unit, all ranks at once."""
    base = layout.base
    for unit in layout.units(0).shapes:
        if unit.tied:
            sent = ends_hop(unit, layout.grid, layout.formats).sent
            yield base.collectives.message(base.link(0, base.pp - 1), sent, base.d * base.tp).seconds
