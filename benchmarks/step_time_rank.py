"""One rank of step_time.py --against: contestants of the tree that it was started in, which step when told to.

A line of standard input is a contestant to take a turn; the answer is its seconds per step, and those of CPU time of
this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.commit_trees import refuse_other_code

try:
    from benchmarks import contestants as c
    from benchmarks.peers import DELTA, policy_of
    from benchmarks.pipeline_step_time_rank import ACROSS
    from benchmarks.pipeline_step_time_rank import Shape as PipelineShape
    from benchmarks.pipeline_step_time_rank import ours as pipeline
except ImportError:  # the other commit's tree may have them among its tests
    from tests.benchmarks import contestants as c
    from tests.benchmarks.peers import DELTA, policy_of
    from tests.benchmarks.pipeline_step_time_rank import ACROSS
    from tests.benchmarks.pipeline_step_time_rank import Shape as PipelineShape
    from tests.benchmarks.pipeline_step_time_rank import ours as pipeline


def join(rank: int, world: int, store: str) -> torch.device:
    """This process as a rank of a world of its own; its device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
        )
    return device


def seconds_per_step(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Of one turn, from barrier to barrier."""
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
    return (time.perf_counter() - began) / steps


def build(name: str, options: dict[str, Any], device: torch.device) -> c.Step:
    node = max(1, options["ranks"] // 2)
    if name == "pp 2":
        return pipeline("zero1", ACROSS, PipelineShape(4, 1, 256, 8), node)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options["dtype"]]
    shape = c.Shape(micro_batch=2, dtype=dtype, micro_batches=options["micro_batches"])
    policy = policy_of(DELTA) if name == "zeropp" else None
    return c.ours(name, shape, node, device, policy)[0]


def main(rank: str, store: str, text: str) -> None:
    """text: the options as JSON: ranks, contestants, steps, dtype, micro_batches."""
    options = json.loads(text)
    device = join(int(rank), options["ranks"], store)
    steps = {name: build(name, options, device) for name in options["contestants"]}
    for line in sys.stdin:
        before = time.process_time()
        seconds = seconds_per_step(steps[line.strip()], options["steps"], device)
        cpu = (time.process_time() - before) / options["steps"]
        refuse_other_code()
        print(seconds, cpu, flush=True)
    dist.barrier()
    dist.destroy_process_group()
