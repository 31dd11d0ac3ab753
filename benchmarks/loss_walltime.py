"""Seconds per step of loss.py's variants on two nodes joined by a link of a given rate.

``measure`` starts this file as the program of every rank in a lab (tests/netlab); the variants take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.comparison_rank import measure as measure_turn
from benchmarks.loss_data import train_samples
from benchmarks.loss_run import NODE, RANKS, Settings, one_step, shard
from benchmarks.loss_variants import VARIANTS
from megazero.data.sampler import Batches
from tests.netlab.lab import Lab

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, STEPS = 5, 5  # turns that count, steps of a turn


def measure(folder: Path, settings: Settings, names: list[str], rate: str) -> dict[str, Any]:
    """'rate', and by variant 'seconds' per step of each turn. Raises LabUnavailable, RuntimeError if a rank fails."""
    with Lab(RANKS // NODE, rate) as lab, tempfile.TemporaryDirectory() as out:
        file = Path(out) / "result.json"
        words = ["--folder", str(folder.resolve()), "--settings", json.dumps(asdict(settings))]
        command = [str(Path(__file__).resolve()), "--result", str(file), *words, "--variants", *names]
        done = lab.run(command, ranks_per_node=NODE, environ={"PYTHONPATH": str(ROOT)})
        if done.returncode:
            raise RuntimeError(f"at {rate}: return codes {done.returncodes}\n" + "\n".join(done.outputs))
        return {"rate": rate, "seconds": json.loads(file.read_text())}


def take_turns(folder: Path, settings: Settings, names: list[str]) -> dict[str, list[float]]:
    """Every variant trains with the first samples of seed 1; seconds per step of each turn after the first."""
    count = RANKS * settings.micro_batch * ((ROUNDS + 1) * STEPS + 1)
    data = train_samples(folder, settings.sequence, 1, count)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        contestants = {}
        for name in names:
            model, engine = shard(settings, VARIANTS[name], seed=1)
            mine = Batches(
                data, micro_batch_size=settings.micro_batch, rank=engine.mesh.dp_rank, size=RANKS, limit=count
            )
            contestants[name] = partial(one_step, settings, model, engine, stack.enter_context(mine), 1)
        for turn in range(ROUNDS + 1):
            first = turn % len(names)  # nobody is always next after the same one
            for name in (*names[first:], *names[:first]):
                took, _ = measure_turn(contestants[name], STEPS)
                if turn:  # the first warms up
                    seconds[name].append(took)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--variants", nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.get_world_size() == RANKS and int(os.environ["LOCAL_WORLD_SIZE"]) == NODE
    seconds = take_turns(options.folder, Settings(**options.settings), options.variants)
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
