"""One rank of megatron_step_time.py: contestants take turns. Started in every node of a lab."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.megatron.case import Case
from tests.megatron.cases import DELTA_INT4, EXACT, INT8_INT4
from tests.megatron.training import Formats, a_job
from tests.netlab.lab import interface_bytes

CONTESTANTS: dict[str, Formats | None] = {
    "megatron-core": None,
    "exact hops": EXACT,
    "int8, int4": INT8_INT4,
    "int4-delta, int4": DELTA_INT4,
}
WARM_UP = 2


def turn(case: Case, formats: Formats | None) -> tuple[float, float, int]:
    """Build and train; return the seconds and the bytes into this node per step, and the number of parameters."""
    with a_job(case, formats) as job:
        for step in range(WARM_UP):
            job.step(step)
        dist.barrier()
        began, (_, before) = time.perf_counter(), interface_bytes()
        for step in range(WARM_UP, case.steps):
            job.step(step)
        dist.barrier()
        steps = case.steps - WARM_UP
        seconds = (time.perf_counter() - began) / steps
        received = (interface_bytes()[1] - before) / steps
        return seconds, received, sum(p.numel() for chunk in job.chunks for p in chunk.parameters())


@contextmanager
def a_world(store: dist.Store, rank: int, size: int, number: int) -> Iterator[None]:
    """A world for one turn, by its number.

    Threads of gloo's groups live as long as their world: in one world for all turns, the third round's steps took
    twice the processor time of the first's.
    """
    own = dist.PrefixStore(f"turn {number}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, nargs="+", required=True)
    parser.add_argument("--overlap", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store, rank, size = next(dist.rendezvous("env://"))
    numbers = itertools.count()
    found: dict[str, Any] = defaultdict(lambda: {"seconds": [], "received": []})
    parameters = 0
    for _ in range(options.rounds):
        for count in options.micro_batches:
            case = Case(
                dp=4,
                layers=4,
                hidden=256,
                vocabulary=2048,
                sequence=64,
                bf16=True,
                bucket_size=1_000_000,
                micro_batches=count,
                steps=WARM_UP + options.steps,
                overlap_grad_reduce=options.overlap,
                overlap_param_gather=options.overlap,
            )
            for name, formats in CONTESTANTS.items():
                with a_world(store, rank, size, next(numbers)):
                    seconds, received, parameters = turn(case, formats)
                each = found[f"{name} {count}"]
                each["seconds"].append(seconds)
                each["received"].append(received)
    if rank == 0:
        options.result.write_text(json.dumps({"parameters": parameters, "by_case": found}))


if __name__ == "__main__":
    main()
