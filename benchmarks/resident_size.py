"""Does a user's own loop grow? The resident size of a rank over thousands of steps, on the CPU.

    python benchmarks/resident_size.py [--preset zero3] [--steps 3000]

One rank of 2 nodes of 2 takes steps of a 1.3M-parameter decoder without the trainer: begin_step, forward, backward,
step (the other ranks send what it sends: gpu_report/lone_rank.py). Printed are the resident size at ten moments, its
peak, and the growth in the last nine tenths of the steps. Measured with zero3: 473.6 MB at step 300, 473.7
at 3000.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed, too

import torch

from benchmarks import harness
from benchmarks.gpu_report import loops
from benchmarks.gpu_report.lone_rank import lone_rank
from megazero.config import resolve_shards

SIZE = loops.Size("1M", layers=4, hidden=128, ffn=352, heads=4, vocabulary=2048, sequence=16)
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> float:
    """MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6


def main() -> None:
    parser = harness.parser(__doc__, steps=3000)
    parser.add_argument("--preset", choices=loops.policies(), default="zero3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    preset, policy = loops.policies()[options.preset]
    sizes, began = [], time.perf_counter()
    with lone_rank(4, 2, resolve_shards(preset, 4, 2).factors, torch.device("cpu")) as mesh:
        step, _ = loops.ours(SIZE, torch.device("cpu"), mesh=mesh, policy=policy)
        for number in range(1, options.steps + 1):
            step()
            if number % (options.steps // 10) == 0:
                sizes.append(resident())
    milliseconds = (time.perf_counter() - began) / options.steps * 1e3
    print(f"{options.preset}, {options.steps} steps of {milliseconds:.1f} ms; resident MB:")
    print("  " + "  ".join(f"{size:.1f}" for size in sizes))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"  peak {peak:.1f}; grown since step {options.steps // 10}: {sizes[-1] - sizes[0]:+.1f} MB")


if __name__ == "__main__":
    harness.start(main)
