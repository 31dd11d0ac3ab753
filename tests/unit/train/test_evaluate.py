"""``megazero evaluate`` measures what the run itself measured, on the same samples, and tells mistakes at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megazero.cli import main
from megazero.config import ConfigError, World
from megazero.log.metrics import METRICS_FILE
from megazero.mesh.launch import Launch
from megazero.train.evaluate_command import _leave, evaluation_config
from tests import ROOT
from tests.sizes import TINY, words

RUN = {**TINY, "eval_iters": 2, "eval_interval": 6, "optimizer": "adamw"}


def megazero(*argv: str) -> str:
    """The standard output of a command on this tree."""
    done = subprocess.run(
        [sys.executable, "-m", "megazero", *argv],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    megazero("train", *words(RUN), "--save", f"{folder}/c", "--log-dir", f"{folder}/logs")
    return folder


@pytest.mark.first(1)
@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        "--eval-global-batch-size 4 --eval-iters 4",
        "--nproc-per-node 2 --zero-preset zero3",
        "--nproc-per-node 2 --tensor-model-parallel-size 2",
    ],
)
def test_any_layout_measures_the_loss_of_the_runs_own_evaluation(layout: str, run: Path) -> None:
    said = [*words(RUN), "--save", f"{run}/c", "--log-dir", f"{run}/none", "--load", f"{run}/c"]
    (line,) = re.findall(
        r"^valid \| loss (.*?) \|", megazero("evaluate", *said, *layout.split()), re.MULTILINE
    )
    lines = [json.loads(each) for each in (run / "logs" / METRICS_FILE).read_text().splitlines()]
    (own,) = [each["eval_lm_loss"] for each in lines if "eval_lm_loss" in each]
    assert float(line) == pytest.approx(own, abs=2e-6)
    assert not (run / "none").exists()


@pytest.mark.long
def test_the_model_and_the_length_come_from_the_checkpoint(run: Path) -> None:
    config = evaluation_config(
        ["--load", f"{run}/c", "--mock-data", "--zero-preset", "zeropp", "--global-batch-size", "8"],
        World(4, 2),
    )
    assert config.model.seq_length == TINY["seq_length"] and config.optimizer.optimizer == "sgd"
    assert config.zero.zero_preset == "zeropp" and not config.wire(World(4, 2)).codings


def test_no_batches_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        evaluation_config(["--mock-data", "--load", f"hf:{tmp_path}", "--eval-iters", "0"], World(1, 1))
    assert error.value.errors == ("--eval-iters 0 measures nothing; nearest: --eval-iters 1",)


def test_without_a_checkpoint_that_is_the_only_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        evaluation_config(["--mock-data"], World(1, 1))
    assert error.value.errors == ("--load is required: a folder of --save, or hf:DIR",)
    with pytest.raises(ConfigError) as error:
        evaluation_config(["--mock-data", "--load", f"{tmp_path}/none"], World(1, 1))
    assert len(error.value.errors) == 1 and f"{tmp_path}/none" in error.value.errors[0]
    assert main(["evaluate", "--mock-data", "--nope"]) == 2
    assert "--nope does not exist" in capsys.readouterr().err
    assert main(["evaluate", "--help"]) == 0


def test_a_mistake_is_told_by_one_rank_that_knows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the first rank knows nothing of it."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("os._exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    said = []
    for rank, text in ((1, "no such data"), (0, "no such data"), (2, "no such data"), (0, "no tokenizer")):
        with pytest.raises(SystemExit) as ended:
            _leave(Launch(rank=rank, world_size=3), ValueError(text))
        assert ended.value.code == 2
        said.append(capsys.readouterr().err)
    assert said == ["error: rank 1: no such data\n", "", "", "error: no tokenizer\n"]
