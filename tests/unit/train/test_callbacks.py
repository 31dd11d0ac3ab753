"""Callbacks of a user: their moments, their metrics and their state, and errors that name them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.checkpoint import store
from megazero.config import ConfigError, make_config, parse
from megazero.log.metrics import read_metrics
from megazero.ops.failures import RankFailure, readable_failures
from megazero.train.callbacks.callback import Callback, TrainedStep
from megazero.train.callbacks.chain import CallbackError, Callbacks
from megazero.train.callbacks.users import make_callbacks
from tests.messages import refused
from tests.sizes import LEAST, TINY
from tests.unit.train.test_seams import SMALL, run

HERE = __name__
seen: list[tuple[str, Any]] = []


class Noting(Callback):
    """Notes every moment. It counts steps over restarts."""

    exchanged = {"half": "sum", "most": "max"}

    def __init__(self, every: int = 1) -> None:
        self.every, self.steps = every, 0

    def start(self) -> None:
        seen.append(("start", self.run.progress.iteration))

    def before_step(self, iteration: int) -> None:
        seen.append(("before_step", iteration))

    def numbers(self) -> dict[str, float | torch.Tensor]:
        return {"half": torch.tensor(0.5), "most": self.steps}

    def after_step(self, step: TrainedStep) -> dict[str, Any]:
        assert step.numbers == {"half": 0.5, "most": self.steps}
        self.steps += 1
        return {"steps_of_all_starts": self.steps}

    def logged(self, metrics: Any) -> None:
        seen.append(("logged", metrics.extra["steps_of_all_starts"]))

    def evaluate(self) -> dict[str, float]:
        return {"answer": 42.0}

    def evaluated(self, at: Any, name: str, loss: float) -> None:
        seen.append(("evaluated", (at.iteration, name)))

    def saved(self, iteration: int, path: Path, seconds: float) -> None:
        seen.append(("saved", path.name))

    def closing(self) -> None:
        seen.append(("closing", self.run.progress.iteration))

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state(self, state: Any) -> None:
        self.steps = state["steps"]


class Failing(Callback):
    def __init__(self, moment: str) -> None:
        setattr(self, moment, self.fail)

    def fail(self, *_: Any) -> Any:
        raise KeyError("mine")


class Metric(Callback):
    def __init__(self, name: str, value: Any = 1.0) -> None:
        self.name, self.value = name, value

    def after_step(self, step: TrainedStep) -> dict[str, Any]:
        return {self.name: self.value}


class Undeclared(Callback):
    exchanged = {"one": "sum"}


class Averaging(Callback):
    exchanged = {"one": "mean"}


def test_moments_come_in_order_and_state_survives_a_restart(tmp_path: Path) -> None:
    values = {
        **SMALL, "train_iters": 3, "log_dir": str(tmp_path), "save": str(tmp_path / "run"), "save_interval": 2,
        "load": str(tmp_path / "run"), "eval_interval": 2, "eval_iters": 1, "callbacks": (f"{HERE}:Noting",),
    }  # fmt: skip
    seen.clear()
    run({**values, "exit_interval": 2})
    assert seen == [
        ("start", 0), ("before_step", 1), ("logged", 1), ("before_step", 2), ("logged", 2), ("evaluated", (2, "")),
        ("saved", "iter_0000002"), ("closing", 2),
    ]  # fmt: skip
    seen.clear()
    run(values)
    assert seen[:3] == [("start", 2), ("before_step", 3), ("logged", 3)]
    assert store.read_state(tmp_path / "run" / "iter_0000003")["callbacks"] == {
        f"{HERE}:Noting": {"steps": 3}
    }
    lines = read_metrics(tmp_path)
    assert [line["steps_of_all_starts"] for line in lines if "lm_loss" in line] == [1, 2, 3]
    assert [line["iteration"] for line in lines if line.get("answer") == 42.0] == [2]
    notes: list[str] = []
    run({**values, "train_iters": 4, "callbacks": ()}, lambda trainer: notes.extend(trainer.progress.notes))
    assert any(f"{HERE}:Noting" in note and "does not name" in note for note in notes)
    assert not store.read_state(tmp_path / "run" / "iter_0000004").get("callbacks")


@pytest.mark.parametrize("moment", ["start", "before_step", "numbers", "after_step", "logged", "closing"])
def test_an_error_of_a_moment_names_the_callback(tmp_path: Path, moment: str) -> None:
    word = f'{HERE}:Failing {{"moment": "{moment}"}}'
    with pytest.raises(
        CallbackError, match=rf"--callbacks {HERE}:Failing: {moment}: KeyError: 'mine' \(.*py:\d+\)"
    ):
        run({**SMALL, "train_iters": 1, "lr_warmup_iters": 0, "log_dir": str(tmp_path), "callbacks": (word,)})


@pytest.mark.parametrize(
    "word, said",
    [
        ('Metric {"name": "lm_loss"}', "a metric has this name already: ['lm_loss']"),
        ('Metric {"name": "bytes"}', "a metric has this name already: ['bytes']"),
        ('Metric {"name": "x", "value": {"y": NaN}}', None),
        ("Undeclared", "numbers: ValueError: it returned [], but exchanges ['one']"),
    ],
)
def test_metrics_keep_to_their_names(tmp_path: Path, word: str, said: str | None) -> None:
    values = {
        **SMALL,
        "train_iters": 1,
        "lr_warmup_iters": 0,
        "log_dir": str(tmp_path),
        "callbacks": (f"{HERE}:{word}",),
    }
    if said is None:
        run(values)
        assert read_metrics(tmp_path)[0]["x"]["y"] != 0
        return
    with pytest.raises(CallbackError) as error:
        run(values)
    assert said in f"{error.value}"


def test_a_lost_rank_stays_one(tmp_path: Path) -> None:
    """A collective that fails inside a callback is the loss of a rank, not a mistake of the callback."""

    class Asking(Callback):
        def before_step(self, iteration: int) -> None:
            raise torch.distributed.DistNetworkError("Connection closed by peer [10.0.0.1]:1")

    with (
        pytest.raises(RankFailure),
        readable_failures(rank=0, host="a", timeout_s=1.0, phase=lambda: "iteration 1"),
    ):
        Callbacks(users={"a:Asking": Asking()}).tell(Callback.before_step, 1)


def test_a_class_may_be_named_twice() -> None:
    word = f'{HERE}:Noting {{"every": 2}}'
    made = make_callbacks([f"{HERE}:Noting", word])
    assert [*made] == [f"{HERE}:Noting", f"{HERE}:Noting#2"]
    assert [each.every for each in made.values()] == [1, 2]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "word, said",
    [
        (
            "no_such_module:Name",
            "there is no module no_such_module: install it, or add its folder to PYTHONPATH",
        ),
        (f"{HERE}:Notign", "Notign does not exist"),
        (f"{HERE}:Notign", "nearest: Noting"),
        (f"{HERE}:make_config", "make_config is no subclass of"),
        (f'{HERE}:Noting {{"evry": 2}}', "takes no option 'evry'; nearest: every"),
        (f"{HERE}:Failing", "cannot be made: TypeError"),
        (f"{HERE}:Averaging", "exchanges 'one' as 'mean', which is not one of sum, max, each"),
        (
            "broken_callbacks:Name",
            "the import fails: NameError: name 'nothing' is not defined (broken_callbacks.py:1)",
        ),
    ],
)
def test_a_callback_that_cannot_be_made_is_named(
    tmp_path: Path, word: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_callbacks.py").write_text("nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_callbacks", raising=False)
    with pytest.raises(ValueError) as error:
        make_callbacks([word])
    assert f"--callbacks {word.split()[0]}" in f"{error.value}"
    assert said in f"{error.value}".replace(f"{tmp_path}/", "")


def test_words_of_flags_and_of_yaml_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"callbacks": ["a.b:C", {"a:D": {"every": 2}}]}))
    words = f"{LEAST} --micro-batch-size 1 --train-iters 1".split()
    both = parse([*words, "--config", str(file)]), parse([*words, "--callbacks", "a.b:C", 'a:D {"every": 2}'])
    assert both[0].logging.callbacks == both[1].logging.callbacks == ("a.b:C", 'a:D {"every": 2}')
    again = make_config({**TINY, "callbacks": both[0].to_dict()["logging"]["callbacks"]})
    assert again.logging.callbacks == both[0].logging.callbacks


@pytest.mark.parametrize("word", ["a.b", "a:b:c", "a.b:C {", "a.b:C {'every': 2}", "a:B 3", "", "a b:C"])
def test_other_words_are_refused(word: str) -> None:
    with refused("--callbacks", by=ConfigError):
        make_config({**TINY, "callbacks": (word,)})
