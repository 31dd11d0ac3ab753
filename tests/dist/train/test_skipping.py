"""Iterations that are left out: the run is the one whose data lacks their samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megazero.log.metrics import read_metrics
from megazero.train.data import feeding
from tests.dist.pool import run_ranks
from tests.dist.runs import Seen, Values, batches_of, checkpoint_of, differences, train, train_all

# 4, 4, 4, 8, 8, 12, 12, 12; iterations 3 to 5 take the samples 8 to 27
RAMP = {"rampup_batch_size": (4, 4, 24), "global_batch_size": 12, "train_iters": 8}
LAYOUTS = {1: {}, 4: {"zero_preset": "zero3", "tensor_model_parallel_size": 2, "sequence_parallel": True}}


class Without:
    """The run's data without the samples ``begin`` to ``end`` - 1."""

    def __init__(self, dataset: Any, begin: int, end: int) -> None:
        self.dataset, self.begin, self.end = dataset, begin, end

    def __len__(self) -> int:
        return len(self.dataset) - (self.end - self.begin)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index if index < self.begin else index + self.end - self.begin]


def train_without(values: Values, begin: int, end: int) -> Seen:
    original = feeding.Batches
    feeding.Batches = batches_of(lambda dataset: Without(dataset, begin, end))
    try:
        return train(values)
    finally:
        feeding.Batches = original


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_samples_of_named_iterations_are_consumed_without_an_update(tmp_path: Path, world: int) -> None:
    base = {**RAMP, **LAYOUTS[world], "hidden_dropout": 0.0}
    skip = {**base, "skip_train_iteration_range": ("4-5", "3"), "log_dir": str(tmp_path / "logs")}
    run = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    jobs = [
        {**skip, "save": str(tmp_path / "whole"), "log_dir": str(tmp_path / "whole-logs")},
        {**skip, **run, "exit_interval": 2},
        {**skip, **run, "exit_interval": 6},
        {**skip, **run},
    ]
    whole, *legs = run_ranks(world, train_all, jobs, timeout=300)[0]
    assert [iteration for iteration, _ in whole.losses] == [1, 2, 6, 7, 8]
    assert sum((leg.losses for leg in legs), ()) == whole.losses
    assert not differences(checkpoint_of(tmp_path / "whole"), checkpoint_of(tmp_path / "run"))
    lines = read_metrics(tmp_path / "logs")
    assert [line["consumed_samples"] for line in lines] == [4, 8, 40, 52, 64]
    assert [line.get("left_out") for line in lines] == [
        None,
        None,
        [{"iterations": [3, 5], "samples": [8, 27]}],
        None,
        None,
    ]
    # Its 5 updates are those of a run whose data lacks the samples 8 to 27; its batches were made for the place.
    sizes = {"rampup_batch_size": None, "log_dir": str(tmp_path / "other")}
    other = {"save": str(tmp_path / "other-run"), "load": str(tmp_path / "other-run")}
    for batch, stop in ((4, 2), (12, 5)):
        job = {**base, **sizes, **other, "global_batch_size": batch, "exit_interval": stop}
        (last, *_) = run_ranks(world, train_without, job, 8, 28, timeout=300)
    assert [loss for _, loss in last.losses] == [loss for _, loss in whole.losses[2:]]
    theirs, ours = checkpoint_of(tmp_path / "other-run"), checkpoint_of(tmp_path / "whole")
    assert not differences(theirs, ours)
