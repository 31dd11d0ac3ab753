"""One rank of comparison.py: contestants take turns; time and bytes of each turn. Started in every node of a lab."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megazero.models import Decoder
from tests.benchmarks.contestants import Shape, Step, decoder
from tests.benchmarks.peers import CONTESTANTS
from tests.netlab.lab import interface_bytes


def measure(step: Step, steps: int) -> tuple[float, int]:
    """Seconds per step, and bytes per step that this node's interface sent, between two barriers."""
    dist.barrier()
    sent, began = interface_bytes()[0], time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - began) / steps, (interface_bytes()[0] - sent) // steps


def loss_of(step: Step) -> float:
    """One more step; its loss per token, averaged over micro-batches and ranks."""
    losses: list[torch.Tensor] = []

    def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, Decoder):
            losses.append(output.detach().float().mean())

    handle = torch.nn.modules.module.register_module_forward_hook(note)  # reaches into every peer's wrapper
    step()
    handle.remove()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def compare(options: argparse.Namespace, micro_batches: int, ranks_per_node: int) -> dict[str, Any]:
    """Per contestant the turns' seconds per step and, per turn and node, the bytes sent per step; the loss."""
    shape = Shape(sequence=128, micro_batch=1, micro_batches=micro_batches, dtype=torch.bfloat16)
    names = options.contestants
    steps = {name: CONTESTANTS[name](shape, ranks_per_node) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[list[int]]] = {name: [] for name in names}
    for turn in range(options.rounds + 1):
        first = turn % len(names)  # nobody is always next after the same one
        for name in (*names[first:], *names[:first]):
            took, count = measure(steps[name], options.steps if turn else 1)
            counts = torch.zeros(dist.get_world_size(), dtype=torch.int64)
            counts[dist.get_rank()] = count
            dist.all_reduce(counts)
            if turn:  # the first warms up
                seconds[name].append(took)
                sent[name].append(counts[::ranks_per_node].tolist())
    losses = {name: loss_of(steps[name]) for name in names}
    elements = sum(p.numel() for p in decoder(shape, "meta").parameters())
    facts = {"micro_batches": micro_batches, "elements": elements}
    return {**facts, "seconds": seconds, "sent": sent, "loss": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--micro-batches", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--contestants", nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    results = [compare(options, m, ranks_per_node) for m in options.micro_batches]
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
