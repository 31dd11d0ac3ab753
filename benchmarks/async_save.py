"""What --async-save costs: the sum of what steps take beyond a normal one, against the seconds of a save at once.

    python -m benchmarks.async_save                  # 2 ranks, 560 MB of state, 5 rounds
    python -m benchmarks.async_save --ranks 1

A round is a save at once, a save behind the training with the steps up to its end, and as many steps without a save.
The excess is the time of the copy to host memory, and of the steps with a save, less that of the steps without. The
ranks are those of the trainer, on this machine's cores. The first save of each kind, which also makes the buffer and
the pages of the files, is printed as round 0 and not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from megazero.checkpoint import store
from megazero.config import World, make_config
from megazero.mesh.launch import Launch
from megazero.train import setup
from megazero.train.trainer import Trainer

MODEL = {
    "model_family": "llama",
    "num_layers": 4,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_query_groups": 12,
    "ffn_hidden_size": 2048,
    "vocab_size": 12000,
    "seq_length": 64,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "mock_data": True,
    "eval_iters": 0,
    "lr": 1e-4,
    "train_iters": 100_000,
    "save_interval": 50_000,
    "async_save": True,
    "device": "auto",
}


@dataclass(frozen=True)
class Round:
    """Seconds. at_once: of a save. copy: to host memory. steps: up to the save's end. plain: as many without."""

    at_once: float
    copy: float
    steps: tuple[float, ...]
    plain: tuple[float, ...]

    @property
    def excess(self) -> float:
        return self.copy + sum(self.steps) - sum(self.plain)

    @property
    def ratio(self) -> float:
        return self.excess / self.at_once

    def __str__(self) -> str:
        return (
            f"step {min(self.plain):.3f} to {max(self.plain):.3f} s; save at once {self.at_once:.3f} s; behind: copy "
            f"{self.copy:.3f} s, {len(self.steps)} steps, excess {self.excess:.3f} s: {self.ratio:.0%}"
        )


def timed(call: Any) -> float:
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def one_round(trainer: Trainer, batches: Any) -> Round:
    step = partial(trainer._iterate, batches)
    checkpointing, saver = trainer.checkpointing, trainer.saver
    at_once = timed(lambda: checkpointing.save(trainer.progress))
    timed(step)
    copy, behind = timed(lambda: saver.save(trainer.progress)), []
    while saver.under_way:
        behind.append(timed(step))
    return Round(at_once, copy, tuple(behind), tuple(timed(step) for _ in behind))


def measure(folder: str, preset: str, rounds: int) -> tuple[list[Any], int]:
    """On every rank: the rounds, and the bytes of a checkpoint."""
    world = dist.get_world_size()
    launch = Launch(dist.get_rank(), world, local_world_size=world)
    folders = {"save": f"{folder}/save", "log_dir": f"{folder}/logs"}
    config = make_config({**MODEL, "zero_preset": preset, **folders}, World(world, world))
    with ExitStack() as stack:
        trainer = setup.prepare(config, launch, stack, time.monotonic())
        with trainer.feeding.batches(trainer.data.train, consumed=0) as batches:
            taken = [asdict(one_round(trainer, batches)) for _ in range(rounds + 1)]
    path = store.latest(f"{folder}/save")
    assert path is not None
    return taken, sum(entry.size for entry in store.verify(path).files.values())


def main() -> None:
    parser = harness.parser(__doc__, ranks=2, rounds=5, preset="zero1")
    parser.add_argument("--folder", help="where to save (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        asked = (folder, options.preset, options.rounds)
        taken, size = harness.run(measure, *asked, ranks=options.ranks, timeout=590)
    rounds = [Round(**each) for each in taken]
    print(f"{options.ranks} ranks, {options.preset}, a checkpoint of {size / 1e6:.0f} MB")
    for number, each in enumerate(rounds):
        print(f"round {number}: {each}")
    ratios = [each.ratio for each in rounds[1:]]
    print(json.dumps({"ratio": median(ratios), "range": [min(ratios), max(ratios)]}))


if __name__ == "__main__":
    harness.start(main)
