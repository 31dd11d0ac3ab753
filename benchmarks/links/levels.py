"""zeropp of three levels, of two, FSDP2 and HSDP on two racks of two nodes.

    python -m benchmarks.links.levels [--rate 1gbit] [--uplink 100mbit] [--micro-batches 1] [--only "HSDP" "FSDP2"]

A node's link has --rate, a rack's link to the other one --uplink; inside a node nothing is shaped. Contestants train
the model of comparison.py and take turns. Bytes between racks are what the kernel counts at a rack's link: the
difference of two runs of each contestant alone. Beside them stand the engine's own counters, by class of link.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.links.comparison import shape_of
from benchmarks.links.contestants import Contestant, configured, fsdp2
from tests.netlab.lab import Lab

NODES, RACKS, RANKS = 4, 2, 2
SHORT, LONG = 1, 3  # steps of the runs whose difference counts
CONTESTANTS: dict[str, Contestant] = {
    "zeropp, three levels": configured(level_sizes=(NODES // RACKS,)),
    "zeropp, two levels": configured(),
    "FSDP2": fsdp2(),
    "HSDP": fsdp2(hybrid=True),
}


def compare(names: list[str], micro_batches: int, rounds: int) -> dict[str, Any]:
    """Let the contestants take turns. Return their seconds, and the bytes by link that the ranks of the node that
    sends most count in a step."""
    shape, ranks = shape_of(micro_batches), harness.ranks_per_node()
    running = {name: CONTESTANTS[name].build(shape, ranks) for name in names}
    taken: dict[str, list[harness.Taken]] = {name: [] for name in running}
    turns = {
        name: lambda name=name, each=each: harness.measure(lambda: taken[name].append(each.step()))[0]  # type: ignore[misc]
        for name, each in running.items()
    }
    seconds = harness.take_turns(turns, rounds, warm_up=2)
    harness.require_training({name: harness.learned(each) for name, each in taken.items()})
    counted = {}
    for name, each in running.items():
        if each.traffic is None:
            continue
        each.traffic.take()
        each.step()
        every: list[Any] = [None] * dist.get_world_size()
        sent = each.traffic.take()
        dist.all_gather_object(every, {link: sent[f"{link}_bytes"] for link in each.traffic.links})
        nodes = [
            sum(map(Counter, every[at : at + ranks]), Counter[str]()) for at in range(0, len(every), ranks)
        ]
        counted[name] = max(nodes, key=lambda sent: list(sent.values()))
    return {"seconds": seconds, "counted": counted}


def alone(name: str, micro_batches: int, steps: int) -> int:
    """Let one contestant take so many steps."""
    running = CONTESTANTS[name].build(shape_of(micro_batches), harness.ranks_per_node())
    for _ in range(steps):
        running.step()
    return steps


def between_racks(lab: Lab, name: str, micro_batches: int) -> int:
    """Return the bytes that the rack that sends most sends in a step."""
    sent = []
    for steps in (SHORT, LONG):
        before = lab.uplink_bytes()
        harness.run(alone, name, micro_batches, steps, lab=lab, ranks=RANKS)
        sent.append([now - then for now, then in zip(lab.uplink_bytes(), before, strict=True)])
    return max(more - less for less, more in zip(*sent, strict=True)) // (LONG - SHORT)


def rows(found: dict[str, Any], racks: dict[str, int]) -> list[list[str]]:
    """Return a row for each contestant."""
    first = next(iter(racks))
    own, made = found["seconds"][first], []
    for name, seconds in found["seconds"].items():
        counted = {link: sent / 1e6 for link, sent in found["counted"].get(name, {}).items()}
        links = ", ".join(f"{link} {sent:.2f}" for link, sent in counted.items())
        ratio = harness.of_medians(seconds, own) if name != first else ""
        made.append([name, harness.spread(seconds, 2), ratio, f"{racks[name] / 1e6:.2f}", links])
    return made


def main() -> None:
    options = harness.parser(
        __doc__,
        rate="1gbit",
        uplink="100mbit",
        micro_batches=1,
        rounds=(5, "turns that count"),
        only=(list(CONTESTANTS), "contestants"),
    ).parse_args()
    with Lab(NODES, options.rate, RACKS, options.uplink) as lab:
        found = harness.run(
            compare, options.only, options.micro_batches, options.rounds, lab=lab, ranks=RANKS
        )
        racks = {name: between_racks(lab, name, options.micro_batches) for name in options.only}
    header = [
        "",
        "s a step",
        "times the first",
        "MB a rack sends to the other",
        "MB a node's ranks count",
    ]
    print(f"{harness.setting()}\n\n{harness.table(header, rows(found, racks))}")


if __name__ == "__main__":
    torch.manual_seed(1)
    harness.start(main)
