"""Stages of training: mixtures, lengths and batches that change on the way, on any layout and over restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megazero.log.metrics import read_metrics
from tests.dist.pool import run_ranks
from tests.dist.runs import checkpoint_of, differences, refusal, samples, train_each, write_data
from tests.messages import names

BATCHES = [8, 8, 4, 4, 8, 8, 8]
LENGTHS = [16, 16, 24, 24, 32, 32, 32]
LAYOUTS = {
    "dp 2": (2, {"zero_preset": "zero3", "micro_batch_size": 2}),
    "cp 2": (2, {"context_parallel_size": 2, "cp_comm_type": ("all_gather",), "micro_batch_size": 2}),
    "pp 2 x tp 2": (4, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "pp 2 x tp 2, sequence": (
        4,
        {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
}


def values(tmp_path: Path) -> dict:
    """Three stages: 8 samples of 16 tokens, 8 of 24 in batches of 4, and the rest of 32 of another mixture."""
    one, two = (write_data(tmp_path / f"data{seed}", seed=seed, documents=60) for seed in (1, 2))
    stages = (
        {"until": 16, "seq-length": 16, "data-path": one},
        {"until": 24, "seq-length": 24, "data-path": one, "global-batch-size": 4},
        {"data-path": ["0.3", one, "0.7", two]},
    )
    return {
        "mock_data": None,
        "valid_data_path": (one,),
        "data_stages": tuple(map(json.dumps, stages)),
        "seq_length": 32,
        "train_iters": 7,
        "eval_interval": 4,
        "eval_iters": 1,
        "log_dir": str(tmp_path / "logs"),
    }


def test_layouts_and_restarts_train_as_one_rank_does(tmp_path: Path) -> None:
    """A run broken off in each stage has the uninterrupted one's bits; other layouts have its samples and losses."""
    base = values(tmp_path)
    alone = {**base, "save": str(tmp_path / "alone"), "log_dir": str(tmp_path / "alone_logs")}
    seen = train_each({"alone": (1, alone), **{name: (n, {**base, **v}) for name, (n, v) in LAYOUTS.items()}})
    wanted = seen["alone"]
    assert [sum(map(len, step)) for step in wanted[0].ids] == BATCHES
    assert len({text for _, text in samples(wanted)}) == sum(BATCHES)
    for name, every in seen.items():
        for (_, one), (_, other) in zip(wanted[0].losses, every[0].losses, strict=True):
            assert one == pytest.approx(other, rel=2e-6), name
        assert wanted[0].evaluations == pytest.approx(every[0].evaluations, rel=2e-6), name
        if "cp" not in name:  # whose ranks are fed whole samples, too, but share them
            assert samples(every) == samples(wanted), name
    lines = read_metrics(tmp_path / "alone_logs")
    lines = [line for line in lines if "lm_loss" in line]
    tokens = [batch * length for batch, length in zip(BATCHES, LENGTHS, strict=True)]
    assert [line["tokens_left"] for line in lines] == [sum(tokens[i + 1 :]) for i in range(7)]
    assert [round(line["tokens_per_s"] * line["iteration_time_s"]) for line in lines] == tokens

    broken = {**base, "save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    losses = []
    for stop in (1, 3, 4, 6, None):  # within each stage, and at the end of one
        (leg,) = train_each({stop: (1, {**broken, "exit_interval": stop})}).values()
        losses += leg[0].losses
    assert tuple(losses) == wanted[0].losses
    assert not differences(checkpoint_of(tmp_path / "run"), checkpoint_of(tmp_path / "alone"))


def test_a_run_goes_on_in_stages_and_too_little_data_is_named(tmp_path: Path) -> None:
    """A stage has the samples of a run alone on its data; one that the run gets later leaves what was trained."""
    base = values(tmp_path)
    one = json.loads(base["data_stages"][0])["data-path"]
    plain = {**base, "data_stages": (), "train_data_path": (one,), "seq_length": 32, "train_iters": 4}
    added = {**plain, "train_iters": 6, "data_stages": ('{"until": 32}', json.dumps({"seq-length": 16}))}
    run = str(tmp_path / "run")
    seen = train_each({"plain": (1, plain), "first": (1, {**plain, "exit_interval": 2, "save": run})})
    seen |= train_each({"added": (1, {**added, "load": run})})
    assert samples(seen["first"]) + samples(seen["added"])[:16] == samples(seen["plain"])
    assert any("--data-stages was" in note for note in seen["added"][0].notes)
    uneven = {**added, "load": run, "data_stages": ('{"until": 30}', "{}")}
    (text,) = run_ranks(1, refusal, uneven)
    names(text, "until 30", "24 or 32")
    both = json.dumps({"until": 4000, "data-path": [one, one]})
    (text,) = run_ranks(1, refusal, {**plain, "train_iters": 600, "data_stages": (both, "{}")})
    names(text, "train data", "until 4000 of --data-stages to at most")
