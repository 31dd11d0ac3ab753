"""Step time of megatron-core on slow links: as it is, in two exact hops, and with quantised messages.

    python -m benchmarks.patches.megatron_step_time [--rate 200mbit] [--rounds 5] [--micro-batches 1 4]

2 nodes of 2 ranks (tests/netlab), DP 4: megatron-core's GPTModel, DistributedDataParallel and DistributedOptimizer in
bf16 on CPUs (tests/megatron). Contestants take turns; each builds its model anew and warms up with 2 steps. Prints
s per step, bytes into a node per step, and ratios to the exact hops round by round.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import harness
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
Turn = tuple[float, float, int, harness.Learned]
BASE = "exact hops"


def turn(case: Case, formats: Formats | None) -> Turn:
    """Build and train; return the seconds and the bytes into this node per step, the number of parameters, and what
    was learned."""
    with a_job(case, formats) as job:
        for _ in range(WARM_UP):
            job.step(0)  # the same samples in every step, so the loss falls
        dist.barrier()
        began, (_, before) = time.perf_counter(), interface_bytes()
        for _ in range(WARM_UP, case.steps):
            job.step(0)
        dist.barrier()
        steps = case.steps - WARM_UP
        seconds = (time.perf_counter() - began) / steps
        received = (interface_bytes()[1] - before) / steps
        parts = (zip(*job.losses[step], strict=True) for step in (0, -1))
        taken = [harness.Taken(torch.tensor(sum(loss) / sum(tokens)), job.norms[0]) for loss, tokens in parts]
        parameters = sum(p.numel() for chunk in job.chunks for p in chunk.parameters())
        return seconds, received, parameters, harness.learned(taken)


@contextmanager
def a_world(store: dist.Store, rank: int, size: int, number: int) -> Iterator[None]:
    """Make a world for one turn, by its number.

    Threads of gloo's groups live as long as their world: in one world for all turns, the third round's steps took
    twice the processor time of the first's.
    """
    own = dist.PrefixStore(f"turn {number}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compare(counts: list[int], rounds: int, steps: int, overlap: bool) -> dict[str, Any]:
    """Return by micro-batches and contestant the turns (``turn``)."""
    store, rank, size = next(dist.rendezvous("env://"))
    numbers = itertools.count()

    def in_a_world(case: Case, formats: Formats | None) -> Turn:
        with a_world(store, rank, size, next(numbers)):
            return turn(case, formats)

    found = {}
    for count in counts:
        case = Case(
            dp=4, layers=4, hidden=256, vocabulary=2048, sequence=64, bf16=True, bucket_size=1_000_000,
            micro_batches=count, steps=WARM_UP + steps, overlap_grad_reduce=overlap, overlap_param_gather=overlap,
        )  # fmt: skip
        turns = {name: lambda c=case, f=formats: in_a_world(c, f) for name, formats in CONTESTANTS.items()}
        found[str(count)] = taken = harness.take_turns(turns, rounds, warm_up=0)
        harness.require_training({name: first[-1] for name, (first, *_) in taken.items()})
    return found


def rows(count: str, found: dict[str, list[Turn]]) -> Iterator[list[str]]:
    """Yield a row for each contestant."""
    base = [seconds for seconds, *_ in found[BASE]]
    for name, turns in found.items():
        seconds = [each for each, *_ in turns]
        into = statistics.median(received / parameters for _, received, parameters, _ in turns)
        yield [count, name, harness.spread(seconds), f"{into:.2f} N", harness.of_medians(seconds, base)]


def main() -> None:
    options = harness.parser(
        __doc__,
        rate="200mbit",
        rounds=5,
        steps=(3, "timed steps of a contestant's turn"),
        micro_batches=[1, 4],
        overlap=(False, "gradients and parameters, as Megatron overlaps"),
        timeout=1200.0,
    ).parse_args()
    asked = (options.micro_batches, options.rounds, options.steps, options.overlap)
    (found,) = (
        harness.run(compare, *asked, lab=lab, world=False, timeout=options.timeout)
        for lab in harness.labs_at([options.rate])
    )
    parameters = next(iter(found.values()))[BASE][0][2]
    print(
        f"N = {parameters / 1e6:.1f}M parameters, {options.rate}, {options.rounds} rounds, "
        f"overlap {'on' if options.overlap else 'off'}"
    )
    header = ["micro-batches", "messages", "s per step", "into a node", f"of {BASE}"]
    print(harness.table(header, [row for count, each in found.items() for row in rows(count, each)]))


if __name__ == "__main__":
    harness.start(main)
