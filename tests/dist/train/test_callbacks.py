"""Numbers of callbacks travel with the norm: reduced over the ranks, and without another exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megazero.train.callbacks.callback import Callback, TrainedStep
from tests.dist.pool import run_ranks
from tests.dist.runs import Seen, train
from tests.sizes import TINY

RANKS, STEPS = 3, 3
got: list[dict[str, Any]] = []


class Ranks(Callback):
    """Exchanges the rank in every way, and asks to stop on one rank."""

    exchanged = {"sum": "sum", "max": "max", "each": "each"}

    def numbers(self) -> dict[str, float]:
        return dict.fromkeys(self.exchanged, dist.get_rank())

    def after_step(self, step: TrainedStep) -> None:
        got.append(dict(step.numbers))
        if dist.get_rank() == 1 and step.iteration == STEPS - 1:
            self.run.stop("rank 1 has seen enough")


def train_watched(values: dict[str, Any]) -> tuple[Seen, Seen, list[dict[str, Any]]]:
    got.clear()
    return train({**values, "callbacks": (f"{__name__}:Ranks",)}), train(values), list(got)


def test_numbers_are_reduced_over_all_ranks(tmp_path: Path) -> None:
    values = {
        **TINY,
        "zero_preset": "zero3",
        "train_iters": STEPS + 2,
        "log_dir": str(tmp_path),
        "eval_iters": 0,
    }
    values |= {"micro_batch_size": 1, "global_batch_size": RANKS}
    for watched, plain, numbers in run_ranks(RANKS, train_watched, values):
        assert (
            numbers == [{"sum": 3.0, "max": 2.0, "each": (0.0, 1.0, 2.0)}] * STEPS
        )  # one rank's wish stops all
        assert watched.losses == plain.losses[:STEPS]
        scalars = [
            (more["scalar_intra_node"], less["scalar_intra_node"])
            for more, less in zip(watched.sent, plain.sent, strict=False)
        ]
        assert {more - less for more, less in scalars} == {3 * 8 * (RANKS - 1)}
