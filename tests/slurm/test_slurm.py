"""pretrain/slurm/pretrain.sbatch on a real SLURM, as it stands: stopped, preempted, robbed of a node, it comes back.

make slurm-test runs these (some minutes; slurm-wlm and munge installed, as root).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.dist.runs import TINY
from tests.slurm.cluster import Cluster, until

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "pretrain" / "slurm" / "pretrain.sbatch"
ITERATIONS = 150
FLAGS = {
    **{name: value for name, value in TINY.items() if name != "mock_data"},
    "model_family": "llama",
    "train_iters": ITERATIONS,
    "lr_decay_iters": ITERATIONS,
    "save_interval": 40,
    "log_interval": 50,
}


def words() -> list[str]:
    return [
        "--mock-data",
        *(w for name, value in FLAGS.items() for w in (f"--{name.replace('_', '-')}", str(value))),
    ]


def submit(slurm: Cluster, folder: Path, *options: str) -> int:
    environ = {"RUN": str(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    sizes = ("--nodes=2", "--ntasks-per-node=2", f"--output={folder}-%j.out")
    return slurm.submit(SCRIPT, words(), options=(*sizes, *options), environ=environ)


def iterations(folder: Path) -> int:
    metrics = folder / "logs" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def curve(folder: Path) -> dict[int, float]:
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == len({row["iteration"] for row in rows}), "an iteration is there twice"
    return {row["iteration"]: row["lm_loss"] for row in rows}


@pytest.fixture(scope="module")
def whole(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    job = slurm.wait(submit(slurm, folder))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), folder.with_name("run").parent
    return curve(folder)


def stop_by_signal(slurm: Cluster, number: int) -> None:
    slurm.call("scancel", "--signal=USR1", str(number))


def stop_through_the_script(slurm: Cluster, number: int) -> None:
    slurm.call("scancel", "--batch", "--signal=USR1", str(number))


def kill_a_rank(slurm: Cluster, number: int) -> None:
    slurm.call(
        "srun", f"--jobid={number}", "--overlap", "-N1", "-n1", "-w", "node1", "pkill", "-9", "-n", "python"
    )


def lose_a_node(slurm: Cluster, number: int) -> None:
    slurm.lose(1)
    slurm.bring_back(1)


def requeue(slurm: Cluster, number: int) -> None:
    slurm.call("scontrol", "requeue", str(number))


@pytest.mark.parametrize(
    "happens", [stop_by_signal, stop_through_the_script, kill_a_rank, lose_a_node, requeue]
)
def test_a_job_comes_back_and_its_curve_is_whole(slurm, whole, tmp_path, happens) -> None:
    number = submit(slurm, tmp_path / "run")
    until(lambda: iterations(tmp_path / "run") > 50, 120, lambda: "the run does not begin")
    happens(slurm, number)
    job = slurm.wait(number, timeout=240)
    log = (tmp_path / f"run-{number}.out").read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log
    assert curve(tmp_path / "run") == whole


def test_preempted_with_grace_it_saves_and_comes_back(slurm, whole, tmp_path) -> None:
    number = submit(slurm, tmp_path / "run", "--partition=graceful")
    until(lambda: iterations(tmp_path / "run") > 50, 120, lambda: "the run does not begin")
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    slurm.wait(slurm.submit(urgent, options=("--partition=urgent", "--nodes=2", "--exclusive")))
    job = slurm.wait(number, timeout=240)
    assert job["JobState"] == "COMPLETED" and int(job["Restarts"]) >= 1
    assert curve(tmp_path / "run") == whole


def test_a_mistake_is_not_tried_again(slurm, tmp_path) -> None:
    number = submit(slurm, tmp_path / "run")
    until(lambda: iterations(tmp_path / "run") > 0, 120, lambda: "the run does not begin")
    slurm.call("scancel", str(number))
    slurm.wait(number)
    environ = {"RUN": str(tmp_path / "other"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    wrong = slurm.submit(
        SCRIPT, [*words(), "--lr", "-1"], options=("--nodes=2", "--ntasks-per-node=2"), environ=environ
    )
    job = slurm.wait(wrong)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
