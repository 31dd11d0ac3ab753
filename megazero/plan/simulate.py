"""Simulates a step of a layout: the schedule's actions, and the engine's gathers and reductions.

The order is the engine's. A rank runs its actions in the schedule's order, each when its inputs are there. A module
waits for the gathers of its units, which begin where zero/gather.py starts them (gathers.py). Reductions follow a
backward as zero/reduce.py submits them, and a backward waits if more are in flight than the policy allows. Each
direction is a lane with at most two chains in flight. A lane has one communicator on a link, whose hops follow each
other, latency included. Hops of both lanes share the link's rate, one at a time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from megazero.config.options.sections import OuterConfig
from megazero.plan.compute import Spent
from megazero.plan.gathers import ModuleUse, Segment, module_uses
from megazero.plan.layout import LOCAL, Chain, Layout
from megazero.plan.memory import PENDING_REDUCTIONS, STREAMS
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
# The items of a step's bill, in words; the first are those of ``Spent``. Waits are exposed ones; those for other
# stages include messages. The update includes the exchange of scalars. A meeting counts by its seconds over the steps
# from one to the next.
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
        for link, seconds, latency in chain:
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


class _Rank:
    """The clock of one pipeline rank. All ranks of a stage do the same at the same time."""

    def __init__(self, layout: Layout, rank: int, execution: Execution, micro_batches: int) -> None:
        self.layout, self.rank, self.base, self.execution = layout, rank, layout.base, execution
        self.units = layout.units(rank)
        chains = {unit: layout.chains_of(unit) for unit, _ in self.units.counts}
        self.chains = [chains[unit] for unit in self.units.shapes]
        self.backwards_left = [micro_batches] * len(self.units.parts)
        self.staged = any(layout.states.staged(unit) for unit in self.units.shapes)
        self.gathers_again = any(w.gather for w in self.chains)
        self.begun_parts: set[int] = set()  # those that had their first forward
        self.uses = self._uses(layout.program(rank, micro_batches))
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

    def _uses(self, program: list[Segment]) -> Iterator[ModuleUse]:
        """Return the step's begin and every use of a module, with the gathers that begin then."""
        if not self.gathers_again:  # the first forward of every part is all there is
            program = list(dict.fromkeys(segment for segment in program if segment[0] == "F"))
        copies = self.layout.copies(self.rank)
        sizes = [chains.ahead_bytes for chains in self.chains]
        if self.execution.ahead:
            return iter(module_uses(copies, program, sizes))
        return _at_use(module_uses(replace(copies, prefetch_bytes=0), program, sizes))

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
        reduces = False
        if kind in (Kind.BACKWARD, Kind.WEIGHT):
            self.backwards_left[part] -= 1
            reduces = self.staged or not self.backwards_left[part]
        visits = self.gathers_again and kind != Kind.WEIGHT or part not in self.begun_parts
        self.begun_parts.add(part)
        if not visits and not reduces:
            self._spend(part, kind)
            return
        modules = self.units.parts[part]
        for module in modules if kind == Kind.FORWARD else reversed(modules):
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
            each = (self.base.compute.times[module].spent(kind) for module in modules)
            whole = Spent(*(sum(column) for column in zip(*each, strict=True)))
            shown, crowded = self.execution.tensor, self.base.cluster.device.contention
            tensor = whole.tensor * (shown + (1 - shown) * crowded)
            paid = whole._replace(recompute=whole.recompute * self.execution.recomputed, tensor=tensor)
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
            chain = self.chains[unit].every if self.backwards_left[part] else self.chains[unit].last
            if not chain:
                continue
            self.pending.append(self.reductions.run(chain, self.now, self.links))
            allowed = PENDING_REDUCTIONS if self.staged else len(self.pending)
            while len(self.pending) > (allowed if self.execution.behind else 0):
                self.wait_until(self.pending.popleft(), "reduce")

    def finish(self) -> None:
        for key, times in self.times.items():
            for item, seconds in zip(Spent._fields, self.paid[key][0], strict=True):
                self.bill[item] += times * seconds
        self.wait_until(max(self.pending, default=0.0), "reduce")
        self.wait_until(self.now + self._contended(), "contention")

    def _contended(self) -> float:
        """Return the seconds that the device loses to messages beside which it computes."""
        lanes = self.gathers, self.reductions
        moving = [pair for lane in lanes for pair in lane.moving.items()]
        waited = self.bill["gather"] + self.bill["reduce"]
        return self.base.collectives.contention(moving, sum(lane.working for lane in lanes), waited)


def _at_use(uses: Iterable[ModuleUse]) -> Iterator[ModuleUse]:
    """Yield the same gathers, but none before the use that it is for."""
    due: set[int] = set()
    for units, begun in uses:
        due.update(begun)
        yield ModuleUse(units, [unit for unit in units if unit in due])
        due.difference_update(units)


def simulate(layout: Layout, execution: Execution = ENGINE) -> Timing:
    """Return the time of one step in the middle of a run; with outer steps the mean of those from one meeting to the
    next."""
    base = layout.base
    runs = [_run(layout, execution, micro_batches) for micro_batches in base.sampled]
    seconds = base.extrapolated([run.seconds for run in runs])
    bill = {name: base.extrapolated([run.bill[name] for run in runs]) for name in BILL}
    outer = layout.states.outer
    bill["outer"] = 0.0 if outer is None else _outer_seconds(layout, outer.config, seconds)
    return Timing(seconds + bill["outer"], bill)


def _outer_seconds(layout: Layout, outer: OuterConfig, step: float) -> float:
    """Return the seconds that outer steps add to a step of ``step`` seconds: what a delay does not hide."""
    return max(meeting_seconds(layout) - outer.outer_delay * step, 0.0) / outer.outer_interval


def meeting_seconds(layout: Layout) -> float:
    """Return the seconds of a meeting: the others' messages come to all ranks, which wait for the slowest stage
    then."""
    _, received = layout.bytes_of_meetings
    own = (
        sum(count * layout.meeting_seconds(unit) for unit, count in layout.units(rank).counts)
        for rank in range(layout.base.pp)
    )
    return layout.base.cluster.met_seconds(received) + max(own)


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
    mean = {name: sum(clock.bill[name] for clock in ranks) / len(ranks) for name in BILL}
    return Timing(end + update, mean)


def update_seconds(layout: Layout) -> float:
    """Return the seconds of the norm's exchange, the update and, across a pipeline, the sum of tied embeddings.

    Updates of whole matrices add ``matrix_seconds``.
    """
    base, collectives = layout.base, layout.base.collectives
    largest = max(layout.units(rank).elements for rank in base.distinct_ranks)
    *across, node = layout.grid.row_axes
    scalars = collectives.steps(node.size, 1)
    scalars += sum(collectives.latency(collectives.link_of(axis)) for axis in across if axis.size > 1)
    matrices = max(layout.matrix_seconds(rank) for rank in base.distinct_ranks)
    return base.compute.update(largest / layout.shards.os) + scalars + matrices + sum(_tied(layout))


def _tied(layout: Layout) -> Iterator[float]:
    """Yield the seconds in which the pipeline's ends add up their gradients of each tied unit, all ranks at once."""
    base = layout.base
    for unit in layout.units(0).shapes:
        if unit.tied:
            sent = layout.states.plan(unit).ends(layout.grid.axis("pp")).sent
            yield base.collectives.message(base.link(0, base.pp - 1), sent, base.d * base.tp).seconds
