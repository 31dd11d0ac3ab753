"""Which rank the others wait for, and why: every rank's own seconds of a step, told with the next step's norm.

In synchronous training an iteration takes all ranks the same time. What differs is how much of it a rank works, and
how much it waits for others in collectives. The time bill tells these apart, without a wait of its own: on a CPU by
the host's clock, on CUDA by events that are read after the step's one wait for the device. So a step's figures are
whole when it is over, and travel in the next one's exchange. There are three kinds:

- compute: what is left of the iteration without data and all waits: for hops, stages, tensor-parallel peers, norm.
- data: the bill's item, in which nobody else is waited for.
- link: for how long the rank's TCP connections to other hosts were busy sending (ops/tcp.py), at most what it waits.
  All ranks wait for a slow link alike, but only the rank behind it is slow to all others. Of two nodes it cannot be
  known whose end is slow: neither is named. Nor is it seen on InfiniBand, and where a rank is slow to receive alone.

A rank is slower than its peers, the ranks of its pipeline stage, which have the same work, if it takes longer than
their median by more than SLOWER of the iteration; it is steadily so if it was that in STEADY of the last WINDOW.
A rank that is alone in its stage is compared with all ranks, but not in compute: theirs is other work.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import median_low
from typing import Any

import torch.distributed as dist

from megazero.mesh.mesh import Mesh
from megazero.ops.tcp import LinkMeter

KINDS = ("compute", "data", "link")
SLOWER = 0.1
WINDOW, STEADY = 20, 18
ADVICE = {
    "compute": "its device or cores are slower, or shared: look at clocks, temperature, other processes",
    "data": "it waits for its data: look at the disk or file system it reads from",
    "link": "what it sends to other hosts takes longer: look at its network interface, port and cable",
}

Row = Sequence[float]  # a rank's seconds by kind


class Stragglers:
    """Gathers this rank's seconds, and judges those of all.

    stages: the ranks of each pipeline stage. hosts: of every rank. judges: this is the rank that speaks, one of
    several. link: called once an iteration; for which part of the time this rank's links were busy.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[int]],
        hosts: Sequence[str],
        judges: bool,
        link: Callable[[], float] = lambda: 0.0,
    ) -> None:
        every = range(len(hosts))
        self.peers = [stage if len(stage) > 1 else every for stage in stages]
        self.alone = {stage[0] for stage in stages if len(stage) == 1}
        self.group = {rank: place for place, stage in enumerate(stages) for rank in stage}
        self.hosts, self.judges, self.link = hosts, judges and len(hosts) > 1, link
        self.own: Row = (0.0,) * len(KINDS)  # of the last iteration
        self.seconds = 0.0
        self.seen: deque[tuple[int, str] | None] = deque(maxlen=WINDOW)  # who was slowest, and in what
        self.said: tuple[int, str] | None = None

    @classmethod
    def of(cls, mesh: Mesh, host: str, stack: ExitStack) -> Stragglers:
        """For the ranks of this mesh. Collective.

        host: this rank's. stack: ends what measures links, if there are several hosts.
        """
        hosts: list[Any] = [host] * mesh.world_size
        if mesh.world_size > 1:
            dist.all_gather_object(hosts, host)
        stage = mesh.grid.axis("pp").index
        stages = [[rank for rank in range(mesh.world_size) if stage(rank) == s] for s in range(mesh.pp.size)]
        meter = LinkMeter()
        if len(set(hosts)) > 1:
            meter.start()
            stack.callback(meter.stop)
        return cls(stages, hosts, mesh.rank == 0, lambda: meter.share)

    def take(
        self, rows: Sequence[Row], bill: Mapping[str, float], seconds: float
    ) -> tuple[dict[str, Any], list[str]]:
        """Take what the ranks told in an iteration, and the bill of it. Returns metrics and warnings.

        rows: ``own`` of every rank, of the iteration before. The first rank alone judges them.
        """
        out = self._judge(rows) if self.judges and self.seconds else ({}, [])
        waited = sum(value for name, value in bill.items() if name.startswith("exposed_"))
        # What is hidden behind compute holds nobody up: links count for at most what was waited.
        self.own = (seconds - bill["data"] - waited, bill["data"], min(self.link() * seconds, waited))
        self.seconds = seconds
        return out

    def _judge(self, rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
        times = [compute + data for compute, data, _ in rows]
        slowest = max(range(len(rows)), key=times.__getitem__)
        metrics = {
            "least_s": min(times),
            "most_s": times[slowest],
            "slowest_rank": slowest,
            "slowest_host": self.hosts[slowest],
        }
        usual = [
            [median_low(rows[r][place] for r in peers) for place in range(len(KINDS))] for peers in self.peers
        ]
        self.seen.append(self._slowest(rows, usual))
        return {"rank_times": metrics}, [*self._warnings(rows, usual)]

    def _slowest(self, rows: Sequence[Row], usual: Sequence[Row]) -> tuple[int, str] | None:
        """Who takes longer than its peers, and in what; of several the one that costs most, None if it is little."""
        beyond = {
            (rank, kind): row[place] - usual[self.group[rank]][place]
            for rank, row in enumerate(rows)
            for place, kind in enumerate(KINDS)
            if kind != "compute" or rank not in self.alone
        }
        found = max(beyond, key=beyond.__getitem__)
        return found if beyond[found] > SLOWER * self.seconds else None

    def _warnings(self, rows: Sequence[Row], usual: Sequence[Row]) -> Iterator[str]:
        """Say once that a rank is steadily slower, and once that it is so no more."""
        ((found, count),) = Counter(self.seen).most_common(1)
        if found is not None and count >= STEADY and found != self.said:
            self.said = found
            rank, kind = found
            own, theirs = (row[KINDS.index(kind)] for row in (rows[rank], usual[self.group[rank]]))
            yield (
                f"rank {rank} on {self.hosts[rank]} is slower than its peers, in {count} of the last "
                f"{len(self.seen)} iterations: {kind} takes it {own:.3g} s of {self.seconds:.3g} s, "
                f"them {theirs:.3g} s (median), and all wait for it; {ADVICE[kind]}"
            )
        elif self.said is not None and self.said not in self.seen:
            yield f"rank {self.said[0]} on {self.hosts[self.said[0]]} is as fast as its peers again"
            self.said = None
