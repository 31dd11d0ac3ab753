"""Estimates of a layout's step time and memory in closed form, from what the first pipeline rank computes and sends.

The search estimates layouts by the ten thousand and simulates the best, so ``Messages``, which depend on mesh, shards
and formats alone, are kept apart from what depends on the schedule, the micro-batch and recompute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megazero.mesh.grid import expert_shards
from megazero.plan.base_layout import BaseLayout
from megazero.plan.communication import OuterFormat
from megazero.plan.layout import LOCAL, Chain, Layout
from megazero.plan.memory import ALLOCATOR_MARGIN, States
from megazero.pp.schedules import Kind

Shard = tuple[int, int, int]  # P, G, OS
MODULES_HELD = 2  # the module in use, and the one before, which a backward of inputs alone ends late
ROUNDING = 1e-12  # of a sum: the bytes themselves are added in another order


@dataclass
class LinkSeconds:
    """The seconds of a rank's units on one link, or of its own work on their messages.

    lead: of refresh and first gather; tail: of the last micro-batch's reduction: of the first part and of all parts,
    latency included. The others are those in which the link is busy. once: of refresh and last reduction; every: of
    another micro-batch's reduction; gather: of one gather of all units; stays: of what may be held from one use to
    the next.
    """

    lead: tuple[float, float] = (0.0, 0.0)
    tail: tuple[float, float] = (0.0, 0.0)
    once: float = 0.0
    every: float = 0.0
    gather: float = 0.0
    stays: float = 0.0

    def busy(self, micro_batches: int, stages: int, gathered: bool) -> float:
        """Return the seconds in which the link is busy in a step.

        stages: those of the rank. gathered: units are gathered once per step, and else for each forward and backward.
        """
        total = self.once + (micro_batches - 1) * self.every + self.gather
        if gathered:
            return total
        again = 2 * micro_batches - 1
        return total + max(0.0, again * (self.gather - stages * self.stays))


@dataclass(frozen=True)
class Messages:
    """The messages of the first pipeline rank: seconds by link, LOCAL among them.

    update: seconds of the update. staged: each micro-batch's gradients are reduced, so that few reductions may be in
    flight, and a backward waits for those before it.
    """

    links: Mapping[str, LinkSeconds]
    update: float
    staged: bool

    @classmethod
    def of(cls, layout: Layout) -> Messages:
        """Return those of a layout, whatever its schedule, micro-batch and recompute."""
        units, links = layout.units(0), defaultdict[str, LinkSeconds](LinkSeconds)
        held = (
            layout.states.prefetch_bytes + MODULES_HELD * max(units.modules.values()) * layout.formats.width
        )
        in_part = dict(units.part_counts[0])
        for unit, number in units.counts:
            chains, times = layout.chains_of(unit), (in_part.get(unit, 0), number)
            for link, seconds, busy in _on_links(chains.refresh):
                links[link].lead = _plus(links[link].lead, times, seconds)
                links[link].once += number * busy
            for link, seconds, busy in _on_links(chains.gather):
                links[link].lead = _plus(links[link].lead, times, seconds)
                links[link].gather += number * busy
                links[link].stays = max(links[link].stays, held * busy / (chains.ahead_bytes or 1.0))
            for link, seconds, busy in _on_links(chains.last):
                links[link].tail = _plus(links[link].tail, times, seconds)
                links[link].once += number * busy
            for link, _, busy in _on_links(chains.every):
                links[link].every += number * busy
        update = layout.base.compute.update(units.elements / layout.shards.os) + layout.matrix_seconds(0)
        staged = any(layout.states.staged(unit) for unit, _ in units.counts)
        return cls(links, update, staged)

    def step_seconds(self, base: BaseLayout, gathered: bool) -> float:
        """Return the estimated step time of a layout on this base.

        A part's first forward waits for its weights, and the step's end for its last gradients: only what is computed
        before, or after, can hide them. If backwards wait, each rank's comes after the next one's. Nothing is shorter
        than the messages on one link.
        """
        busy = {
            link: each.busy(base.micro_batches, base.virtual, gathered) for link, each in self.links.items()
        }
        local = busy.pop(LOCAL, 0.0)
        moving = [self.links[link] for link in busy]
        lead = _exposed([each.lead for each in moving], base.own_seconds[Kind.FORWARD], base.pp)
        backwards = base.own_seconds[Kind.BACKWARD]
        if self.staged and not base.split:
            tail = base.pp * max(0.0, *(each.tail[1] - sum(backwards) for each in moving), 0.0)
        else:
            tail = _exposed([each.tail for each in moving], backwards, base.pp)
        waits = lead + tail
        lost = waits + base.collectives.contention(busy.items(), local, waits)
        return self.update + max(base.pipeline_seconds + lost, *busy.values(), 0.0)


def _plus(sums: tuple[float, float], times: tuple[int, int], seconds: float) -> tuple[float, float]:
    return sums[0] + times[0] * seconds, sums[1] + times[1] * seconds


def _exposed(moved: Sequence[tuple[float, float]], own: Sequence[float], pp: int) -> float:
    """Return the seconds that nothing hides: of the first part's messages or of all, on some link.

    own: seconds of the parts; of those before the last, as many micro-batches are computed as there are ranks.
    """
    first, every = own[0], pp * sum(own[:-1]) + own[-1]
    return max(0.0, *(max(part - first, whole - every) for part, whole in moved), 0.0)


def _on_links(chain: Chain) -> Iterator[tuple[str, float, float]]:
    """Yield each link of a chain with its seconds there, latency included and without."""
    for link in dict.fromkeys(hop.link for hop in chain):
        hops = [hop for hop in chain if hop.link == link]
        yield link, sum(hop.seconds for hop in hops), sum(hop.seconds - hop.latency for hop in hops)


def least_memory(base: BaseLayout, shard: Shard | None = None) -> float:
    """Return a lower bound of the bytes of the fullest rank, for these shards or for all: its parameters without
    padding, in few bits where they may stay as they were received, and its activations."""
    kinds, make = base.partition.kinds, partial(_least_states, base, shard)
    least = max(
        activations + base.shared(("least", shard, kinds[rank]), partial(make, rank))
        for rank, activations in base.least_activations.items()
    )
    least *= 1 - ROUNDING
    return least if base.cluster.on_host else least * (1 + ALLOCATOR_MARGIN)


def _least_states(base: BaseLayout, shard: Shard | None, rank: int) -> float:
    """Return the least bytes of a rank's model state and gathered parameters."""
    config, width = base.config, base.compute.width
    sums = max(width, 4)
    anchors = States.anchors_of(OuterFormat.of(config.outer, sums))
    copy = 0.0 if width == sums else min(width, (config.zero.zero_weight_bits or 8) / 8)
    updated = sums * (1 + anchors) + config.optimizer.moment_bytes(sums, 1.0)  # of matrices, the least
    whole = config.zero.zero_gradients_lifetime == "step"
    states = gathered = 0.0
    for apart, elements in base.elements_of(rank):
        p, g, os = expert_shards(shard or (base.d, base.d, base.d), apart)
        kept = copy if p > 1 or not copy else width  # what one rank holds whole is decoded at once
        states += elements * (kept / p + sums / (1 if whole else g) + updated / os)
        gathered += elements * width * (shard is not None and apart < shard[0])
    return states + min(gathered, config.zero.zero_prefetch_bytes)
