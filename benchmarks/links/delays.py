"""The cost of a link's delay: how the lab's links perform, and how many messages of a step wait.

    python -m benchmarks.links.delays [--rates 1gbit 1gbit+20ms 1gbit+100ms] [--interfaces 1 4]

First table, for each link: the time of one small exchange between two ranks, of 2, 4 and 8 that are started at once
on one communicator, the rate of large ones (the second of two: windows have opened), and what delay.py took of a
processor meanwhile. --interfaces: how often GLOO_SOCKET_IFNAME names the interface; gloo has two threads and one
connection for each. Second table: the messages across nodes that a rank sends in a step of comparison.py's model, by
lane, and the least seconds that their delays take, if each is a round trip and two of a lane are on their way at a
time. comparison.py has the seconds of whole steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.links.comparison import shape_of
from benchmarks.links.contestants import CONTESTANTS
from megazero.comm.hops import Traffic, start_exchange
from megazero.mesh.grid import INTER
from megazero.mesh.mesh import create_mesh
from tests.netlab.lab import INTERFACE, Lab, parse_link

AT_ONCE = (1, 2, 4, 8)
SMALL, LARGE = 256, 32 << 20  # bytes
LANES = {"gather": ("refresh", "gather"), "reduce": ("reduce",)}
THREADS = 2  # of gloo, for a communicator: so many messages of a lane are on their way at a time


def exchanges(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of so many small exchanges at once, and of a large one."""
    (axis,) = create_mesh(shards=(2, 2, 2), ranks_per_node=1).data_axes

    def exchange(number: int, size: int) -> float:
        rows = [
            (torch.empty(1, size, dtype=torch.uint8), torch.ones(1, size, dtype=torch.uint8))
            for _ in range(number)
        ]
        dist.barrier()
        began = time.perf_counter()
        for work in [start_exchange(axis, out, own, Traffic()) for out, own in rows]:
            work.wait()
        return time.perf_counter() - began

    found = {str(number): [exchange(number, SMALL) for _ in range(rounds + 1)][1:] for number in AT_ONCE}
    return found | {"large": [exchange(1, LARGE) for _ in range(2)][1:]}


def delayers(lab: Lab) -> float:
    """Return the processor seconds of the processes that hold packets."""
    pids = [node.delayer.pid for node in lab.members[1:] if node.delayer is not None]
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(words[11]) + int(words[12]) for words in fields) / os.sysconf("SC_CLK_TCK")


def link_row(lab: Lab, interfaces: int, rounds: int) -> list[str]:
    environ = {"GLOO_SOCKET_IFNAME": ",".join([INTERFACE] * interfaces)}
    before, began = delayers(lab), time.monotonic()
    found = harness.run(exchanges, rounds, ranks=1, lab=lab, environ=environ)
    share = (delayers(lab) - before) / (time.monotonic() - began)
    times = [f"{min(found[str(number)]) * 1e3:.1f}" for number in AT_ONCE]
    return [
        str(lab.rate),
        str(interfaces),
        *times,
        f"{8 * LARGE / min(found['large']) / 1e6:.0f}",
        f"{share:.1%}",
    ]


def messages(names: list[str], micro_batches: int) -> dict[str, dict[str, int]]:
    """Return by contestant and kind of hop the messages that this rank sends across nodes in its second step."""
    shape, found = shape_of(micro_batches), {}
    for name in names:
        running = CONTESTANTS[name].build(shape, harness.ranks_per_node() // 2)  # two nodes, here on one
        assert running.traffic is not None
        running.step()
        running.traffic.take()
        running.step()
        found[name] = {kind: n for (kind, link), n in running.traffic.messages.items() if link == INTER}
    return found


def message_rows(counts: Mapping[str, Mapping[str, int]], delays: list[float]) -> list[list[str]]:
    rows = []
    for name, kinds in counts.items():
        lanes = [sum(kinds.get(kind, 0) for kind in lane) for lane in LANES.values()]
        rounds = sum(-(-n // THREADS) for n in lanes) + kinds.get("scalar", 0)
        seconds = [f"{rounds * 2 * delay / 1e3:.2f}" for delay in delays]
        rows.append(
            [name, *(str(kinds.get(kind, 0)) for kind in ("refresh", "gather", "reduce", "scalar")), *seconds]
        )
    return rows


def main() -> None:
    options = harness.parser(
        __doc__,
        rates=["1gbit", "1gbit+20ms", "1gbit+100ms"],
        interfaces=[1, 4],
        micro_batches=[1, 4],
        rounds=(3, "of each number of small exchanges"),
    ).parse_args()
    rows = [
        link_row(lab, interfaces, options.rounds)
        for lab in harness.labs_at(options.rates)
        for interfaces in options.interfaces
    ]
    head = ["link", "interfaces", *(f"{number} at once, ms" for number in AT_ONCE), "Mb/s", "delay.py"]
    print(f"{harness.setting()}\n\n{harness.table(head, rows)}")
    names = [name for name, each in CONTESTANTS.items() if name.startswith("megazero") and each.interval == 1]
    delays = sorted({parse_link(rate).delay_ms for rate in options.rates} - {0.0})
    head = ["", "refresh", "gather", "reduce", "scalar", *(f"least s at {delay:g} ms" for delay in delays)]
    for micro_batches in options.micro_batches:
        counts = harness.run(messages, names, micro_batches, ranks=4)
        print(f"\n{micro_batches} micro-batch(es)\n\n{harness.table(head, message_rows(counts, delays))}")


if __name__ == "__main__":
    harness.start(main)
