"""Train, validation and test data named apart: their forms, files and mistakes; evaluations under their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megazero.config import ConfigError, make_config, parse
from megazero.config.options.data_inputs import parse_weighted_split
from megazero.log.metrics import read_metrics
from megazero.log.plot import plot_loss
from megazero.train.trainer import Trainer
from tests.dist.runs import write_data
from tests.unit.train.test_seams import SMALL, run

BASE = {**SMALL, "model_family": "gpt", "mock_data": None, "train_iters": 2, "lr_warmup_iters": 0}
GROUP = "EN: 0.3 0:0.6 a, 0.7 0.5:1 b"


def errors(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_config({**BASE, **changes})
    assert len(caught.value.errors) == 1
    return caught.value.errors[0]


def argv(*more: str) -> list[str]:
    words = [w for name, v in BASE.items() if v is not None for w in (f"--{name.replace('_', '-')}", str(v))]
    return [*words, *more]


def test_files_stand_for_their_words(tmp_path: Path) -> None:
    """The resolved configuration has the words, so that a checkpoint says what it was trained on."""
    files = {
        "t.txt": f'"{GROUP}"\n',
        "v.txt": f'"{GROUP}" "AR: 1 0:1 c"\n',
        "bare.txt": GROUP.replace(", ", ",\n  ") + "\n\nAR: 1 0:1 c\n",  # without quotes: a group each line
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    where = {name: str(tmp_path / name) for name in files}
    flags = ["--train-weighted-split-paths-path", where["t.txt"]]
    flags += ["--valid-weighted-split-paths-path", where["v.txt"]]
    data = parse(argv(*flags)).data
    assert data.train_weighted_split_paths == (GROUP,) and data.train_weighted_split_paths_path is None
    assert data.valid_weighted_split_paths == (GROUP, "AR: 1 0:1 c")
    bare = parse(argv(*flags[:2], "--valid-weighted-split-paths-path", where["bare.txt"])).data
    assert [" ".join(group.split()) for group in bare.valid_weighted_split_paths] == [GROUP, "AR: 1 0:1 c"]
    config = parse(argv(*flags, "--split", "1"))
    assert any(note.startswith("--split 1 has no effect") for note in config.notes)
    assert make_config(dict(config.values())).data == config.data  # what was resolved resolves to itself


def test_mistakes(tmp_path: Path) -> None:
    for name, text in {
        "open": '"EN: 1 0:1 a',
        "empty": "",
        "bare": "EN: 1 0:1 a,\n 1 0:0.5 b\n\nFR: 1 0:1 c\n",
    }.items():
        (tmp_path / name).write_text(text)
    path = {name: str(tmp_path / name) for name in ("open", "empty", "bare", "absent")}
    for changes, part in (
        ({}, "exactly one of --data-path and --mock-data is required"),
        ({"data_path": ["a"], "train_data_path": ["b"]}, "exactly one of --data-path and --mock-data"),
        ({"train_data_path": ["a"], "train_weighted_split_paths": [GROUP]}, "exactly one of --data-path"),
        ({"valid_data_path": ["a"]}, "--valid-data-path needs --train-data-path"),
        ({"test_weighted_split_paths": [GROUP]}, "needs --train-weighted-split-paths"),
        ({"train_data_path": ["1", "a", "b"]}, "--train-data-path 1 a b must be PREFIX"),
        ({"train_weighted_split_paths": [GROUP, "B: 1 0:1 b"]}, "takes one value"),
        (
            {"train_weighted_split_paths": [GROUP], "valid_weighted_split_paths": [GROUP, GROUP]},
            "--valid-weighted-split-paths has the name EN twice",
        ),
        ({"train_weighted_split_paths": ["EN: 1 0:1"]}, "must be NAME: WEIGHT START:END PREFIX"),
        ({"train_weighted_split_paths": ["1 0:1 a"]}, "must be NAME: WEIGHT START:END PREFIX"),
        ({"train_weighted_split_paths": ["E: 1 0.6:0.5 a"]}, "0.6:0.5 of a must be START:END"),
        ({"train_weighted_split_paths": ["E: 1 0:2 a"]}, "nearest: 0:1"),
        ({"train_weighted_split_paths": ["E: 0 0:1 a"]}, "weight 0 of a must be above 0"),
        ({"train_weighted_split_paths_path": path["absent"]}, "absent cannot be read: No such file"),
        ({"train_weighted_split_paths_path": path["open"]}, "open: No closing quotation"),
        ({"train_weighted_split_paths_path": path["empty"]}, "empty names no data"),
        (
            {
                "train_weighted_split_paths": [GROUP],
                "valid_weighted_split_paths": [GROUP],
                "valid_weighted_split_paths_path": path["bare"],
            },
            "and --valid-weighted-split-paths exclude each other",
        ),
    ):
        assert part in errors(**changes), changes
    for name, text, problem in (
        ("train_weighted_split_paths_path", path["bare"], "bare: takes one value"),
        ("valid_weighted_split_paths_path", "E: 1 0:2 a", "split: 0:2 of a must be START:END"),
        ("valid_weighted_split_paths_path", "'E: 1 0:1 a' 1", "split: '1' must be NAME"),
    ):
        (tmp_path / "split").write_text(text)
        file = text if text == path["bare"] else str(tmp_path / "split")
        train = {"train_weighted_split_paths": [GROUP]} if name.startswith("valid") else {}
        assert f"--{name.replace('_', '-')} {tmp_path}/{problem}" in errors(**{name: file, **train}), text
    assert parse_weighted_split("a b: 1 0:1 x:y")[1].prefixes == ("x:y",)


def test_words_that_a_script_lost_are_one_mistake() -> None:
    """A variable that is empty leaves a flag without its words. No data set can be meant by it."""
    for words in (
        ["--data-path"],
        ["--train-data-path"],
        ["--train-data-path", "a", "--valid-data-path"],
        ["--train-weighted-split-paths"],
    ):
        with pytest.raises(ConfigError) as caught:
            parse(argv(*words))
        (error,) = caught.value.errors
        assert error.startswith(f"{words[-1]} takes at least one value, got none") and "empty" in error
    for words in (["--data-path", ""], ["--train-weighted-split-paths", "T: 1 0:1 "]):
        with pytest.raises(ConfigError):
            parse(argv(*words))


def test_each_evaluation_has_its_name(tmp_path: Path) -> None:
    """Groups are evaluated apart, as each alone; test data after the last iteration; a finished run not again."""
    one, two = (write_data(tmp_path / name, seed=i) for i, name in enumerate("ab"))
    train = {"train_weighted_split_paths": [f"all: 0.4 0:0.5 {one}, 0.6 0:0.5 {two}"]}
    valid = [f"A: 1 0.5:1 {one}", f"B: 1 0.5:1 {two}", f"AB: 1 0.5:1 {one}, 1 0.5:1 {two}"]
    base = {**BASE, **train, "seq_length": 12, "eval_iters": 1, "eval_interval": 2}
    logged: list[dict[str, Any]] = []

    def watch(trainer: Trainer) -> None:
        trainer.outputs.loggers.log = lambda _, line: logged.append(line)  # type: ignore[method-assign]

    both = {**base, "valid_weighted_split_paths": valid, "test_weighted_split_paths": [valid[0], valid[2]]}
    both |= {"save": str(tmp_path / "run"), "log_dir": str(tmp_path / "logs")}
    run(both, watch)
    run({**both, "load": both["save"]})
    lines = [line for line in read_metrics(tmp_path / "logs") if "eval_lm_loss" in line]
    assert [line["eval_data"] for line in lines] == ["A", "B", "AB", "test/A", "test/AB"]
    losses = {line["eval_data"]: line["eval_lm_loss"] for line in lines}
    assert len({losses["A"], losses["B"], losses["AB"]}) == 3
    assert (losses["A"], losses["AB"]) == (losses["test/A"], losses["test/AB"])
    assert {"iteration": 2, "consumed_samples": 16, "eval_lm_loss": {"B": losses["B"]}}.items() <= {
        **logged[3]
    }.items()
    plot_loss([tmp_path / "logs"], tmp_path / "loss.png")
    for name, group in zip(("A", "B", "AB"), valid, strict=True):
        run({**base, "valid_weighted_split_paths": [group], "log_dir": str(tmp_path / name)})
        alone = read_metrics(tmp_path / name)[-1]
        assert (alone["eval_data"], alone["eval_lm_loss"]) == (name, losses[name])
