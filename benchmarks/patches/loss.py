"""Do a patch's quantised messages cost loss? Beside runs whose start differs by one bit of one weight.

A run's loss is the mean over its last 50 steps. Each run is one line in WORK/runs.jsonl, so the same command goes on
where it stopped; ``--seconds`` stops it between runs. Differences are to the mean of the unpatched runs of the same
seed, nudged or not. The standard deviation is that of runs of one seed, which differ in the nudge alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.loss.intervals import estimate

LAST = 50
Losses = Callable[[Any, Any], list[float]]  # of a case and a contestant's words: by step


def main(doc: str | None, plain: str, contestants: Mapping[str, Any], case: Any, losses: Losses) -> int:
    """Run each seed of ``case`` with every contestant, as it is and with one nudge after another; print the table.

    case: a frozen dataclass with seed, nudge and steps. plain: the unpatched contestant. Returns the exit status.
    """
    parser = harness.parser(
        doc, work=Path, seeds=3, nudges=3, steps=300, seconds=(math.inf, "start no run after these")
    )
    options = parser.parse_args()
    if options.steps < LAST or options.nudges < 1:
        parser.error(
            f"a loss is the mean of {LAST} steps, and noise needs a nudged run: more steps or nudges"
        )
    store, began = harness.Store(options.work / "runs.jsonl"), time.monotonic()
    store.claim()
    found: dict[str, dict[int, list[float]]] = {name: {} for name in contestants}
    for nudge in range(options.nudges + 1):
        for seed in range(1, options.seeds + 1):
            for name, words in contestants.items():
                own = replace(case, seed=seed, nudge=nudge, steps=options.steps)
                known = [record["loss"] for record in store.records() if is_of(record, name, own)]
                if not known:
                    if time.monotonic() - began > options.seconds:
                        print("not all runs are there yet: run the same command again")
                        return 1
                    known = [statistics.fmean(losses(own, words)[-LAST:])]
                    store.append({"contestant": name, "loss": known[0], "settings": settings(own)})
                    print(f"{name}, seed {seed}, nudge {nudge}: {known[0]:.4f}", flush=True)
                found[name].setdefault(seed, []).append(known[0])
    header = ["messages", "loss", "from the unpatched mean, by seed", "all seeds", "sd"]
    print(harness.table(header, list(rows(found, plain))))
    return 0


def rows(found: dict[str, dict[int, list[float]]], plain: str) -> Iterator[list[str]]:
    """Yield a row for each contestant: its losses' mean, and their differences to the unpatched runs' means by
    seed."""
    base = {seed: statistics.fmean(losses) for seed, losses in found[plain].items()}
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


def is_of(record: dict[str, Any], name: str, case: Any) -> bool:
    return record["contestant"] == name and record["settings"] == settings(case)
