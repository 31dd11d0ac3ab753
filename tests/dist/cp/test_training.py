"""Whole runs whose ranks share samples: the samples, losses, evaluations and metrics of a run whose ranks do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megazero.log.metrics import read_metrics
from tests.dist.runs import samples, train_each, write_data
from tests.sizes import TINY

EOD = 50  # NullTokenizer's is its --vocab-size
# Documents end within samples, so that shards have unlike masks.
MASKED = {
    "eod_mask_loss": True,
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": EOD,
}
EQUAL = ("iteration", "consumed_samples", "batch_size", "learning_rate")


def base(tmp_path: Path, **more: Any) -> dict[str, Any]:
    data = write_data(tmp_path / "data", end=EOD)
    values = {"mock_data": None, "data_path": (data,), "split": "80,20,0", **MASKED}
    values |= {"eval_iters": 2, "eval_interval": 2, "train_iters": 6}
    return values | more


def check(
    tmp_path: Path, changes: dict[str, Any], legs: list[tuple[int, int | None, dict[str, Any]]]
) -> None:
    """legs: ranks, the iteration to stop at, and options of each part of the run."""
    given = base(tmp_path, **changes)
    (tmp_path / "stayed").mkdir(), (tmp_path / "moved").mkdir()
    run = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run"), "log_dir": str(tmp_path / "moved")}
    stayed = train_each({0: (legs[0][0], {**given, "log_dir": str(tmp_path / "stayed")})})[0]
    moved = []
    for ranks, stop, options in legs:
        moved.append(train_each({0: (ranks, {**given, **run, **options, "exit_interval": stop})})[0])
    assert sum(map(samples, moved), []) == samples(stayed)
    for what in ("losses", "evaluations"):
        got = [each for leg in moved for each in getattr(leg[0], what)]
        wanted = getattr(stayed[0], what)
        assert len(got) == len(wanted) > 2
        for one, other in zip(got, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-5), (what, got, wanted)
    logs = [read_metrics(tmp_path / folder) for folder in ("moved", "stayed")]
    curves = [[line for line in log if "lm_loss" in line] for log in logs]
    for key in EQUAL:
        assert len({tuple(line[key] for line in curve) for curve in curves}) == 1, key
    for curve in curves:
        for line in curve:  # tokens of the global batch, once
            tokens = line["batch_size"] * TINY["seq_length"]
            assert line["tokens_per_s"] * line["iteration_time_s"] == pytest.approx(tokens)


@pytest.mark.slow
def test_a_run_goes_on_over_other_numbers_of_ranks_that_share_samples(tmp_path: Path) -> None:
    gathered = {"cp_comm_type": ("all_gather",), "zero_preset": "zero3"}
    shared = [
        {"context_parallel_size": 2, **gathered},
        {"context_parallel_size": 4, "cp_comm_type": ("a2a",)},
    ]
    check(tmp_path, {}, [(2, 2, shared[0]), (4, 4, shared[1]), (2, None, {})])


@pytest.mark.slow
def test_with_pipelines_and_tensors(tmp_path: Path) -> None:
    pipelined = {"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}
    tensors = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    tensors["cp_comm_type"] = ("all_gather",)
    check(tmp_path, {"num_layers": 4}, [(4, 2, pipelined), (4, 4, tensors), (1, None, {})])


@pytest.mark.slow
def test_keys_that_cross_nodes_in_eight_bits(tmp_path: Path) -> None:
    """A recompute gathers the same bits; the loss is near that of exact keys, and not the same."""
    shared = {
        "context_parallel_size": 2,
        "cp_comm_type": ("all_gather",),
        "ranks_per_node": 1,
        "eval_iters": 0,
    }
    shared |= {"cp_gather_bits": 8, "log_dir": str(tmp_path)}
    jobs = {
        again: (2, {**base(tmp_path), **shared, "recompute_granularity": again})
        for again in ("none", "selective", "full")
    }
    jobs["exact"] = (2, {**base(tmp_path), **shared, "cp_gather_bits": None})
    losses = {name: ranks[0].losses for name, ranks in train_each(jobs).items()}
    assert losses["none"] == losses["selective"] == losses["full"] != losses["exact"]
    for one, other in zip(losses["none"], losses["exact"], strict=True):
        assert one == pytest.approx(other, rel=1e-3)
