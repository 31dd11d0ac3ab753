"""Going back from a spike: the run is the one that was told to leave these iterations out.

Errors on 4 ranks, too: pytest -m slow tests/dist/train/test_rollback.py
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.checkpoint import store
from megazero.log.metrics import SUPERSEDED_FILE, read_metrics
from megazero.ops.failures import NonFiniteLoss
from megazero.train import trainer
from megazero.train.data import feeding
from megazero.train.state.rollback import LossSpike
from tests.dist.pool import run_ranks
from tests.dist.runs import Seen, Values, checkpoint_of, differences, train

LAYOUTS = {
    1: {"hidden_dropout": 0.1},
    4: {"zero_preset": "zeropp", "ranks_per_node": 2, "params_dtype": "bf16", "zero_exact_numel": 40}
    | {"zero_gradient_rounding": "feedback"},
}
# In the iterations 10 and 14, from which and to which it goes back, a fragment has just left.
STREAMED = {
    "outer_interval": 4,
    "outer_fragments": 2,
    "outer_delay": 1,
    "outer_mixing": 0.5,
    "ranks_per_node": 2,
}
BASE = {"train_iters": 18, "lr": 2e-2, "lr_warmup_iters": 0, "save_interval": 5, "save_keep_last": 2}
WATCH = {"rollback_on_spike": True, "spike_window": 4, "spike_iterations": 2, "spike_loss_bound": 0.4}
WRONG = range(12 * 8, 15 * 8)  # the samples of the iterations 13 to 15


class Wrong:
    """The run's data, with tokens at random in the samples of ``wrong``."""

    def __init__(self, dataset: Any, wrong: range) -> None:
        self.dataset, self.wrong = dataset, wrong

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = dict(self.dataset[index])
        if index in self.wrong:
            random = np.random.default_rng(index)
            sample |= {name: random.permutation(sample[name]) for name in ("tokens", "labels")}
        return sample


def train_wrong(
    jobs: list[Values], wrong: range, nan_at: int = 0, overflows: range = range(0)
) -> list[Seen | str]:
    """What was seen, or the error.

    nan_at: the first loss of this iteration is NaN on the last rank. overflows: so are gradients of these iterations.
    """
    original, forward = feeding.Batches, trainer.Trainer._forward_backward
    left = [nan_at]

    def poisoned(self: Any, step: Any, ids: Any, factor: float) -> Any:
        overflow = self.progress.iteration + 1 in overflows
        loss = forward(self, step, ids, math.inf if overflow else factor)
        if left[0] == self.progress.iteration + 1:
            left[0] = 0
            return loss * float("nan") if self.mesh.rank == self.mesh.world_size - 1 else loss
        return loss

    feeding.Batches = lambda dataset, **rest: original(Wrong(dataset, wrong), **rest)
    trainer.Trainer._forward_backward = poisoned
    try:
        return [seen_or_error(job) for job in jobs]
    finally:
        feeding.Batches, trainer.Trainer._forward_backward = original, forward


