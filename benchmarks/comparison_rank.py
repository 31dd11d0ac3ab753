"""One rank of comparison.py: contestants take turns at one number of micro-batches; time, bytes and loss. Started in
every node of a lab."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contestants import Shape, decoder
from benchmarks.peers import EVERY, Running
from benchmarks.volume import Case
from megazero.mesh.grid import INTER
from tests.netlab.lab import interface_bytes


def measure(step: Callable[[], Any], steps: int) -> tuple[float, int]:
    """Seconds per step, and bytes per step that this node's interface sent.

    Two barriers before: a rank that is quick to leave the first would send before its neighbour has read the
    interface.
    """
    dist.barrier()
    sent = interface_bytes()[0]
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - began) / steps, (interface_bytes()[0] - sent) // steps


@dataclass
class Record:
    """Of one contestant. seconds: per step, one per turn. sent, counted: bytes per step, per turn and node, of the
    interface and of the engine's counters (0 for peers). losses: of every step, of this rank."""

    running: Running
    steps: int = 1  # of a turn
    seconds: list[float] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)
    counted: list[list[int]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)

    def turn(self, ranks_per_node: int) -> None:
        traffic = self.running.traffic
        before = traffic.total(INTER) if traffic else 0
        seconds, sent = measure(lambda: self.losses.append(self.running.step()), self.steps)
        counted = (traffic.total(INTER) - before) // self.steps if traffic else 0
        rows = torch.zeros(dist.get_world_size(), 2, dtype=torch.int64)
        rows[dist.get_rank()] = torch.tensor([sent, counted])
        dist.all_reduce(rows)
        nodes = rows.view(-1, ranks_per_node, 2)
        self.seconds.append(seconds)
        self.sent.append(nodes[:, 0, 0].tolist())
        self.counted.append(nodes[:, :, 1].sum(1).tolist())

    def forget(self) -> None:
        """Turns so far were warm-ups."""
        for each in (self.seconds, self.sent, self.counted):
            each.clear()


def settle(records: list[Record], options: argparse.Namespace, ranks_per_node: int) -> int:
    """Warm up; choose steps per turn, and return the rounds, from rank 0's times.

    The first step after building has start-up costs; the second tells how long steps take.
    """
    for _ in range(2):
        for record in records:
            record.turn(ranks_per_node)
    took = torch.tensor([record.seconds[-1] for record in records])
    dist.broadcast(took, 0)
    for record, each in zip(records, took.tolist(), strict=True):
        record.steps = max(1, round(options.turn_seconds / each))
        record.forget()
    turns = sum(r.steps * each for r, each in zip(records, took.tolist(), strict=True))
    return max(options.rounds, min(options.most_rounds, round(options.seconds / turns)))


def losses(records: dict[str, Record]) -> tuple[int, dict[str, float]]:
    """The last step that all have taken, and everyone's loss per token in it, averaged over ranks."""
    step = min(len(r.losses) for r in records.values())
    row = torch.stack([r.losses[step - 1] for r in records.values()])
    dist.all_reduce(row)
    return step, dict(zip(records, (row / dist.get_world_size()).tolist(), strict=True))


def compare(options: argparse.Namespace, ranks_per_node: int) -> dict[str, Any]:
    shape = Shape(sequence=128, micro_batch=1, micro_batches=options.micro_batches, dtype=torch.bfloat16)
    records = {name: Record(EVERY[name].build(shape, ranks_per_node)) for name in options.contestants}
    order = list(records.values())
    rounds = settle(order, options, ranks_per_node)
    for turn in range(rounds):
        first = turn % len(order)  # nobody is always next after the same one
        for record in (*order[first:], *order[:first]):
            record.turn(ranks_per_node)
    step, loss = losses(records)
    case = case_of(shape, dist.get_world_size() // ranks_per_node, ranks_per_node)
    facts = {"elements": case.elements, "loss_step": step, "loss": loss}
    facts["formula"] = {name: EVERY[name].sent(case) for name in records}
    for what in ("steps", "seconds", "sent", "counted"):
        facts[what] = {name: getattr(record, what) for name, record in records.items()}
    return facts


def case_of(shape: Shape, nodes: int, ranks_per_node: int) -> Case:
    sizes = [
        sum(p.numel() for module in unit for p in module.parameters())
        for unit in decoder(shape, "meta").units()
    ]
    return Case(sum(sizes), sizes[0], sizes[-1], shape.micro_batches, nodes, ranks_per_node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--most-rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--turn-seconds", type=float, required=True)
    parser.add_argument("--contestants", nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = compare(options, int(os.environ["LOCAL_WORLD_SIZE"]))
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
