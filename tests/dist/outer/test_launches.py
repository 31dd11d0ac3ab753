"""Replicas that --outer-meet local:R starts: a stop, a start from where each stood, and a run that goes on alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megazero.log.exit_status import ExitStatus
from megazero.log.metrics import read_metrics
from tests.dist.runs import checkpoint_of, differences
from tests.sizes import TINY, words

SHARED = ("weights", "outer momentum")


def started(
    folder: Path, *flags: str, ranks: int = 1, alone: bool = False, status: int = ExitStatus.FINISHED
) -> str:
    """Start replicas, or a run alone, that save in ``folder``. Returns what it prints."""
    own = {name: value for name, value in TINY.items() if name not in ("train_iters", "lr_warmup_iters")}
    own |= {"save": folder / "saved", "log_dir": folder / "logs", "train_samples": 96, "global_batch_size": 4}
    meet = [] if alone else ["--outer-meet", "local:2", "--outer-interval", "4"]
    said = [*words(own), "--nproc-per-node", f"{ranks}", *meet, *flags]
    done = subprocess.run(
        [sys.executable, "-m", "megazero", "train", *said], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_replicas_of_one_machine(tmp_path: Path) -> None:
    """Stopped in the middle of an interval, and started again, they end with the same bits, and each checkpoint is a
    run's of its own: one goes on alone, behind the samples of both."""
    rounds = ("--outer-bits", "4", "--zero-preset", "zero3")
    assert "replaces the earlier" not in started(tmp_path / "straight", *rounds, ranks=2)
    stopped = tmp_path / "stopped"
    started(stopped, *rounds, "--exit-interval", "6", ranks=2, status=ExitStatus.STOPPED)
    started(stopped, *rounds, "--load", f"{stopped / 'saved'}", ranks=2)
    found = [checkpoint_of(tmp_path / "straight" / "saved" / f"replica{number}") for number in range(2)]
    for number, wanted in enumerate(found):
        assert not differences(wanted, checkpoint_of(stopped / "saved" / f"replica{number}"))
        assert {"exp_avg", "replica master", "outer residual", *SHARED} <= set(wanted)
    assert all(
        torch.equal(value, found[1][kind][name]) for kind in SHARED for name, value in found[0][kind].items()
    )
    lines = [each for each in read_metrics(stopped / "logs" / "replica1") if "lm_loss" in each]
    assert [each["iteration"] for each in lines if "norm" in each.get("outer", {})] == [4, 8, 12]
    assert lines[-1]["consumed_samples"] == 96 and lines[3]["outer"]["replicas"] == 2
    alone = tmp_path / "alone"
    said = started(alone, "--load", f"{stopped / 'saved' / 'replica0'}", "--train-samples", "112", alone=True)
    assert "goes on without other replicas" in said
    last = [each for each in read_metrics(alone / "logs") if "lm_loss" in each][-1]
    assert (last["iteration"], last["consumed_samples"]) == (16, 112)