def seen_or_error(job: Values) -> Seen | str:
    try:
        return train(job)
    except (LossSpike, NonFiniteLoss) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, layout",
    [
        (1, LAYOUTS[1]),
        pytest.param(4, LAYOUTS[4], marks=pytest.mark.slow),
        pytest.param(4, STREAMED, marks=pytest.mark.slow),
    ],
)
def test_going_back_is_leaving_out(tmp_path: Path, world: int, layout: Values) -> None:
    """Of the wrong samples two steps are seen: back to iteration 10, and on with 15, one step that is no spike.

    The evaluation that was due at 12 comes after the iterations that are left out.
    """
    base = {**BASE, **layout, "eval_interval": 12, "eval_iters": 1}
    run = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run"), "log_dir": str(tmp_path / "logs")}
    told = {"skip_train_iteration_range": ("11-14",), "save": str(tmp_path / "told")}
    jobs = [
        {**base, **told, "log_dir": str(tmp_path / "told-logs")},
        {**base, **WATCH, **run, "exit_interval": 14},  # at which it has gone back
        {**base, **WATCH, **run},
    ]
    for told_run, first, rest in run_ranks(world, train_wrong, jobs, WRONG, timeout=300):
        wanted = dict(told_run.losses)
        assert sorted(wanted) == [*range(1, 11), *range(15, 19)]
        assert wanted[15] > wanted[10] + WATCH["spike_loss_bound"]  # it is wrong, too
        assert dict(first.losses[:10] + rest.losses) == wanted
        assert [at for at, _ in first.losses[10:]] == [11, 12, 13, 14]
        assert first.evaluations[1:] + rest.evaluations == told_run.evaluations
    assert not differences(checkpoint_of(tmp_path / "run"), checkpoint_of(tmp_path / "told"))
    path = store.latest(tmp_path / "run")
    assert path is not None
    (out,) = store.read_state(path)["left_out"]
    assert out == {"first": 11, "last": 14, "begin": 80, "end": 112, "rollback": True}
    lines = read_metrics(tmp_path / "logs")
    (evaluation,) = [line for line in lines if "lm_loss" not in line]
    lines.remove(evaluation)
    assert evaluation["iteration"] == 14
    assert [line["iteration"] for line in lines] == [*range(1, 11), *range(15, 19)]
    assert lines[10]["rolled_back"] == [{"iterations": [11, 14], "samples": [80, 111]}]
    assert lines[10]["learning_rate"] == read_metrics(tmp_path / "told-logs")[11]["learning_rate"]
    moved = read_metrics(tmp_path / "logs" / SUPERSEDED_FILE)
    assert [line["iteration"] for line in moved] == [11, 12, 12, 13, 14]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_so_many_times_and_then_an_error(tmp_path: Path, world: int) -> None:
    """Wrong to the end: back from 14 and from 16, and 18 is the third spike. A NaN is undone at once."""
    base = {**BASE, **WATCH, "max_rollbacks": 2}
    jobs = [
        {**base, "save": str(tmp_path / "run"), "log_dir": str(tmp_path / "logs")},
        {**base, "save": str(tmp_path / "late"), "log_dir": str(tmp_path / "late-logs"), "save_interval": 13},
    ]
    for error, late in run_ranks(world, train_wrong, jobs, range(96, 1000), timeout=300):
        assert "LossSpike: iteration 18: loss" in error and "gone back 2 times (--max-rollbacks)" in error
        assert "iteration 14: loss" in late and "holds no checkpoint from before iteration 13" in late
    path = store.latest(tmp_path / "run")
    assert path is not None and path.name == "iter_0000016"
    nan = {**base, "save": str(tmp_path / "nan"), "log_dir": str(tmp_path / "nan-logs"), "train_iters": 9}
    told = {**BASE, "train_iters": 9, "log_dir": str(tmp_path / "told-logs"), "save": str(tmp_path / "told")}
    told |= {"skip_train_iteration_range": ("6-7",)}
    run_ranks(world, train_wrong, [told], range(0), timeout=300)
    (seen, *_) = run_ranks(world, train_wrong, [nan], range(0), 7, timeout=300)
    assert [at for at, _ in seen[0].losses] == [1, 2, 3, 4, 5, 6, 8, 9]
    assert not differences(checkpoint_of(tmp_path / "nan"), checkpoint_of(tmp_path / "told"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_skipped_steps_harm_nothing(tmp_path: Path, world: int) -> None:
    """The tenth step in a row is left out from the checkpoint at 20, whichever are kept: it has the state of 11."""
    base = {**BASE, **LAYOUTS[world], "train_iters": 23}
    one = {"save_keep_last": 1}
    kept = {"all": {"save_keep_last": None}, "one": one, "behind": {**one, "async_save": True}}
    folders = {
        name: {"save": str(tmp_path / name), "log_dir": str(tmp_path / f"{name}-logs")} for name in kept
    }
    jobs = [{**base, **WATCH, **options, **folders[name]} for name, options in kept.items()]
    told = {"save": str(tmp_path / "told"), "log_dir": str(tmp_path / "told-logs")}
    run_ranks(world, train_wrong, jobs, range(0), 0, range(12, 22), timeout=300)
    told = {**base, **told, "skip_train_iteration_range": ("21",)}
    run_ranks(world, train_wrong, [told], range(0), 0, range(12, 21), timeout=300)
    for name in kept:
        assert not differences(checkpoint_of(tmp_path / name), checkpoint_of(tmp_path / "told")), name
        path = store.latest(tmp_path / name)
        assert path is not None
        (out,) = store.read_state(path)["left_out"]
        assert (out["first"], out["last"], out["rollback"]) == (21, 21, True)
    at_15, at_20 = map(store.load_kinds, store.checkpoints(tmp_path / "all")[2:4])
    assert not differences(at_15, at_20)
    assert all(tensor.isfinite().all() for kind in at_20.values() for tensor in kind.values())


@pytest.mark.slow
def test_a_stop_in_a_spike_keeps_the_way_back(tmp_path: Path) -> None:
    """It is saved at 13, the first wrong iteration, and only the newest is kept, besides the way back."""
    base, run = {**BASE, "save_keep_last": 1}, {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    run |= {"log_dir": str(tmp_path / "logs")}
    told = {"save": str(tmp_path / "told"), "log_dir": str(tmp_path / "told-logs")}
    jobs = [
        {**base, **told, "skip_train_iteration_range": ("11-14",)},
        {**base, **WATCH, **run, "exit_interval": 13},
    ]
    run_ranks(1, train_wrong, jobs, WRONG, timeout=300)
    assert [path.name[-2:] for path in store.checkpoints(tmp_path / "run")] == ["10", "13"]
    run_ranks(1, train_wrong, [{**base, **WATCH, **run}], WRONG, timeout=300)
    assert not differences(checkpoint_of(tmp_path / "run"), checkpoint_of(tmp_path / "told"))
    assert [path.name[-2:] for path in store.checkpoints(tmp_path / "run")] == ["18"]
