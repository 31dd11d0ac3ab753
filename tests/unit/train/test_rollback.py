"""The way back from a fault is there whatever is kept: the trainer's loop and its checkpoints, without a model.

The whole product: pytest -m slow tests/unit/train/test_rollback.py
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.checkpoint import store
from megazero.checkpoint.placement import Placement
from megazero.checkpoint.records import SliceRecord
from megazero.config import RunConfig, World, make_config
from megazero.config.schedule.batch_sizes import BatchSizeRampup
from megazero.log.exit_status import ExitStatus
from megazero.ops.exit_conditions import ExitConditions
from megazero.ops.failures import LocalStep, NonFiniteGuard
from megazero.train.callbacks.callback import Callback
from megazero.train.callbacks.chain import Callbacks
from megazero.train.callbacks.exits import Exits
from megazero.train.callbacks.spikes import SpikeMonitor
from megazero.train.schedule.run_length import RunLength
from megazero.train.state.checkpointing import Checkpointing
from megazero.train.state.origin import Origin, find_origin
from megazero.train.state.progress import Progress
from megazero.train.state.rollback import LossSpike
from megazero.train.state.saver import Saver
from megazero.train.trainer import Trainer
from tests.sizes import TINY

LAST = 48
GOOD, SPIKE, SKIP, NAN = (3.0, 1.0), (9.0, 1.0), (3.0, math.inf), (math.nan, math.nan)  # loss and norm
WATCH = {"rollback_on_spike": True, "spike_window": 4, "spike_iterations": 3, "max_rollbacks": 2}
FAULTS: Mapping[str, tuple[tuple[float, float], ...]] = {
    "ten norms": (SKIP,) * 10,
    "norms to the end": (SKIP,) * LAST,
    "a loss": (NAN,),
    "norms and a loss": (*(SKIP,) * 7, NAN),
    "a spike": (SPIKE,) * 3,
    "spikes": (SPIKE,) * 7,
    "a spike with norms between": (SPIKE, *(SKIP,) * 6, SPIKE, SKIP, SPIKE),
    "a spike and ten norms": (SPIKE, *(SKIP,) * 10),
    "what passes, and a loss": (SPIKE, SPIKE, *(SKIP,) * 5, GOOD, GOOD, NAN),
}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@dataclass(frozen=True)
class Kept(Checkpointing):
    """Its model is the iterations that made an update: 1 in ``weights`` at their place."""

    weights: torch.Tensor = torch.zeros(0)

    def saving(self, progress: Progress, staging: Any, retry: store.Retry, busy: Path | None = None) -> Any:
        return super().saving(progress, None, retry, busy)  # of a snapshot that is a copy

    def _snapshot(self, progress: Progress) -> store.Snapshot:
        state = {name: getattr(progress, name) for name in ("iteration", "consumed_samples", "rollbacks")}
        state |= {"run_id": "a", "spikes": self.spikes.state()}
        return store.Snapshot(progress.iteration, [record(self.weights.clone())], state)

    def load(self, origin: Origin, whole: bool = False) -> None:
        if origin.saved is not None:
            store.load(origin.saved.path, records=[record(self.weights)])
            self.spikes.load_state(origin.saved.state["spikes"])


def record(weights: torch.Tensor) -> SliceRecord:
    count = len(weights)
    return SliceRecord(Placement.plain("weights", (count,)), 0, count, {"weights": weights})


class Run(Trainer):
    """A start of a run with these figures of each iteration. ``lag``: a part of a save lasts so many iterations.

    saved: what every checkpoint held when it was saved. back: (to, from) of the ways back.
    """

    def __init__(self, config: RunConfig, figures: list[tuple[float, float]], lag: int, saved: dict) -> None:
        self.config, self.figures, self.lag, self.saved = config, figures, lag, saved
        self.mesh: Any = SimpleNamespace(rank=0, grid=SimpleNamespace(outer=1))
        self.weights, self.back = torch.zeros(LAST + 1), list[tuple[int, int]]()
        self.scaling, self.spikes = SimpleNamespace(), SpikeMonitor(config.skipping)  # type: ignore[assignment]
        engine: Any = SimpleNamespace(mesh=self.mesh)
        self.checkpointing = Kept(config, engine, {}, spikes=self.spikes, weights=self.weights)
        origin = find_origin(config, self.mesh)
        self.checkpointing.load(origin)
        self.progress, self.ranges, self.guard = origin.progress, (), NonFiniteGuard()
        self.length = RunLength(BatchSizeRampup.of(config, 1), LAST, 8 * LAST, False)
        self.exits = Exits(ExitConditions.of(config.training, None, None, 0.0))
        console = SimpleNamespace(note=str, warning=str)
        self.outputs: Any = SimpleNamespace(console=console)
        self.callbacks = Callbacks([Noting(self)])
        self.saver = Saver(self.checkpointing, console, self._saved, 60.0)  # type: ignore[arg-type]
        self.engine: Any = SimpleNamespace(traffic=SimpleNamespace(take=dict), settle=lambda: None)
        self.data: Any = SimpleNamespace(train=None, valid={}, test={})
        batches = SimpleNamespace(seek=int)
        self.feeding: Any = SimpleNamespace(batches=lambda *_, **__: nullcontext(batches))
        self.phase = ""

    def _iterate(self, batches: Any) -> None:
        at = self.progress.iteration + 1
        (loss, norm), own = self.figures[at], LocalStep(0, 0.0, ())
        self.weights[at] = math.isfinite(norm)
        self.guard.check_loss(at, loss, own, lambda mine: [mine])
        self.guard.check_norm(at, norm, own, lambda mine: [mine])
        self.progress = replace(
            self.progress, iteration=at, consumed_samples=8 * at, losses={"lm_loss": loss}
        )
        if self.saver.under_way and at % self.lag == 0:
            assert self.saver._part is not None
            self.saver._part.wait_for_all(None, 60.0)
            self.saver.go_on()
        self.spikes.found = self.spikes.observe(at, loss, norm) if math.isfinite(norm) else None

    def _save(self, saved_at: int) -> int:
        self.saved[self.progress.iteration] = self.updates()
        return super()._save(saved_at)

    def updates(self) -> set[int]:
        return set(self.weights.nonzero().flatten().tolist())

    def check(self, path: Path) -> None:
        """No more is kept than was asked for, and the way back."""
        keep, found = self.config.checkpoint.save_keep_last, store.checkpoints(path.parent)
        assert path in found and (keep is None or len(found) <= keep + (self.spikes.began > 0))

    def went_back(self, out: Any) -> None:
        """The weights are the newest that were saved without an update of this spike."""
        begin = beginning(self.figures, out.last)
        unharmed = [at for at, held in self.saved.items() if at < out.last and not held & set(begin)]
        assert out.first - 1 == max(unharmed), (out, self.saved)
        assert self.updates() == self.saved[out.first - 1] and not self.updates() & set(begin)
        self.back.append((out.first - 1, out.last))


class Noting(Callback):
    """Lets a run look at its saves and its ways back."""

    def __init__(self, run: Run) -> None:
        self.of = run

    def saved(self, iteration: int, path: Path, seconds: float) -> None:
        self.of.check(path)

    def undone(self, why: str, out: Any) -> None:
        self.of.went_back(out)


def beginning(figures: list[tuple[float, float]], reached: int) -> range:
    """The iterations from the first one of the spike up to ``reached``; none if there is no spike."""
    spikes = []
    for at in range(reached, 0, -1):
        if figures[at] == GOOD:
            break
        spikes += [at] if figures[at] == SPIKE else []
    return range(spikes[-1], reached + 1) if spikes else range(0)


def back_and_on(folder: Path, fault: str, begin: int, lag: int, **options: Any) -> list[tuple[int, int]]:
    """The ways back of a run with all its starts; what ends it by an error is that they were all gone."""
    figures = [GOOD] * (LAST + 1)
    figures[begin : begin + len(FAULTS[fault])] = FAULTS[fault]
    values = {**TINY, **WATCH, **options, "train_iters": LAST, "async_save": lag > 0}
    values |= {"save": str(folder), "load": str(folder), "log_dir": f"{folder}-logs"}
    config = make_config(values, World(1, 1))
    saved, back = dict[int, set[int]](), list[tuple[int, int]]()
    while True:
        run = Run(config, figures[: LAST + 1], lag, saved)
        try:
            status = run.run()
        except LossSpike as error:
            assert "(--max-rollbacks)" in f"{error}" if min(saved) < begin else "no checkpoint" in f"{error}"
            return back + run.back
        back += run.back
        if status is ExitStatus.FINISHED:
            return back


def cases(intervals: tuple[int, ...], keeps: tuple, begins: tuple[int, ...], exits: tuple) -> Iterator[dict]:
    for interval, keep, begin, exit_interval in product(intervals, keeps, begins, exits):
        options = {"save_interval": interval, "save_keep_last": keep, "exit_interval": exit_interval}
        yield {"begin": begin, **options}


def prove(folder: Path, fault: str, lag: int, every: Iterator[dict]) -> None:
    for number, case in enumerate(every):
        back_and_on(folder / f"{number}", fault, lag=lag, **case)


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_way_back_is_never_pruned(tmp_path: Path, fault: str, lag: int) -> None:
    prove(tmp_path, fault, lag, cases((5,), (1, 2), (12,), (None, 14)))


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_way_back_is_never_pruned_in_the_whole_product(tmp_path: Path, fault: str, lag: int) -> None:
    prove(tmp_path, fault, lag, cases((2, 3, 5, 8), (1, 2, 3), (11, 12, 13, 14, 15), (None, 13)))


def test_it_goes_on_from_a_checkpoint_among_skipped_steps(tmp_path: Path) -> None:
    """The checkpoint at 20 has the weights of 11."""
    for keep in (None, 1, 2):
        folder = tmp_path / f"{keep}"
        options: dict[str, Any] = {"save_interval": 5, "save_keep_last": keep}
        assert back_and_on(folder, "ten norms", 12, 0, **options) == [(20, 21)]
