"""The planner's clock for hosts whose ranks share processors: CPUs with gloo, on which the planner is measured.

Overlap is not free there, because computing, coding and sending all need processors. If they need more than there
are, each gets at most an equal share (max-min fairness). A rank that waits leaves its share to others, so a pipeline
bubble costs less than on devices. Times were measured with every rank of a host at work and are scaled from there. If
more ranks compute than there are processors, some idle while the last rank finishes; the share in use is measured
too. Chains of hops advance when their rank polls them, at module hooks and while it waits (comm/lane.py). Coding is
the rank's own work. What is on its way over a long link needs neither processors nor the link; gloo has a few threads
for each communicator, which wait for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megazero.config.model.spec import EMBEDDING, HEAD, LAYER
from megazero.mesh.grid import INTRA
from megazero.plan.layout import LOCAL, Chain, Layout, TimedHop
from megazero.plan.memory import PENDING_REDUCTIONS
from megazero.plan.rank_step import RankStep
from megazero.plan.simulate import BILL, Timing, mean_bill, simulate, update_seconds, whole_step
from megazero.pp.schedules import Action, Kind

LOOKS = {LAYER: 8, HEAD: 2, EMBEDDING: 1}  # at chains in a backward: with every parameter's gradient
BOUND = 0.75  # of a host's processors: what took so much when it was measured waits for processors alone
LEAST = 0.1  # of a processor, that other programs leave
THREADS = 2  # of gloo, for the collectives of one communicator
TINY = 1e-12


class Need(NamedTuple):
    """What a rank does next: ``seconds`` of work for ``item`` of the bill, or with None, wait for something."""

    item: str
    seconds: float | None = None


Steps = Iterator[Need]


def predict(layout: Layout) -> Timing:
    """Return the time of a step: on shared processors if the cluster file has ``cores``, else the planner's own."""
    if layout.base.cluster.cores is None:
        return simulate(layout)
    return whole_step(layout, lambda micro_batches: _run(layout, micro_batches))


def _run(layout: Layout, micro_batches: int) -> Timing:
    machine = Machine(layout, micro_batches)
    end, update = machine.run(), update_seconds(layout)
    for bill in machine.bills:
        bill["pipeline"] += end - sum(bill.values())  # until the last rank is done
        bill["update"] += update
    return Timing(end + update, mean_bill(machine.bills))


@dataclass(eq=False)
class Transfer:
    """A collective or message in flight.

    lane: whose communicator it is on. left: its remaining seconds when alone, those of its latency last.
    """

    owner: int
    hop: TimedHop
    lane: str
    left: float
    done: bool = False

    @property
    def on_its_way(self) -> bool:
        """Whether what is left is latency."""
        return self.left <= self.hop.latency + TINY


@dataclass(eq=False)
class RunningChain:
    """A chain in flight. at: the next hop."""

    hops: Chain
    at: int = 0
    transfer: Transfer | None = None
    done: bool = False

    @property
    def links(self) -> set[str]:
        """The links that the chain still has to use."""
        return {hop.link for hop in self.hops[self.at :] if hop.link != LOCAL}


class Host:
    """Shared resources: for each pipeline rank's host and node, how many ranks of each pipeline rank lie there."""

    def __init__(self, layout: Layout) -> None:
        base, grid = layout.base, layout.grid
        cores = base.cluster.cores
        assert cores is not None
        self.count, self.ranks = cores.count, min(cores.ranks, base.world.world_size)
        self.processors, self.share = max(cores.count - cores.others, LEAST), cores.share
        self.per_node = grid.ranks_per_node
        stage = grid.axis("pp").index

        def neighbours(size: int) -> list[list[int]]:
            out = []
            for own in range(base.pp):
                first = grid.rank_of(own, 0, 0) // size * size
                here = [stage(rank) for rank in range(first, min(first + size, base.world.world_size))]
                out.append([here.count(other) for other in range(base.pp)])
            return out

        self.on_host, self.on_node = neighbours(cores.ranks), neighbours(self.per_node)

    @property
    def full(self) -> float:
        """The share of a processor that a rank has when all compute, as they did when it was measured."""
        return min(1.0, self.count / self.ranks)

    def needs(self, hop: TimedHop, load: float) -> tuple[float, float]:
        """Return the processors that a transfer took when it was measured, and the most that it can use now.

        load: of its link, relative to the measurement. Transfers bound by processors then are so now.
        """
        took = max(hop.busy / max(hop.seconds - hop.latency, TINY), 1e-6)
        bound = took * self.ranks > BOUND * self.count
        return took, 1.0 if bound else min(1.0, took / load)


