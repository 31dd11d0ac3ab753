"""A spike ends the run, and the flags of its error continue it without the samples that led to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.train.callbacks import spikes
from megazero.train.data import feeding
from tests.dist.pool import run_ranks
from tests.dist.runs import Seen, Values, batches_of, train

WRONG = range(12 * 8, 14 * 8)  # the samples of the iterations 13 and 14
BASE = {"train_iters": 18, "lr": 2e-2, "lr_warmup_iters": 0, "save_interval": 5, "save_keep_last": 3}
WATCH = {"stop_on_spike": True, "spike_loss_bound": 0.4}


class Wrong:
    """The run's data, with tokens at random in the samples of WRONG."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = dict(self.dataset[index])
        if index in WRONG:
            random = np.random.default_rng(index)
            sample |= {name: random.permutation(sample[name]) for name in ("tokens", "labels")}
        return sample


def train_wrong(jobs: list[Values]) -> list[Seen | str]:
    """What was seen of each job, or the spike's error."""
    original, usual, row = feeding.Batches, spikes.USUAL, spikes.IN_A_ROW
    feeding.Batches = batches_of(Wrong)
    spikes.USUAL, spikes.IN_A_ROW = 4, 2
    try:
        return [seen_or_error(job) for job in jobs]
    finally:
        feeding.Batches, spikes.USUAL, spikes.IN_A_ROW = original, usual, row


def seen_or_error(job: Values) -> Seen | str:
    try:
        return train(job)
    except spikes.LossSpike as error:
        return f"{error}"


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_errors_flags_leave_the_samples_out(tmp_path: Path, world: int) -> None:
    files = {"save": str(tmp_path / "run"), "log_dir": str(tmp_path / "logs")}
    told = {
        "skip_train_iteration_range": ("11-14",),
        "save": str(tmp_path / "told"),
        "log_dir": str(tmp_path / "t"),
    }
    ran = run_ranks(world, train_wrong, [{**BASE, **told}, {**BASE, **WATCH, **files}], timeout=300)
    for _, error in ran:
        assert re.search(
            rf"--load {files['save']} --ckpt-step 10 --skip-train-iteration-range 11-14\b", error
        )
    again = {"load": files["save"], "ckpt_step": 10, "skip_train_iteration_range": ("11-14",)}
    resumed = run_ranks(world, train_wrong, [{**BASE, **WATCH, **files, **again}], timeout=300)
    for (wanted, _), (rest,) in zip(ran, resumed, strict=True):
        assert wanted.losses[10:] == rest.losses and [at for at, _ in rest.losses] == [15, 16, 17, 18]
