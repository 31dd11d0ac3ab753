"""Seconds per step of the variants on two nodes joined by a link of a given rate, in turns."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.loss.data import train_samples
from benchmarks.loss.run import RANKS, Settings, one_step, shard
from benchmarks.loss.variants import VARIANTS
from megazero.data.sampler import Batches
from megazero.mesh.mesh import create_mesh

ROUNDS, STEPS = 5, 5  # turns that count, steps of a turn


def measure(folder: Path, settings: Settings, names: list[str], rate: str) -> dict[str, Any]:
    """Return 'rate', and by variant the 'seconds' per step of each turn. Raises LabUnavailable, or RuntimeError if a
    rank fails."""
    (seconds,) = (
        harness.run(compare, str(folder.resolve()), asdict(settings), names, ranks=settings.node, lab=lab)
        for lab in harness.labs_at([rate], RANKS // settings.node)
    )
    return {"rate": rate, "seconds": seconds}


def compare(folder: str, values: dict[str, Any], names: list[str]) -> dict[str, list[float]]:
    """Train every variant on the first samples of seed 1; return the seconds per step of each turn after the
    first."""
    settings = Settings(**values)
    count = RANKS * settings.micro_batch * ((ROUNDS + 1) * STEPS + 1)
    data = train_samples(Path(folder), settings.sequence, 1, count)
    with ExitStack() as stack:
        turns = {}
        for name in names:
            model, engine = shard(create_mesh, settings, VARIANTS[name], seed=1)
            mine = Batches(
                data, micro_batch_size=settings.micro_batch, rank=engine.mesh.dp_rank, size=RANKS, limit=count
            )
            parts = (settings, model, engine, stack.enter_context(mine))
            turns[name] = lambda parts=parts: harness.measure(lambda: one_step(*parts, 1), STEPS)[0]  # type: ignore[call-arg]
        return harness.take_turns(turns, ROUNDS)
