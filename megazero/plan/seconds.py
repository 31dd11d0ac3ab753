"""How long a collective takes on a cluster: from a measured table, or from its links.

Bytes are those that one rank sends, as in communication.py. All ranks of a node take part at the same time, each in
its own group, so they share the node's link. Measured tables were measured in the same way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from megazero.config.options.cluster import Cluster
from megazero.mesh.grid import AxisSpec
from megazero.mesh.levels import INTER, INTRA

Groups = tuple[str, int, int]  # operation, ranks of a group, nodes that it lies on
Point = tuple[int, float, float]  # bytes, seconds, seconds of a processor


class Cost(NamedTuple):
    """The cost of a collective: seconds, and processor seconds of one rank (0 if not measured).

    latency: the part of the seconds in which bytes are on their way and the link is free for others.
    """

    seconds: float
    busy: float = 0.0
    latency: float = 0.0


class Spread(NamedTuple):
    """Where the groups of an axis lie, each figure of the group or part of a level (rack, site) with the most.

    parts: on how many a group lies. here: how many ranks of a group are on one part. rings: groups of one part that
    have ranks on others. rows: of an exchange, those that leave one part.
    """

    parts: int
    here: int
    rings: int
    rows: int

    @classmethod
    def of(cls, axis: AxisSpec, world_size: int, ranks: int) -> Spread:
        """Return that of an axis, on parts of so many consecutive ranks."""
        own = Counter((r - axis.index(r) * axis.stride, r // ranks) for r in range(world_size))
        parts, rings, rows = Counter(group for group, _ in own), Counter[int](), Counter[int]()
        for (group, part), here in own.items():
            rings[part] += parts[group] > 1
            rows[part] += here * (axis.size - here)
        return cls(*(max(found.values()) for found in (parts, own, rings, rows)))


class Collectives:
    """The seconds of collectives on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.known: dict[Any, Any] = {}  # what callers computed for this cluster, by all that it depends on
        table: defaultdict[Groups, dict[int, list[tuple[float, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for row in cluster.collectives:
            table[row.operation, row.ranks, row.nodes][row.bytes].append((row.seconds, row.busy))
        self._table: dict[Groups, list[Point]] = {
            groups: sorted((size, *sorted(times)[len(times) // 2]) for size, times in points.items())
            for groups, points in table.items()
        }
        inside, across = cluster.intra_node.gbytes_per_s * 1e9, self._rate_across()
        self._rates = {INTRA: inside, INTER: across, **dict.fromkeys(cluster.above, across)}
        self._spreads: dict[tuple[int, int], list[tuple[str, Spread]]] = {}  # by size and stride of an axis

    def of_axis(self, operation: str, axis: AxisSpec, sent: float) -> Cost:
        """Return the cost of a collective over a mesh axis; its groups lie in a node, or have a rank on each."""
        if self._spread(axis):
            return self._between(operation, axis, sent)
        return self.cost(operation, axis.size, 1 if axis.link == INTRA else axis.size, sent)

    def link_of(self, axis: AxisSpec) -> str:
        """Return the slowest link that the groups of an axis use: of some groups, if parts divide them unevenly."""
        near = INTRA if axis.link == INTRA else INTER
        return [near, *(link for link, _ in self._spread(axis))][-1]

    def _spread(self, axis: AxisSpec) -> list[tuple[str, Spread]]:
        """Return how groups lie on the parts of each level above the node on several of which they lie, by link."""
        key = axis.size, axis.stride
        if key not in self._spreads:
            parts = zip(self.cluster.above, self.cluster.levels[1:-1], strict=True)
            every = ((link, Spread.of(axis, self.cluster.world_size, part.size)) for link, part in parts)
            self._spreads[key] = [(link, spread) for link, spread in every if spread.parts > 1]
        return self._spreads[key]

    def _between(self, operation: str, axis: AxisSpec, sent: float) -> Cost:
        """Return the cost where groups lie on several racks, or sites, all groups of one at once.

        Of an exchange, each row for another site leaves its site; a ring's pieces leave it once for each group.
        """
        times, delay, around = [sent / self.rate(INTER)], 0.0, 1
        for link, (parts, _, rings, rows) in reversed(self._spread(axis)):
            leaving = sent * (rows / (axis.size - 1) if operation == "exchange" else rings)
            times.append(leaving / self.rate_of_part(link))
            delay += (-(-parts // around) - 1) * self.latency(link)
            around = parts
        here = self._spread(axis)[0][1].here
        delay += self.steps(here, min(here, 2))
        return Cost(delay + max(times), 0.0, delay)

    def message(self, link: str, sent: float, senders: int) -> Cost:
        """Return the cost of a message of ``sent`` bytes over a link, where so many ``senders`` of a rack, or of a
        site, send at once.

        Between nodes all ranks of a node send at once.
        """
        near = self.cost("message", 2, 1 if link == INTRA else 2, sent)
        if link in (INTRA, INTER):
            return near
        far = self.latency(link) + max(senders * sent / self.rate_of_part(link), sent / self.rate(INTER))
        return Cost(max(far, near.seconds), near.busy)

    def rate_of_part(self, link: str) -> float:
        """Return the bytes per second from a rack, or a site, to the others."""
        part = self.cluster.above[link]
        return part.gbits_per_s * part.efficiency * 1e9 / 8

    def cost(self, operation: str, ranks: int, nodes: int, sent: float) -> Cost:
        """Return the cost of a collective in which every rank of a group sends ``sent`` bytes."""
        if ranks < 2 or sent <= 0:
            return Cost(0.0)
        groups = (operation, ranks, nodes)
        if groups in self._table:
            return _interpolated(self._table[groups], sent)
        by_links = self.by_links(operation, ranks, nodes, sent)
        near = self._nearest(groups) if self._table else None
        if near is None:
            return Cost(by_links, latency=self.steps(ranks, nodes))
        wider = by_links / self.by_links(operation, near[1], near[2], sent)
        return Cost(*(value * wider for value in _interpolated(self._table[near], sent)))

    def _nearest(self, groups: Groups) -> Groups | None:
        """Return the measured groups of the same operation and kind of link whose number of ranks is nearest."""
        operation, ranks, nodes = groups
        like = [m for m in self._table if m[0] == operation and (m[2] > 1) == (nodes > 1)]
        return min(like, key=lambda m: (abs(m[1] - ranks), m[1]), default=None)

    def by_links(self, operation: str, ranks: int, nodes: int, sent: float) -> float:
        """Return the seconds from rates and latencies."""
        link = INTER if nodes > 1 else INTRA
        exchanges = operation == "exchange" and link == INTER
        share = self.cluster.inter_node.exchange_share if exchanges else 1.0
        return self.steps(ranks, nodes) + sent / (self.rate(link) * share)

    def steps(self, ranks: int, nodes: int) -> float:
        """Return the latency of a collective: a ring, or pairwise exchanges, take one step per other rank."""
        return (ranks - 1) * self.latency(INTER if nodes > 1 else INTRA)

    def latency(self, link: str) -> float:
        near = self.cluster.intra_node if link == INTRA else self.cluster.inter_node
        return self.cluster.above.get(link, near).latency_us / 1e6

    def rate(self, link: str) -> float:
        """Return the bytes per second of one rank while all ranks of its node send as much."""
        return self._rates[link]

    def contention(self, moving: Iterable[tuple[str, float]], working: float, waited: float) -> float:
        """Return the seconds that a device loses to messages, and to work on them, beside which it computes.

        A message costs the device what it would cost inside the node: bytes that a slow link lets through seldom take
        its memory and its processors seldom.

        moving: links with seconds in which messages occupy them. working: seconds of the rank's own work on messages.
        waited: those in which nothing is computed.
        """
        each = list(moving)
        total = working + sum(seconds for _, seconds in each)
        if self.cluster.on_host or not total:  # processors are shared out elsewhere
            return 0.0
        costs = sum(seconds * min(1.0, self.rate(link) / self.rate(INTRA)) for link, seconds in each)
        return max(0.0, 1 - waited / total) * (working + self.cluster.device.contention * costs)

    def _rate_across(self) -> float:
        across = self.cluster.inter_node
        share = across.gbits_per_s / self.cluster.ranks_per_node
        most = across.rank_gbits_per_s
        return (share if most is None else min(share, most)) * across.efficiency * 1e9 / 8


def _interpolated(points: list[Point], sent: float) -> Cost:
    """Return the cost of ``sent`` bytes: between two sizes linearly, below the smallest as that, above the largest
    at its rate."""
    at, latency = bisect_left(points, (sent, 0.0, 0.0)), _latency(points)
    low, seconds, busy = points[max(at - 1, 0)]
    if at == 0:
        return Cost(seconds, busy, latency)
    if at == len(points):
        return Cost(seconds * sent / low, busy * sent / low, latency)
    high, most, busiest = points[at]
    share = (sent - low) / (high - low)
    return Cost(seconds + (most - seconds) * share, busy + (busiest - busy) * share, latency)


def _latency(points: list[Point]) -> float:
    """Return the seconds of an empty message, by the two smallest sizes, without the processors' part."""
    (low, seconds, busy), *larger = points
    if not larger:
        return 0.0
    high, longer, _ = larger[0]
    return max(0.0, seconds - busy - low * max(0.0, longer - seconds) / (high - low))
