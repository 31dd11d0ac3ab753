"""--decoupled-lr on layouts and over resumes; --kill-switch-path, which one rank may be the only one to see."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megazero.ops.exit_conditions import NotStarted
from tests.dist.pool import run_ranks
from tests.dist.runs import Seen, train, train_each

APART = {"model_family": "gpt", "num_query_groups": None, "decoupled_lr": 3e-2, "decoupled_min_lr": 1e-3}


def losses(seen: list[Seen]) -> list[float]:
    """The global loss is the same on all ranks."""
    return [loss for _, loss in seen[0].losses]


@pytest.mark.slow
def test_layouts_and_a_resume_are_one_rank(tmp_path: Path) -> None:
    base = {**APART, "log_dir": str(tmp_path)}
    save = {"save": str(tmp_path / "run"), "exit_interval": 3}
    untied = {**base, "untie_embeddings_and_output_weights": True}
    pipeline = {"pipeline_model_parallel_size": 2}
    sharded = {"tensor_model_parallel_size": 2, "zero_preset": "zero3", "load": str(tmp_path / "run")}
    seen = train_each(
        {
            "tied": (1, base),
            "tied ends of a pipeline": (2, {**base, **pipeline, **save}),
            "untied": (1, untied),
            "untied ends": (2, {**untied, **pipeline}),
            "rest": (4, {**base, **sharded}),  # after the first three, by number of ranks
        }
    )
    tied = losses(seen["tied"])
    assert losses(seen["tied ends of a pipeline"]) == pytest.approx(tied[:3], rel=1e-5)
    assert losses(seen["rest"]) == pytest.approx(tied[3:], rel=1e-5)
    assert losses(seen["untied ends"]) == pytest.approx(losses(seen["untied"]), rel=1e-5)


def told(values: dict[str, Any], path: str, after: int) -> tuple[str, int]:
    """What ended the run, and its iterations. The last rank alone sees the file, after ``after`` looks."""
    exists, looks = os.path.exists, []

    def seen(name: Any) -> bool:
        if name != path:
            return exists(name)
        looks.append(name)
        return dist.get_rank() == dist.get_world_size() - 1 and len(looks) > after

    with patch("os.path.exists", seen):
        try:
            return "ended", len(train({**values, "kill_switch_path": path}).losses)
        except NotStarted as message:
            return str(message), 0


def test_one_rank_that_sees_the_kill_switch_stops_all(tmp_path: Path) -> None:
    values = {"log_dir": str(tmp_path / "logs"), "train_iters": 5}
    for after, iterations in ((0, 0), (1, 1), (3, 3), (99, 5)):
        for what, count in run_ranks(2, told, values, str(tmp_path / "kill"), after):
            assert count == iterations
            assert "the run does not begin; remove the file" in what or iterations
        assert (tmp_path / "logs").exists() == (after > 0)
