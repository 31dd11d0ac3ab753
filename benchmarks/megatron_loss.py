"""Do quantised messages under megatron-core cost loss? Beside runs whose start differs by one bit of one weight.

    python benchmarks/megatron_loss.py --work runs/megatron-loss [--seeds 3] [--nudges 3] [--steps 300]

megatron-core's GPTModel, DistributedDataParallel and DistributedOptimizer in bf16 on 4 gloo ranks as 2 nodes of 2
(tests/megatron). A run's loss is the mean over its last 50 steps. Each run is one line in WORK/runs.jsonl, so the
same command goes on where it stopped; ``--seconds`` stops it between runs. Differences are to the mean of the
unpatched runs of the same seed, nudged or not. The standard deviation is that of runs of one seed, which differ in
the nudge alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from tests.dist.pool import run_ranks
from tests.megatron.case import Case, step_losses
from tests.megatron.cases import DELTA_INT4, INT8_INT4
from tests.megatron.training import Formats, train

PLAIN = "megatron-core"
CONTESTANTS: dict[str, Formats | None] = {
    PLAIN: None,
    "int8, int4": INT8_INT4,
    "int4-delta, int4": DELTA_INT4,
}
LAST = 50


def plan(options: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Yield the runs: each seed's with every format, as they are, then with one nudge after another."""
    cases = [Case(dp=4, bf16=True, seed=seed, steps=options.steps) for seed in range(1, options.seeds + 1)]
    for nudge in range(options.nudges + 1):
        yield from ((name, replace(case, nudge=nudge)) for case in cases for name in CONTESTANTS)


def late_loss(case: Case, formats: Formats | None) -> float:
    losses = step_losses(case, run_ranks(case.world, train, case, formats, timeout=400))
    return statistics.fmean(losses[-LAST:])


def rows(found: dict[str, dict[int, list[float]]]) -> Iterator[list[str]]:
    """One row a contestant, of its losses by seed: their mean, and the differences to the unpatched runs' means."""
    base = {seed: statistics.fmean(losses) for seed, losses in found[PLAIN].items()}
    for name, by_seed in found.items():
        away = {seed: [loss - base[seed] for loss in losses] for seed, losses in by_seed.items()}
        mean = statistics.fmean(loss for losses in by_seed.values() for loss in losses)
        each = "; ".join(f"{min(d):+.4f} to {max(d):+.4f}" for d in away.values())
        whole = statistics.fmean(d for ds in away.values() for d in ds)
        yield [name, f"{mean:.4f}", each, f"{whole:+.4f}", f"{noise(by_seed):.4f}"]


def noise(by_seed: dict[int, list[float]]) -> float:
    """Return the standard deviation of runs of one seed, pooled over seeds."""
    freedom = sum(len(losses) - 1 for losses in by_seed.values())
    squares = sum((len(losses) - 1) * statistics.variance(losses) for losses in by_seed.values())
    return math.sqrt(squares / freedom)


def main() -> int:
    parser = harness.parser(
        __doc__, work=Path, seeds=3, nudges=3, steps=300, seconds=(math.inf, "start no run after these")
    )
    options = parser.parse_args()
    if options.steps < LAST or options.nudges < 1:
        parser.error(
            f"a loss is the mean of {LAST} steps, and noise needs a nudged run: more steps or nudges"
        )
    options.work.mkdir(parents=True, exist_ok=True)
    store, began = harness.Store(options.work / "runs.jsonl"), time.monotonic()
    found: dict[str, dict[int, list[float]]] = {name: {} for name in CONTESTANTS}
    for name, case in plan(options):
        losses = [record["loss"] for record in store.records() if is_of(record, name, case)]
        if not losses:
            if time.monotonic() - began > options.seconds:
                print("not all runs are there yet: run the same command again")
                return 1
            losses = [late_loss(case, CONTESTANTS[name])]
            store.append({"contestant": name, "loss": losses[0], "settings": asdict(case)})
            print(f"{name}, seed {case.seed}, nudge {case.nudge}: {losses[0]:.4f}", flush=True)
        found[name].setdefault(case.seed, []).append(losses[0])
    header = ["messages", "loss", "from the unpatched mean, by seed", "all seeds", "sd"]
    print(harness.table(header, list(rows(found))))
    return 0


def is_of(record: dict[str, Any], name: str, case: Case) -> bool:
    return record["contestant"] == name and record["settings"] == asdict(case)


if __name__ == "__main__":
    harness.start(main)
