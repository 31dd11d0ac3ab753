"""Lower bounds of a layout's memory, and of its step time from what the first pipeline rank computes and sends.

The search asks them by the thousand, so what depends on mesh, shards and messages alone (``ChainWork``) is kept apart
from what depends on the schedule, the micro-batch and recompute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from megazero.config import RunConfig, World
from megazero.mesh.grid import INTER, INTRA, expert_shards
from megazero.plan.base_layout import BaseLayout
from megazero.plan.communication import OuterFormat
from megazero.plan.layout import LOCAL, Layout, LinkSeconds, UnitChains
from megazero.plan.memory import ALLOCATOR_MARGIN, States
from megazero.plan.seconds import INTER_SITE
from megazero.pp.schedules import Kind

Shard = tuple[int, int, int]  # P, G, OS
LINKS = (INTRA, INTER, INTER_SITE)
NOTHING = LinkSeconds()
Counted = Sequence[tuple[UnitChains, int]]  # the chains of units, and how many of them are alike
# From one segment to the next: the module in use, and the one before, which a backward of inputs alone ends late.
MODULES_HELD = 2
ROUNDING = 1e-12  # of a sum: the bytes themselves are added in another order
MODULES_PASSED = 2  # of a part that are no bytes ahead: the one in use and the next one


@dataclass(frozen=True)
class LinkWork:
    """Seconds of the first rank's chains on one link, or in its own memory.

    refresh, reduce: of the units of its parts up to each, latency included: until they can be used, and after the
    last backward. once: of refreshes and of the last micro-batch's reductions. every: of another micro-batch's.
    gather: of all units once. stays: of what may be held from one use to the next.
    """

    refresh: Sequence[float]
    reduce: Sequence[float]
    once: float
    every: float
    gather: float
    stays: float

    @classmethod
    def of(
        cls, link: str, units: Counted, alike: Sequence[Counted], parts: Sequence[int], held: float
    ) -> LinkWork:
        """Return the work of the rank's units. alike: those that a part is the first to use, for each kind of part.
        parts: the kind of each part. held: bytes that may stay from one use of a part to the next."""
        each = [(one.by_link.get(link, NOTHING), number) for one, number in units]
        own = [[(one.by_link.get(link, NOTHING), number) for one, number in part] for part in alike]
        first = [sum(number * one.first for one, number in part) for part in own]
        last = [sum(number * one.last for one, number in part) for part in own]
        shares = [one.by_link.get(link, NOTHING).gather / (one.ahead_bytes or 1.0) for one, _ in units]
        return cls(
            refresh=list(accumulate(first[kind] for kind in parts)),
            reduce=list(accumulate(last[kind] for kind in parts)),
            once=sum(number * one.once for one, number in each),
            every=sum(number * one.every for one, number in each),
            gather=sum(number * one.gather for one, number in each),
            stays=held * max(shares),
        )

    def seconds(self, micro_batches: int, held: float | None) -> float:
        """Return a lower bound of the seconds of a step. held: from how many uses of a part to the next some of its
        weights may stay; None: units are gathered once per step.

        Weights are gathered once per step, and again for each further forward and backward, except those that may
        stay from one to the next: the modules in use and around it, and the bytes that may be held ahead.
        """
        total = self.once + (micro_batches - 1) * self.every + self.gather
        if held is None:
            return total
        return total + max(0.0, (2 * micro_batches - 1) * self.gather - held * self.stays)


@dataclass(frozen=True)
class ChainWork:
    """The work of each link. local: of the rank's own memory. update: seconds of the update.

    outlast: a unit may stay here while all of another part is used, or all of its own: both are within the bytes that
    may be held ahead.
    """

    of: Mapping[str, LinkWork]
    local: LinkWork
    update: float
    outlast: bool

    @classmethod
    def of_layout(cls, layout: Layout) -> ChainWork:
        """Return the work of a step of the first pipeline rank."""
        units, parts = layout.units(0), layout.base.partition.of[0]
        chains = {unit: layout.chains_of(unit) for unit, _ in units.counts}
        every = [(chains[unit], number) for unit, number in units.counts]
        kinds = dict(zip(parts, units.part_counts, strict=True))  # parts with the same modules are alike
        alike = [[(chains[unit], number) for unit, number in counts] for counts in kinds.values()]
        prefetch, module = layout.states.prefetch_bytes, max(units.modules.values()) * layout.formats.width
        part = min(sum(number * one.ahead_bytes for one, number in own) for own in alike)
        unit = min((one.ahead_bytes for one, _ in every if one.gather), default=0.0)
        held = prefetch + MODULES_HELD * module
        numbers = {modules: number for number, modules in enumerate(kinds)}
        order = [numbers[modules] for modules in parts]
        links = {link for one, _ in every for link in one.by_link} | {INTRA}
        of = {link: LinkWork.of(link, every, alike, order, held) for link in LINKS if link in links}
        local = LinkWork.of(LOCAL, every, (), (), held)
        update = layout.base.compute.update(units.elements / layout.shards.os) + layout.matrix_seconds(0)
        return cls(of, local, update, part - MODULES_PASSED * module + unit <= prefetch)

    def least_seconds(self, base: BaseLayout, gathered: bool, exactly: bool = False) -> float:
        """Return a lower bound of the step time of a layout on this base. exactly: run its schedule for that.

        A part's first forward cannot end before its weights are here, nor the step before the last micro-batch's
        gradients of its last backward are summed. Only what is computed before, or after, can hide them. A lane has
        one hop at a time on a link, and a link carries one message at a time. What is hidden slows the device down.
        """
        forwards, backwards = base.beside[Kind.FORWARD], base.beside[Kind.BACKWARD]
        lead = max(_exposed(work.refresh, forwards) for work in self.of.values())
        tail = max(_exposed(work.reduce, backwards) for work in self.of.values())
        held = None if gathered else self.held(base)
        links = {link: work.seconds(base.micro_batches, held) for link, work in self.of.items()}
        local = self.local.seconds(base.micro_batches, held)
        makespan, first_rank = base.compute_only if exactly else (base.least_seconds, base.first_rank_busy)
        busy = base.first_rank_busy
        # With one stage a rank, all wait for the first rank's forward; else it may wait for both at once.
        waits = [first_rank - busy, lead + tail]
        first = busy + _contended(base, links, local, sum(waits) if base.virtual == 1 else max(waits))
        return self.update + max(makespan, first, *links.values())

    def held(self, base: BaseLayout) -> float:
        """Return from how many uses of a part to the next some of its weights may stay.

        If no part's weights can be ahead all at once, those are the uses that follow each other the other way round.
        """
        return 2 * base.micro_batches * base.virtual - 1 if self.outlast else base.turns


class Widths(NamedTuple):
    """The bytes of an element at least: of a gradient across nodes, of a sum that comes back, and of a weight."""

    gradient: float
    back: float
    weight: float

    @property
    def there_and_back(self) -> float:
        return self.gradient + min(self.back, self.weight)


def least_crossing(base: BaseLayout, widths: Widths, shard: Shard | None = None, once: bool = False) -> float:
    """Return a lower bound of the seconds in which messages cross nodes, for all shards or for these.

    Each gradient of the first rank's layers crosses at least once per step, or with every micro-batch as far as nodes
    share the sums; what becomes of it comes back. once: gradients are accumulated whole.
    """
    cluster = base.cluster
    if base.d == base.h or cluster.collectives:  # measured times need not follow the bytes
        return 0.0
    key = "crossing", base.partition.kinds[0], base.micro_batches, shard, once
    there, back, copied = base.shared(key, partial(_crossing, base, shard, once))
    least = min(widths.weight, widths.back) if shard is None else widths.back
    crossed = there * widths.gradient + back * least + copied * widths.weight
    # Between sites is another link, which may be busy at the same time.
    return crossed / (1 if cluster.inter_site is None else 2) / base.collectives.rate(INTER)


def _crossing(base: BaseLayout, shard: Shard | None, once: bool) -> tuple[float, float, float]:
    """Return how many elements of the first rank's matrices cross nodes in a step at least: as gradients, as sums
    that come back, and as weights; for all shards, those that come back as either."""
    gradients = sums = weights = 0.0
    for apart, elements in base.matrices_of(0):
        h = max(base.h // apart, 1)
        nodes = base.d // apart // h
        # How many nodes share a copy of each.
        _, g, os = expert_shards(expert_shards(shard or (1, 1, 1), apart), h)
        share = elements / h
        gradients += share * (1 / g - 1 / nodes + (1 - 1 / g) * (1 if once else base.micro_batches))
        sums += share * (1 / os - 1 / nodes)
        weights += share * (1 - 1 / os)
    return gradients, sums, weights


def least_memory(base: BaseLayout, shard: Shard | None = None, coded: bool = True) -> float:
    """Return a lower bound of the bytes of the fullest rank, for these shards or for all: its parameters without
    padding, and its activations. coded: weights may stay as they were received, in few bits."""
    kinds, make = base.partition.kinds, partial(_least_states, base, shard, coded)
    least = max(
        activations + base.shared(("least", shard, coded, kinds[rank]), partial(make, rank))
        for rank, activations in base.least_activations.items()
    )
    least *= 1 - ROUNDING
    return least if base.cluster.on_host else least * (1 + ALLOCATOR_MARGIN)


def _least_states(base: BaseLayout, shard: Shard | None, coded: bool, rank: int) -> float:
    """Return the least bytes of a rank's model state and gathered parameters."""
    config, width = base.config, base.compute.width
    copy, sums, updated = least_state(config, base.world, width)
    whole = config.zero.zero_gradients_lifetime == "step"
    states = gathered = 0.0
    for apart, elements in base.elements_of(rank):
        p, g, os = expert_shards(shard or (base.d, base.d, base.d), apart)
        kept = copy if coded and p > 1 or not copy else width  # what one rank holds whole is decoded at once
        states += elements * (kept / p + sums / (1 if whole else g) + updated / os)
        gathered += elements * width * (shard is not None and apart < shard[0])
    return states + min(gathered, config.zero.zero_prefetch_bytes)


