"""Lower bounds of a layout's memory, and of its step time from what the first pipeline rank computes and sends.

The search asks them by the thousand, so what depends on mesh, shards and messages alone (``ChainWork``) is kept apart
from what depends on the schedule, the micro-batch and recompute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from megazero.config import RunConfig, World
from megazero.mesh.grid import INTER, INTRA, expert_shards
from megazero.plan.base_layout import BaseLayout
from megazero.plan.communication import OuterFormat
from megazero.plan.layout import LOCAL, Layout, LinkSeconds
from megazero.plan.memory import ALLOCATOR_MARGIN, States
from megazero.plan.seconds import INTER_SITE
from megazero.pp.schedules import Kind

Shard = tuple[int, int, int]  # P, G, OS
ACROSS = (INTER, INTER_SITE)  # links between nodes
LINKS = (INTRA, *ACROSS)
NOTHING = LinkSeconds()
MODULES_HELD = 4  # from one segment to the next: the last one and the next one, each with a tied table


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

    def seconds(self, base: BaseLayout, gathered: bool) -> float:
        """Return a lower bound of the seconds of a step. gathered: units are gathered once per step.

        Weights are gathered once per step, and again for each further forward and backward, except those that may
        stay from one to the next: the modules in use and around it, and the bytes that may be held ahead.
        """
        again = base.micro_batches
        total = self.once + (again - 1) * self.every + self.gather
        if gathered:
            return total
        further = (2 * again - 1) * self.gather - (2 * again * base.virtual - 1) * self.stays
        return total + max(0.0, further)


@dataclass(frozen=True)
class ChainWork:
    """The work of each link and of the rank's own memory. update: seconds of the update."""

    of: Mapping[str, LinkWork]
    update: float

    @classmethod
    def of_layout(cls, layout: Layout) -> ChainWork:
        """Return the work of a step of the first pipeline rank."""
        units, base = layout.units(0), layout.base
        chains = {unit: layout.chains_of(unit) for unit, _ in units.counts}
        alike = dict(
            zip(base.partition.of[0], range(base.virtual), strict=True)
        )  # parts with the same modules
        counted = {modules: units.counts_of(part) for modules, part in alike.items()}
        parts = [
            [(chains[unit].by_link, n) for unit, n in counted[modules]] for modules in base.partition.of[0]
        ]
        every = [(chains[unit], number) for unit, number in units.counts]
        held = (
            layout.states.prefetch_bytes + MODULES_HELD * max(units.modules.values()) * layout.formats.width
        )
        of = {}
        for link in {link for one, _ in every for link in one.by_link} | {INTRA, LOCAL}:
            each = [(one.by_link.get(link, NOTHING), n) for one, n in every]
            shares = [one.by_link.get(link, NOTHING).gather / (one.ahead_bytes or 1.0) for one, _ in every]
            of[link] = LinkWork(
                refresh=_upto(sum(n * one.get(link, NOTHING).first for one, n in p) for p in parts),
                reduce=_upto(sum(n * one.get(link, NOTHING).last for one, n in p) for p in parts),
                once=sum(n * one.once for one, n in each),
                every=sum(n * one.every for one, n in each),
                gather=sum(n * one.gather for one, n in each),
                stays=held * max(shares),
            )
        update = layout.base.compute.update(units.elements / layout.shards.os) + layout.matrix_seconds(0)
        return cls(of, update)

    def least_seconds(self, base: BaseLayout, gathered: bool, exactly: bool = False) -> float:
        """Return a lower bound of the step time of a layout on this base. exactly: run its schedule for that.

        A part's first forward cannot end before its weights are here, nor the step before the last micro-batch's
        gradients of its last backward are summed. Only what is computed before, or after, can hide them. A lane has
        one hop at a time on a link, and a link carries one message at a time. What is hidden slows the device down.
        """
        used = {link: self.of[link] for link in LINKS if link in self.of}
        forwards, backwards = base.beside[Kind.FORWARD], base.beside[Kind.BACKWARD]
        lead = max(_exposed(work.refresh, forwards) for work in used.values())
        tail = max(_exposed(work.reduce, backwards) for work in used.values())
        links = {link: work.seconds(base, gathered) for link, work in used.items()}
        makespan, first_rank = base.compute_only if exactly else (base.least_seconds, base.first_rank_busy)
        busy = base.first_rank_busy
        # With one stage a rank, all wait for the first rank's forward; else it may wait for both at once.
        waits = [first_rank - busy, lead + tail]
        first = busy + self._contended(base, links, gathered, sum(waits) if base.virtual == 1 else max(waits))
        return self.update + max(makespan, first, *links.values())

    def _contended(self, base: BaseLayout, links: Mapping[str, float], gathered: bool, waits: float) -> float:
        """Return the seconds of a device's waits, and what it loses beside computing (simulate.py), at least.

        More waits, or longer messages, make more of both: a message costs no more than its own seconds.
        """
        if base.cluster.on_host:
            return waits
        inside, work = base.collectives.rate(INTRA), self.of[LOCAL].seconds(base, gathered)
        costs = sum(n * min(1.0, base.collectives.rate(link) / inside) for link, n in links.items() if n)
        lost = work + min(base.cluster.device.contention, 1.0) * costs
        return waits + max(0.0, lost * (1 - waits / (work + sum(links.values())))) if lost else waits


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
    crossed = 0.0
    for apart, elements in base.matrices_of(0):
        h = max(base.h // apart, 1)
        nodes = base.d // apart // h
        # How many nodes share a copy of each.
        _, g, os = (max(k // h, 1) for k in expert_shards(shard or (1, 1, 1), apart))
        there = 1 / g - 1 / nodes + (1 - 1 / g) * (1 if once else base.micro_batches)
        if shard is None:
            back = (1 - 1 / nodes) * min(widths.weight, widths.back)
        else:
            back = (1 - 1 / os) * widths.weight + (1 / os - 1 / nodes) * widths.back
        crossed += elements / h * (there * widths.gradient + back)
    # Between sites is another link, which may be busy at the same time.
    return crossed / (1 if cluster.inter_site is None else 2) / base.collectives.rate(INTER)


def least_memory(base: BaseLayout, shard: Shard | None = None) -> float:
    """Return a lower bound of the bytes of the fullest rank, whatever the formats, for these shards or for all: its
    layers' matrices in the fewest bytes, and its activations."""
    kinds = base.partition.kinds
    least = max(
        activations + base.shared(("least", shard, kinds[rank]), partial(_least_states, base, rank, shard))
        for rank, activations in base.least_activations.items()
    )
    return least if base.cluster.on_host else least * (1 + ALLOCATOR_MARGIN)


def _least_states(base: BaseLayout, rank: int, shard: Shard | None) -> float:
    """Return the least bytes of a rank's model state and gathered parameters, if its layers' matrices were all."""
    config, width = base.config, base.compute.width
    copy, sums, updated = least_state(config, base.world, width, base.cluster.on_host)
    whole = config.zero.zero_gradients_lifetime == "step"
    states = gathered = 0.0
    for apart, elements in base.matrices_of(rank):
        p, g, os = expert_shards(shard or (base.d, base.d, base.d), apart)
        states += elements * (copy / p + sums / (1 if whole else g) + updated / os)
        gathered += elements * width * (shard is not None and apart < shard[0])
    return states + min(gathered, config.zero.zero_prefetch_bytes)


def least_state(config: RunConfig, world: World, width: int, on_host: bool) -> tuple[float, float, float]:
    """Return the least bytes of an element of a matrix: its copy, its gradient, and what is updated."""
    sums = max(width, 4)
    anchors = States.anchors_of(OuterFormat.of(config.outer, config.outer_replicas(world), sums), on_host)
    copy = 0.0 if width == sums else min(width, (config.zero.zero_weight_bits or 8) / 8)
    return copy, sums, sums * (1 + anchors) + config.optimizer.moment_bytes(sums, 1.0)


def _upto(parts: Iterable[float]) -> Sequence[float]:
    return list(accumulate(parts))


def _exposed(moved: Sequence[float], hidden: Sequence[float]) -> float:
    """Return the seconds at least by which messages take longer than what hides them, up to some part."""
    return max(0.0, *map(sub, moved, hidden))