class Process(RankStep):
    """One pipeline rank, which stands for all of its stage."""

    def __init__(self, layout: Layout, rank: int, micro_batches: int, machine: Machine) -> None:
        super().__init__(layout, rank, micro_batches)
        self.machine = machine
        self.gathers: deque[RunningChain] = deque()
        self.reductions: deque[RunningChain] = deque()
        self.pending: deque[RunningChain] = deque()
        self.here: dict[int, RunningChain] = {}
        self.first = [True] * len(self.chains)  # no gradients of the unit were taken yet
        self.program = [step for step in layout.base.steps_of(micro_batches)[1] if step[0] == rank]

    def steps(self) -> Steps:
        """Yield all that the rank does in a step, up to the sums that it needs."""
        yield from self._use()  # as begin_step does
        for _, action, event, needed in self.program:
            yield from self._wait(
                lambda needed=needed: all(self.machine.has(e, source != self.rank) for e, source in needed),  # type: ignore[misc]
                "pipeline",
                (self.gathers, self.reductions),
            )
            yield from self._run(action)
            self.machine.happened(event, self.rank)
        yield from self._wait(
            lambda: all(t.done for t in self.reductions), "reduce", (self.reductions, self.gathers)
        )

    def _run(self, action: Action) -> Steps:
        modules, visits, reduces = self.open(action)
        backward = action.kind in (Kind.BACKWARD, Kind.WEIGHT)
        for module in modules:
            if visits:
                yield from self._use()
            compute, again, tensor, *_ = self.spent(module.kind, action.kind)
            looks = 1 if action.kind == Kind.FORWARD else LOOKS[module.kind]
            yield Need("recompute", again)
            for _ in range(looks):
                yield Need("compute", compute / looks)
                yield from self._tensor(tensor / looks, module.kind)
                yield from self._poll((self.gathers, self.reductions))
            if backward:
                yield from self._take(module.units, reduces, action)

    def _tensor(self, seconds: float, module: str) -> Steps:
        """Wait for tensor-parallel collectives."""
        if seconds:
            busy = self.base.compute.times[module].tp_busy * seconds
            transfer = self.machine.send(self.rank, TimedHop(INTRA, seconds, busy), "tensor")
            while not transfer.done:
                yield Need("tensor")

    def _use(self) -> Steps:
        """Start the gathers that begin at this use of a module, and wait for those that it needs."""
        module_use = next(self.uses)
        for unit in module_use.begun:
            chains = self.chains[unit]
            chain = (() if unit in self.here else chains.refresh) + chains.gather
            self.here[unit] = RunningChain(chain, done=not chain)
            self.gathers.append(self.here[unit])
            yield from self._poll((self.gathers,))
        units = [self.here[unit] for unit in module_use.units if unit in self.here]
        yield from self._wait(lambda: all(t.done for t in units), "gather", (self.gathers,))

    def _take(self, units: Sequence[int], reduces: bool, action: Action) -> Steps:
        """Take the gradients of a module, and start their reductions."""
        part = action.stage // self.base.pp
        for unit in reversed(units):
            chains = self.chains[unit]
            yield Need("compute", chains.stage if self.staged or self.first[unit] else chains.add)
            self.first[unit] = False
            chain = chains.every if self.left[part] else chains.last
            if not (reduces and chain):
                continue
            running = RunningChain(chain)
            self.reductions.append(running)
            self.pending.append(running)
            yield from self._poll((self.reductions,))
            while self.staged and len(self.pending) > PENDING_REDUCTIONS:
                oldest = self.pending.popleft()
                yield from self._wait(lambda t=oldest: t.done, "reduce", (self.reductions,))  # type: ignore[misc]

    def _wait(self, ready: Callable[[], bool], item: str, lanes: Sequence[deque[RunningChain]]) -> Steps:
        while not ready():
            moved = yield from self._poll(lanes)
            if not moved and not ready():
                yield Need(item)

    def _poll(self, lanes: Sequence[deque[RunningChain]]) -> Generator[Need, None, bool]:
        """Move chains on as comm/lane.py does. Returns whether one moved."""
        moved = False
        for lane in lanes:
            item = "gather" if lane is self.gathers else "reduce"
            reserved: set[str] = set()
            for running in lane:
                while not running.done and (running.transfer is None or running.transfer.done):
                    hop = running.hops[running.at] if running.at < len(running.hops) else None
                    if hop is not None and hop.link in reserved:
                        break
                    moved = True
                    if hop is None:
                        running.done = True
                    else:
                        running.at, running.transfer = running.at + 1, None
                        if hop.link == LOCAL:
                            yield Need(item, hop.seconds)
                        else:
                            running.transfer = self.machine.send(self.rank, hop, item)
                if not running.done:
                    reserved |= running.links
            while lane and lane[0].done:
                lane.popleft()
        return moved


