"""Stragglers: which rank the others wait for, and why, from every rank's own seconds of a step.

In synchronous training an iteration takes all ranks the same time. Ranks differ in how much of it they work and how
much they wait for others in collectives. The time bill separates the two without a wait of its own: on a CPU by the
host's clock, on CUDA by events that are read after the step's one wait for the device. A step's figures are complete
when it is over, so they travel with the norm of the next step. There are two kinds:

- compute: the iteration without data and without waits (for hops, stages, tensor-parallel peers, the norm).
- data: the bill's item. It includes no wait for other ranks.

All ranks wait alike for a slow link, so none is named: `megazero calibrate` measures links.

A rank's peers are the ranks of its pipeline stage, which have the same work. It is slower than they are if it takes
longer than their median by more than SLOWER of the iteration, and steadily so if that holds in STEADY of the last
WINDOW iterations. A rank alone in its stage is compared with all ranks, but not in compute: their work differs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any, NamedTuple

from megazero.mesh.mesh import Mesh
from megazero.mesh.objects import gather_objects

SLOWER = 0.1
WINDOW, STEADY = 20, 18
ADVICE = {
    "compute": "its device or cores are slower, or shared: look at clocks, temperature, other processes",
    "data": "it waits for its data: look at the disk or file system it reads from",
}


class RankSeconds(NamedTuple):
    """A rank's seconds of one iteration, by kind."""

    compute: float = 0.0
    data: float = 0.0


class Stragglers:
    """Measures this rank's seconds, and compares those of all ranks.

    stages: the ranks of each pipeline stage. hosts: of every rank. judges: whether this rank compares; one rank
    does.
    """

    def __init__(self, stages: Sequence[Sequence[int]], hosts: Sequence[str], judges: bool) -> None:
        every = range(len(hosts))
        self.peers = [stage if len(stage) > 1 else every for stage in stages]
        self.alone = {stage[0] for stage in stages if len(stage) == 1}
        self.group = {rank: place for place, stage in enumerate(stages) for rank in stage}
        self.hosts, self.judges = hosts, judges and len(hosts) > 1
        self.own = RankSeconds()  # of the last iteration
        self.seconds = 0.0
        self.seen: deque[tuple[int, str] | None] = deque(maxlen=WINDOW)  # the slowest rank, and its kind
        self.named: tuple[int, str] | None = None  # in the last warning

    @classmethod
    def of(cls, mesh: Mesh, host: str) -> Stragglers:
        """Make one for the ranks of this mesh. Collective. host: this rank's."""
        hosts = gather_objects(host)
        stage = mesh.grid.axis("pp").index
        stages = [[rank for rank in range(mesh.world_size) if stage(rank) == s] for s in range(mesh.pp.size)]
        return cls(stages, hosts, mesh.rank == 0)

    def take(
        self, rows: Sequence[RankSeconds], bill: Mapping[str, float], seconds: float
    ) -> tuple[dict[str, Any], list[str]]:
        """Take what the ranks exchanged in an iteration, and its bill. Returns metrics and warnings.

        rows: ``own`` of every rank, of the iteration before.
        """
        out = self._judge(rows) if self.judges and self.seconds else ({}, [])
        waited = sum(value for name, value in bill.items() if name.startswith("exposed_"))
        self.own = RankSeconds(seconds - bill["data"] - waited, bill["data"])
        self.seconds = seconds
        return out

    def _judge(self, rows: Sequence[RankSeconds]) -> tuple[dict[str, Any], list[str]]:
        times = [row.compute + row.data for row in rows]
        slowest = max(range(len(rows)), key=times.__getitem__)
        metrics = {
            "least_s": min(times),
            "most_s": times[slowest],
            "slowest_rank": slowest,
            "slowest_host": self.hosts[slowest],
        }
        usual = [
            RankSeconds(*map(median_low, zip(*(rows[r] for r in peers), strict=True))) for peers in self.peers
        ]
        self.seen.append(self._slowest(rows, usual))
        return {"rank_times": metrics}, [*self._warnings(rows, usual)]

    def _slowest(self, rows: Sequence[RankSeconds], usual: Sequence[RankSeconds]) -> tuple[int, str] | None:
        """Return the rank that takes most beyond its peers, and in which kind; None if that is little."""
        beyond = {
            (rank, kind): getattr(row, kind) - getattr(usual[self.group[rank]], kind)
            for rank, row in enumerate(rows)
            for kind in RankSeconds._fields
            if kind != "compute" or rank not in self.alone
        }
        found = max(beyond, key=beyond.__getitem__)
        return found if beyond[found] > SLOWER * self.seconds else None

    def _warnings(self, rows: Sequence[RankSeconds], usual: Sequence[RankSeconds]) -> Iterator[str]:
        """Yield one warning when a rank is steadily slower, and one when it no longer is."""
        ((found, count),) = Counter(self.seen).most_common(1)
        if found is not None and count >= STEADY and found != self.named:
            self.named = found
            rank, kind = found
            own, theirs = (getattr(row, kind) for row in (rows[rank], usual[self.group[rank]]))
            yield (
                f"rank {rank} on {self.hosts[rank]} is slower than its peers, in {count} of the last "
                f"{len(self.seen)} iterations: {kind} takes it {own:.3g} s of {self.seconds:.3g} s, "
                f"them {theirs:.3g} s (median), and all wait for it; {ADVICE[kind]}"
            )
        elif self.named is not None and self.named not in self.seen:
            yield f"rank {self.named[0]} on {self.hosts[self.named[0]]} is as fast as its peers again"
            self.named = None
