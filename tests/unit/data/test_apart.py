"""Train, validation and test data named apart: their mistakes, and what is evaluated when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megazero.config import ConfigError, make_config, parse
from megazero.log.curves import read_curves
from megazero.log.metrics import read_metrics
from megazero.train.trainer import Trainer
from tests.dist.runs import write_data
from tests.unit.train.test_seams import SMALL, run

BASE = {**SMALL, "model_family": "gpt", "mock_data": None, "train_iters": 2, "lr_warmup_iters": 0}


def errors(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config({**BASE, **changes})
    assert len(caught.value.errors) == 1
    return caught.value.errors[0]


def argv(*more: str) -> list[str]:
    words = [w for name, v in BASE.items() if v is not None for w in (f"--{name.replace('_', '-')}", str(v))]
    return [*words, *more]


def test_mistakes() -> None:
    for changes, part in (
        ({}, "exactly one of --data-path and --mock-data is required"),
        ({"data_path": ["a"], "train_data_path": ["b"]}, "exactly one of --data-path and --mock-data"),
        ({"valid_data_path": ["a"]}, "--valid-data-path needs --train-data-path"),
        ({"train_data_path": ["1", "a", "b"]}, "--train-data-path 1 a b must be PREFIX"),
    ):
        assert part in errors(**changes), changes
    config = parse(argv("--train-data-path", "a", "--split", "1", "--eval-iters", "1"))
    assert any(note.startswith("--split 1 has no effect") for note in config.notes)
    assert "no validation data is named: nothing is evaluated while training" in config.notes


def test_words_that_a_script_lost_are_one_mistake() -> None:
    """A variable that is empty leaves a flag without its words. No data set can be meant by it."""
    for words in (
        ["--data-path"],
        ["--train-data-path"],
        ["--train-data-path", "a", "--valid-data-path"],
    ):
        with pytest.raises(ConfigError) as caught:
            parse(argv(*words))
        (error,) = caught.value.errors
        assert error.startswith(f"{words[-1]} takes at least one value, got none") and "empty" in error
    with pytest.raises(ConfigError):
        parse(argv("--data-path", ""))


def test_each_part_is_evaluated_in_its_turn(tmp_path: Path) -> None:
    """Validation data while it trains, test data after the last iteration; a finished run evaluates nothing again."""
    one, two = (str(write_data(tmp_path / name, seed=i)) for i, name in enumerate("ab"))
    base = {
        **BASE,
        "train_data_path": ["0.4", one, "0.6", two],
        "seq_length": 12,
        "eval_iters": 1,
        "eval_interval": 2,
    }
    logged: list[dict[str, Any]] = []

    def watch(trainer: Trainer) -> None:
        trainer.outputs.loggers.log = lambda _, line: logged.append(line)  # type: ignore[method-assign]

    both = {**base, "valid_data_path": [one], "test_data_path": [two]}
    both |= {"save": str(tmp_path / "run"), "log_dir": str(tmp_path / "logs")}
    run(both, watch)
    run({**both, "load": both["save"]})
    lines = [line for line in read_metrics(tmp_path / "logs") if "eval_lm_loss" in line]
    assert [line.get("eval_data") for line in lines] == [None, "test"]
    tested = {"iteration": 2, "consumed_samples": 16, "eval_lm_loss": {"test": lines[1]["eval_lm_loss"]}}
    assert tested.items() <= {**logged[-1]}.items()
    assert {"eval_lm_loss", "eval_lm_loss test"} <= read_curves(tmp_path / "logs").keys()
    run({**base, "valid_data_path": [two], "log_dir": str(tmp_path / "alone")})
    assert (
        read_metrics(tmp_path / "alone")[-1]["eval_lm_loss"]
        == lines[1]["eval_lm_loss"]
        != lines[0]["eval_lm_loss"]
    )
