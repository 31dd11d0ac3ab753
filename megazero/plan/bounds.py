"""Lower bounds of a layout's step time, from what the first pipeline rank computes and sends.

The search asks them by the thousand, so what depends on mesh, shards and messages alone (``ChainWork``) is kept apart
from what depends on the schedule, the micro-batch and recompute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

from megazero.config.model.spec import is_layer, model_spec
from megazero.mesh.grid import INTER, INTRA
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import LOCAL, Chain, Layout
from megazero.plan.seconds import INTER_SITE
from megazero.pp.schedules import Kind

ACROSS = (INTER, INTER_SITE)  # links between nodes
LINKS = (INTRA, *ACROSS)
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
        units = layout.units(0)
        chains = {unit: layout.chains_of(unit) for unit, _ in units.counts}
        parts = [[(chains[unit], n) for unit, n in units.counts_of(i)] for i in range(layout.base.virtual)]
        every = [(chains[unit], number) for unit, number in units.counts]
        held = (
            layout.states.prefetch_bytes + MODULES_HELD * max(units.modules.values()) * layout.formats.width
        )
        of = {
            link: LinkWork(
                refresh=_upto(sum(n * _on(one.refresh + one.gather, link) for one, n in p) for p in parts),
                reduce=_upto(sum(n * _on(one.last, link) for one, n in p) for p in parts),
                once=sum(n * (_occupied(one.refresh, link) + _occupied(one.last, link)) for one, n in every),
                every=sum(n * _occupied(one.every, link) for one, n in every),
                gather=sum(n * _occupied(one.gather, link) for one, n in every),
                stays=held * max(_occupied(c.gather, link) / (c.ahead_bytes or 1.0) for c, _ in every),
            )
            for link in (*LINKS[: 2 + (layout.base.cluster.inter_site is not None)], LOCAL)
        }
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
        # With one stage a rank, all wait for the first rank's forward.
        behind = (first_rank if base.virtual == 1 else base.first_rank_busy) + lead + tail
        contended = base.first_rank_busy + self._contended(base, links, gathered)
        return self.update + max(makespan, behind, contended, *links.values())

    def _contended(self, base: BaseLayout, links: Mapping[str, float], gathered: bool) -> float:
        """Return what a device loses beside computing if nothing waits (simulate.py); waiting takes longer."""
        if base.cluster.on_host:
            return 0.0
        inside = base.collectives.rate(INTRA)
        costs = sum(n * min(1.0, base.collectives.rate(link) / inside) for link, n in links.items() if n)
        return self.of[LOCAL].seconds(base, gathered) + min(base.cluster.device.contention, 1.0) * costs


def least_seconds(layout: Layout) -> float:
    """Return a lower bound of the layout's step time."""
    return ChainWork.of_layout(layout).least_seconds(layout.base, layout.shards.keep_gathered, exactly=True)


def least_crossing(base: BaseLayout, width: float) -> float:
    """Return a lower bound of the seconds in which messages cross nodes, whatever the shards.

    Each gradient of the first rank's layers crosses once per step at least, and so does what becomes of it.
    width: the bytes of both at least.
    """
    cluster, nodes = base.cluster, base.d // base.h
    if nodes == 1 or cluster.collectives:  # measured times need not follow the bytes
        return 0.0
    modules, whole = base.partition.of(0), model_spec(base.config.model).modules
    elements = sum(n * whole[kind].matrices for part in modules for kind, n in part if is_layer(kind))
    return elements / (base.tp * base.h) * (1 - 1 / nodes) * width / base.collectives.rate(INTER)


def _upto(parts: Iterable[float]) -> Sequence[float]:
    return list(accumulate(parts))


def _exposed(moved: Sequence[float], hidden: Sequence[float]) -> float:
    """Return the seconds at least by which messages take longer than what hides them, up to some part."""
    return max(0.0, *map(sub, moved, hidden))


def _on(chain: Chain, link: str) -> float:
    return sum(hop.seconds for hop in chain if hop.link == link)


def _occupied(chain: Chain, link: str) -> float:
    return sum(hop.seconds - hop.latency for hop in chain if hop.link == link)