def least_state(config: RunConfig, world: World, width: int) -> tuple[float, float, float]:
    """Return the least bytes of an element of a matrix: its copy, its gradient, and what is updated."""
    sums = max(width, 4)
    anchors = States.anchors_of(OuterFormat.of(config.outer, config.outer_replicas(world), sums))
    copy = 0.0 if width == sums else min(width, (config.zero.zero_weight_bits or 8) / 8)
    return copy, sums, sums * (1 + anchors) + config.optimizer.moment_bytes(sums, 1.0)


def _contended(base: BaseLayout, links: Mapping[str, float], work: float, waits: float) -> float:
    """Return the seconds of a device's waits, and what it loses beside computing (simulate.py), at least.

    More waits, or longer messages, make more of both: a message costs no more than its own seconds. work: seconds of
    the rank's own work on messages.
    """
    if base.cluster.on_host:
        return waits
    inside = base.collectives.rate(INTRA)
    costs = sum(n * min(1.0, base.collectives.rate(link) / inside) for link, n in links.items() if n)
    lost = work + min(base.cluster.device.contention, 1.0) * costs
    return waits + max(0.0, lost * (1 - waits / (work + sum(links.values())))) if lost else waits


def _exposed(moved: Sequence[float], hidden: Sequence[float]) -> float:
    """Return the seconds at least by which messages take longer than what hides them, up to some part."""
    return max(0.0, *map(sub, moved, hidden))