class Machine:
    """The simulation of all processes and their shared resources."""

    def __init__(self, layout: Layout, micro_batches: int) -> None:
        self.base, self.host = layout.base, Host(layout)
        self.now = 0.0
        self.transfers: list[Transfer] = []
        self.messages: dict[int, Transfer] = {}
        self.events: set[int] = set()
        steps = self.base.steps_of(micro_batches)[1]
        self.travels = {
            event: (source, rank)
            for rank, _, _, needed in steps
            for event, source in needed
            if source != rank
        }
        self.processes = [Process(layout, rank, micro_batches, self) for rank in range(layout.base.pp)]
        self.bills = [dict.fromkeys(BILL, 0.0) for _ in self.processes]

    def send(self, owner: int, hop: TimedHop, lane: str) -> Transfer:
        transfer = Transfer(owner, hop, lane, hop.seconds)
        self.transfers.append(transfer)
        return transfer

    def happened(self, event: int, owner: int) -> None:
        """Note that an action is done, and send its result to the rank that needs it."""
        self.events.add(event)
        if event in self.travels:
            source, target = self.travels[event]
            link = self.base.link(source, target)
            hop = TimedHop(link, *self.base.message_costs[link])
            self.messages[event] = self.send(owner, hop, f"pipeline {target}")

    def has(self, event: int, away: bool) -> bool:
        """Return whether an action is done and, if another rank did it, its message has arrived."""
        if away:
            return event in self.messages and self.messages[event].done
        return event in self.events

    def run(self) -> float:
        """Run all processes to their ends, and return the time."""
        steps = [process.steps() for process in self.processes]
        doing: list[Need | None] = [Need("compute", 0.0) for _ in steps]
        left = [0.0] * len(steps)
        while any(need is not None for need in doing):
            changed = True
            while changed:  # what one does may be what another waits for
                changed = False
                for rank, need in enumerate(doing):
                    if need is None or need.seconds is not None and left[rank] > TINY:
                        continue
                    following = next(steps[rank], None)
                    changed = changed or following is None or following.seconds is not None
                    doing[rank] = following
                    left[rank] = following.seconds or 0.0 if following else 0.0
            if any(need is not None for need in doing):
                self._advance(doing, left)
        return self.now

    def _advance(self, doing: Sequence[Need | None], left: list[float]) -> None:
        """Let time pass until the next work or transfer ends."""
        working = [need is not None and need.seconds is not None for need in doing]
        compute, moving = self._rates(working)
        ends = [left[r] / compute[r] for r in range(len(doing)) if working[r]]
        ends += [
            (t.left if t.on_its_way else t.left - t.hop.latency) / rate
            for t, rate in zip(self.transfers, moving, strict=True)
            if rate
        ]
        assert ends, "all ranks wait, and nothing is under way"
        step = min(ends)
        self.now += step
        for rank, need in enumerate(doing):
            if need is not None:
                self.bills[rank][need.item] += step
            if working[rank]:
                left[rank] = max(0.0, left[rank] - step * compute[rank])
        for transfer, rate in zip(self.transfers, moving, strict=True):
            transfer.left -= step * rate
            transfer.done = transfer.left <= TINY
        self.transfers = [t for t in self.transfers if not t.done]

    def _rates(self, working: Sequence[bool]) -> tuple[list[float], list[float]]:
        """Return how fast each rank works and each transfer goes, 1 being as measured."""
        host, begun = self.host, self._begun()
        sending = [t for t in begun if not t.on_its_way]
        load: defaultdict[tuple[int, str], float] = defaultdict(float)
        for transfer in sending:
            for own in range(len(working)):
                load[own, transfer.hop.link] += host.on_node[own][transfer.owner] / host.per_node
        needs = [host.needs(t.hop, load[t.owner, t.hop.link]) for t in sending]
        levels = []
        for count in host.on_host:
            wanted = [(n, 1.0) for n, busy in zip(count, working, strict=True) if n and busy]
            wanted += [(count[t.owner], most) for t, (_, most) in zip(sending, needs, strict=True)]
            crowded = sum(n * most for n, most in wanted) > host.processors
            levels.append(fair_level(wanted, host.processors * (host.share if crowded else 1.0)))
        compute = [min(1.0, level) / host.full for level in levels]
        rates = dict.fromkeys(begun, 1.0)
        rates.update(
            {t: min(levels[t.owner], most) / took for t, (took, most) in zip(sending, needs, strict=True)}
        )
        return compute, [rates.get(t, 0.0) for t in self.transfers]

    def _begun(self) -> list[Transfer]:
        """Return the transfers that have a thread. The others wait for one, in their order."""
        taken: Counter[tuple[int, str, str]] = Counter()
        begun = []
        for transfer in self.transfers:
            communicator = transfer.owner, transfer.lane, transfer.hop.link
            taken[communicator] += 1
            if taken[communicator] <= THREADS:
                begun.append(transfer)
        return begun


def fair_level(wanted: Sequence[tuple[float, float]], processors: float) -> float:
    """Return the max-min fair share of these wants (number, each) over this many processors."""
    left, number = processors, sum(n for n, _ in wanted)
    for n, each in sorted(wanted, key=lambda want: want[1]):
        if number <= 0 or each * number >= left:
            break
        left -= n * each
        number -= n
    return left / number if number > TINY else 1.0
