"""Host time of a step of megatron-core's distributed optimizer with ``megatron_core_patch``, beside Megatron's own.

    python -m benchmarks.patches.megatron_host_time [--layers 24] [--rounds 3]

One rank of a cluster, two nodes of four, steps a GPT of tiny tensors. Collectives do nothing, so a step's time is the
host's; streams are a CPU's, which does nothing with them. Seconds are of one thread, and hold what lets megatron-core
run on a CPU (tests/megatron/devices.py). Operations are those that launch a kernel on a card; megazero's own kernels
are not launched. A contestant has all its rounds before the next one begins: Megatron's groups are the process's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake"

import megatron_core_patch.patch
from benchmarks import harness
from benchmarks.features.host_time import RANKS, counted, no_kernels, silent_hops
from tests.megatron.case import Case
from tests.megatron.training import Job, megatron_ranks

FORMATS: dict[str, dict[str, Any] | None] = {
    "Megatron": None,
    "patched, exact": {},
    "patched": {"weights": "int8", "gradients": "int4", "exact_numel": 64},
}


def measure(layers: int, rounds: int) -> dict[str, tuple[list[float], dict[str, int]]]:
    """Return each contestant's seconds of each round, and what one step counts."""
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=dist.HashStore())
    overlap = {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    }  # so that a layer has buckets of its own
    case = Case(dp=RANKS, micro_batches=1, bf16=True, layers=layers, ranks_per_node=RANKS // 2, **overlap)
    found = {}
    for name, formats in FORMATS.items():
        with ExitStack() as stack:
            stack.enter_context(no_kernels())
            stack.enter_context(megatron_ranks(case, formats))
            stack.enter_context(silent_hops(megatron_core_patch.patch, stack))
            job = Job(case)
            step: Callable[[], None] = partial(job.step, 0)
            turn = partial(
                harness.step_seconds, step, device=torch.device("cpu"), steps=1, clock=time.thread_time
            )
            seconds = harness.take_turns({name: turn}, rounds, warm_up=2)[name]
            found[name] = (seconds, dict(counted(step)))
    return found


def main() -> int:
    options = harness.parser(__doc__, layers=24, rounds=3).parse_args()
    found = harness.run(measure, options.layers, options.rounds, ranks=1, world=False)
    rows = [
        [
            name,
            harness.spread([s * 1e3 for s in seconds], 1),
            str(counts.get("operations", 0)),
            str(counts.get("kernels", 0)),
        ]
        for name, (seconds, counts) in found.items()
    ]
    print(harness.table(["", "ms", "operations", "own kernels"], rows))
    return 0


if __name__ == "__main__":
    harness.start(main)
