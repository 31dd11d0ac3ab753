"""Do a patch's quantised messages cost loss? Beside runs whose start differs by one bit of one weight.

    python -m benchmarks.patches.loss --patch fsdp2 --work runs/fsdp2-loss [--seeds 3] [--nudges 3] [--steps 300]

A small model on 4 gloo ranks as 2 nodes of 2: under FSDP2 in bf16 with fp32 reductions and 2 micro-batches, no
parameter exact (tests/fsdp2); or megatron-core's GPTModel, DistributedDataParallel and DistributedOptimizer in bf16
(tests/megatron). A run's loss is the mean over its last 50 steps. Each run is one line in WORK/runs.jsonl, so the
same command goes on where it stopped; ``--seconds`` stops it between runs. Differences are to the mean of the
unpatched runs of the same seed, nudged or not. The standard deviation is that of runs of one seed, which differ in
the nudge alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.loss.intervals import estimate
from tests.dist.pool import run_ranks

LAST = 50
NO_TRANSFORM = {"gradient_transform": "none"}  # as the documented figures have it


@dataclass(frozen=True)
class Patched:
    """case: a frozen dataclass with seed, nudge and steps. contestants: what ``losses``, by step, takes besides; the
    first is unpatched."""

    case: Any
    contestants: dict[str, Any]
    losses: Callable[[Any, Any], list[float]]


def fsdp2() -> Patched:
    from tests.fsdp2.job import RANKS, Case, train

    def losses(case: Any, contestant: Any) -> list[float]:
        mesh, words = contestant
        return run_ranks(RANKS, train, replace(case, mesh=mesh), words, timeout=400)[0].losses

    int4 = {"gradients": "int4", "exact_numel": 0, **NO_TRANSFORM}
    contestants = {
        "FSDP2": ("1d", None),
        "HSDP, int4": ("2d", int4),
        "int8, int4": ("1d", {"weights": "int8", **int4}),
        "int4-delta, int4": ("1d", {"weights": "int4-delta", **int4}),
    }
    return Patched(Case(micro_batches=2, dtypes=(torch.bfloat16, torch.float32)), contestants, losses)


def megatron() -> Patched:
    from tests.megatron.case import Case, step_losses
    from tests.megatron.cases import DELTA_INT4, INT8_INT4
    from tests.megatron.training import train

    def losses(case: Any, formats: Any) -> list[float]:
        return step_losses(case, run_ranks(case.world, train, case, formats, timeout=400))

    contestants = {
        "megatron-core": None,
        "int8, int4": {**INT8_INT4, **NO_TRANSFORM},
        "int4-delta, int4": {**DELTA_INT4, **NO_TRANSFORM},
    }
    return Patched(Case(dp=4, bf16=True), contestants, losses)


def main() -> int:
    parser = harness.parser(
        __doc__, work=Path, seeds=3, nudges=3, steps=300, seconds=(math.inf, "start no run after these")
    )
    parser.add_argument("--patch", choices=("fsdp2", "megatron"), required=True)
    options = parser.parse_args()
    if options.steps < LAST or options.nudges < 1:
        parser.error(
            f"a loss is the mean of {LAST} steps, and noise needs a nudged run: more steps or nudges"
        )
    patch = {"fsdp2": fsdp2, "megatron": megatron}[options.patch]()
    store, began = harness.Store(options.work / "runs.jsonl"), time.monotonic()
    store.claim()
    found: dict[str, dict[int, list[float]]] = {name: {} for name in patch.contestants}
    for nudge in range(options.nudges + 1):
        for seed in range(1, options.seeds + 1):
            for name, words in patch.contestants.items():
                case = replace(patch.case, seed=seed, nudge=nudge, steps=options.steps)
                key = {"contestant": name, "settings": settings(case)}
                known = [each["loss"] for each in store.records() if {**each, **key} == each]
                if not known:
                    if time.monotonic() - began > options.seconds:
                        print("not all runs are there yet: run the same command again")
                        return 1
                    known = [statistics.fmean(patch.losses(case, words)[-LAST:])]
                    store.append({**key, "loss": known[0]})
                    print(f"{name}, seed {seed}, nudge {nudge}: {known[0]:.4f}", flush=True)
                found[name].setdefault(seed, []).append(known[0])
    header = ["messages", "loss", "from the unpatched mean, by seed", "all seeds", "sd"]
    print(harness.table(header, list(rows(found))))
    return 0


def rows(found: dict[str, dict[int, list[float]]]) -> Iterator[list[str]]:
    """Yield a row for each contestant: its losses' mean, and their differences to the unpatched runs' means by
    seed."""
    base = {seed: statistics.fmean(losses) for seed, losses in next(iter(found.values())).items()}
    for name, by_seed in found.items():
        away = {seed: [loss - base[seed] for loss in losses] for seed, losses in by_seed.items()}
        own = estimate(by_seed)
        each = "; ".join(f"{min(d):+.4f} to {max(d):+.4f}" for d in away.values())
        whole = statistics.fmean(d for ds in away.values() for d in ds)
        yield [name, f"{own.mean:.4f}", each, f"{whole:+.4f}", f"{own.deviation:.4f}"]


def settings(case: Any) -> dict[str, Any]:
    """Return a case as JSON has it."""
    return {
        name: value if isinstance(value, int | float) else str(value) for name, value in asdict(case).items()
    }


if __name__ == "__main__":
    harness.start(main)
