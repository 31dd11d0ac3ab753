"""The cost of --async-save: the time that steps take beyond normal ones, over the seconds of a synchronous save.

    python -m benchmarks.features.async_save           # 2 ranks, 560 MB of state, 5 rounds
    python -m benchmarks.features.async_save --ranks 1
    python -m benchmarks.features.async_save --dcp     # in turns with torch's dcp.async_save, by thread and process

A round is a synchronous save, an asynchronous one with the steps up to its end, and as many steps without a save. The
excess is the time of the copy to host memory and of the steps with a save, less that of the steps without. The ranks
are the trainer's, on this machine's cores. The first save of each kind, which also allocates the buffer and the
files' pages, is printed as round 0 and not counted.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks import harness
from megazero.checkpoint import store
from megazero.checkpoint.planners import SliceSavePlanner
from megazero.checkpoint.records import SliceRecord
from megazero.config import World, make_config
from megazero.mesh.launch import Launch
from megazero.train import setup
from megazero.train.trainer import Trainer
from megazero.zero.records import save_records

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


class StagedPlanner(SliceSavePlanner):
    """Plans what torch's copy of the state holds: the records' own tensors may change, and are not to be pickled."""

    def __init__(self, records: Sequence[SliceRecord]) -> None:
        super().__init__([replace(record, tensors={}) for record in records])

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        copies = [state_dict[str(i)] for i in range(len(self.records))]
        self.records = [
            replace(record, tensors=kinds) for record, kinds in zip(self.records, copies, strict=True)
        ]


class Dcp:
    """Saves by torch's dcp.async_save. kind: "thread" or "process". The host copy is kept from save to save."""

    def __init__(self, kind: str, folder: str) -> None:
        self.kind, self.path = AsyncCheckpointerType(kind), Path(folder) / kind
        self.stager = DefaultStager(StagingOptions(False, kind == "process", False, False))
        self.group = dist.new_group(backend="gloo")
        self.future: Any = None

    def save(self, trainer: Trainer) -> None:
        records = save_records(trainer.engine, trainer.checkpointing.placements)
        self.future = dcp.async_save(
            {str(i): dict(record.tensors) for i, record in enumerate(records)},
            storage_writer=dcp.FileSystemWriter(self.path, single_file_per_rank=True, sync_files=True),
            planner=StagedPlanner(records),
            process_group=self.group,
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )

    def under_way(self) -> bool:
        """Return whether any rank still writes. At the end remove the checkpoint, untimed."""
        done = torch.tensor(int(self.future.done()))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if not done:
            return True
        self.future.result()
        if dist.get_rank() == 0:
            shutil.rmtree(self.path)
        return False


def one_round(trainer: Trainer, batches: Any, others: Sequence[Dcp]) -> dict[str, Round]:
    """Return the round of every way to save, by name."""
    step, own = partial(trainer._iterate, batches), trainer.saver
    ways: dict[str, tuple[Callable[[], object], Callable[[], bool]]] = {
        "own": (lambda: own.save(trainer.progress), lambda: own.under_way)
    }
    ways |= {way.kind.value: (partial(way.save, trainer), way.under_way) for way in others}
    at_once = timed(lambda: trainer.checkpointing.save(trainer.progress))
    rounds = {}
    for name, (save, under_way) in ways.items():
        timed(step)
        copy, behind = timed(save), []
        while under_way():
            behind.append(timed(step))
        rounds[name] = Round(at_once, copy, tuple(behind), tuple(timed(step) for _ in behind))
    return rounds


def measure(folder: str, preset: str, rounds: int, with_dcp: bool) -> tuple[list[Any], int]:
    """Measure on every rank; return the rounds, and the bytes of a checkpoint."""
    world = dist.get_world_size()
    launch = Launch(dist.get_rank(), world, local_world_size=world)
    folders = {"save": f"{folder}/save", "log_dir": f"{folder}/logs"}
    config = make_config({**MODEL, "zero_preset": preset, **folders}, World(world, world))
    if with_dcp:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it starts one
    others = [Dcp(kind, folder) for kind in ("thread", "process") if with_dcp]
    with ExitStack() as stack:
        trainer = setup.prepare(config, launch, stack)
        with trainer.feeding.batches(trainer.data.train, consumed=0) as batches:
            taken = [
                {name: asdict(each) for name, each in one_round(trainer, batches, others).items()}
                for _ in range(rounds + 1)
            ]
    path = store.latest(f"{folder}/save")
    assert path is not None
    return taken, sum(entry.size for entry in store.verify(path).files.values())


def main() -> None:
    parser = harness.parser(
        __doc__, ranks=2, rounds=5, preset="zero1", dcp=(False, "measure torch's dcp.async_save, too")
    )
    parser.add_argument("--folder", help="where to save (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        asked = (folder, options.preset, options.rounds, options.dcp)
        taken, size = harness.run(measure, *asked, ranks=options.ranks, timeout=590)
    print(f"{options.ranks} ranks, {options.preset}, a checkpoint of {size / 1e6:.0f} MB")
    for name in taken[0]:
        rounds = [Round(**each[name]) for each in taken]
        for number, each in enumerate(rounds):
            print(f"{name}, round {number}: {each}")
        ratios = [each.ratio for each in rounds[1:]]
        print(json.dumps({"way": name, "ratio": median(ratios), "range": [min(ratios), max(ratios)]}))


if __name__ == "__main__":
    harness.start(main)
