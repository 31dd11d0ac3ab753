"""In a run, every line of the metrics names the slowest rank, and a steadily slow one gets a warning with its kind.

A clock that only the ranks' own work moves takes the place of the real one.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megazero.log.console import TrainConsole
from megazero.log.metrics import read_metrics
from megazero.log.time_bill import TimeBill
from megazero.models.decoder import Decoder
from megazero.ops.stragglers import STEADY
from megazero.train import setup, trainer
from megazero.train.data import feeding
from tests.dist.pool import run_ranks
from tests.dist.runs import train

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_preset": "zero3"},
    "TP 2, PP 2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
    },
}


def run(values: dict[str, Any], slow: int, kind: str) -> list[str]:
    """The warnings of a run in which a forward takes 1 s and a batch 0.1 s, on one rank 2 s or 1.1 s."""
    now, warnings = [0.0], list[str]()
    late = float(dist.get_rank() == slow)
    forward, data = Decoder.run_stage, feeding.Batches.next_step

    def slow_forward(*arguments: Any) -> Any:
        now[0] += 1 + late * (kind == "compute")
        return forward(*arguments)

    def slow_data(*arguments: Any) -> Any:
        now[0] += 0.1 + late * (kind == "data")
        return data(*arguments)

    def clock() -> float:
        return now[0]

    with (
        patch.object(Decoder, "run_stage", slow_forward),
        patch.object(feeding.Batches, "next_step", slow_data),
        patch.object(setup, "TimeBill", lambda links: TimeBill(clock, links)),
        patch.object(trainer, "time", SimpleNamespace(perf_counter=clock, monotonic=time.monotonic)),
        patch.object(TrainConsole, "warning", lambda _, line: warnings.append(line)),
    ):
        train(values)
    return warnings


@pytest.mark.first(1)
@pytest.mark.parametrize(("layout", "kind", "slow"), [("zero3", "data", 2), ("TP 2, PP 2", "compute", 3)])
def test_the_slow_rank_of_a_run_is_named(tmp_path: Path, layout: str, kind: str, slow: int) -> None:
    values = {**LAYOUTS[layout], "train_iters": STEADY + 1, "global_batch_size": 4, "log_dir": str(tmp_path)}
    (warning,), *others = run_ranks(4, run, values, slow, kind)
    assert others == [[]] * 3  # the first rank speaks
    assert f"rank {slow} on " in warning and f"in {STEADY} of the last {STEADY} iterations: {kind}" in warning
    first, *lines = read_metrics(tmp_path)
    assert "rank_times" not in first and len(lines) == STEADY
    for line in lines:
        found = line["rank_times"]
        assert found["slowest_rank"] == slow and found["most_s"] > found["least_s"]
