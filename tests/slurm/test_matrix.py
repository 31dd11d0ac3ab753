"""Whatever happens to a job, at start-up, in a step, a save or an evaluation: what becomes of it, and of the curve.

    python -m pytest -m slow tests/slurm/test_matrix.py -k "scancel or requeue"

Four jobs run side by side, one for each moment, in which their ranks wait until it has happened (pausing.py). Each
event takes one to three minutes on 2 cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.slurm.cluster import OVER, Cluster, until
from tests.slurm.jobs import curve, log, nodes_of, submit, words
from tests.slurm.pausing import EVALUATION, MOMENTS, SAVE

pytestmark = pytest.mark.slow
FLAGS = {
    "train_iters": 60,
    "lr_decay_iters": 60,
    "save_interval": SAVE // 2,
    "eval_interval": EVALUATION,
    "eval_iters": 3,
    "log_interval": 10,
}


@dataclass
class Case:
    """One run, whose job waits at a moment. programs: a folder before others in PATH, and of jobs' output."""

    slurm: Cluster
    programs: Path
    folder: Path
    number: int = 0

    def start(self, *options: str, nodes: int = 2, **changed: Any) -> None:
        """Submit the job, or another one of the same run. changed: flags, and variables in capitals."""
        environ = {name: str(changed.pop(name)) for name in list(changed) if name.isupper()}
        path = f"{self.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        sizes = (f"--nodes={nodes}", "--ntasks-per-node=1", "--time=20", "--signal=USR1@5")
        sizes += (f"--output={self.programs}/{self.folder.name}-%j.out",)
        self.number = submit(
            self.slurm,
            self.folder,
            *(*sizes, *options),
            flags=words(**{**FLAGS, **changed}),
            environ={"PATH": path, **environ},
        )

    @property
    def log(self) -> str:
        return log(self.programs / self.folder.name)

    def there(self) -> None:
        """Wait until a rank is at the moment."""
        until(lambda: any(self.folder.glob("at-*")), 200, lambda: f"it never comes there: {self.log}")

    def go(self) -> None:
        (self.folder / "go").touch()

    def end(self) -> dict[str, str]:
        return self.slurm.wait(self.number, timeout=300)

    def inside(self, which: int, *command: str) -> None:
        """Run a command on a node of the job, outside of SLURM."""
        node = self.slurm.lab.members[nodes_of(self.slurm, self.number)[which] + 1]
        subprocess.run([*node.inside, *command], check=True)


def preempted_with_grace(case: Case, moment: str) -> None:
    case.start("--partition=graceful", MOMENT=moment)
    case.there()
    case.slurm.preempt(case.number, case.folder)
    case.go()


def preempted_without_grace(case: Case, moment: str) -> None:
    case.start(MOMENT=moment)
    case.there()
    case.slurm.preempt(case.number, case.folder)
    case.go()


def time_limit(case: Case, moment: str) -> None:
    case.start(MOMENT=moment)
    case.there()
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 15))
    case.slurm.call("scontrol", "update", f"JobId={case.number}", f"EndTime={end}")
    case.slurm.wait(case.number, "PENDING", *OVER)
    case.slurm.call("scontrol", "update", f"JobId={case.number}", "TimeLimit=20")
    case.go()


def requeue(case: Case, moment: str) -> None:
    case.start(MOMENT=moment)
    case.there()
    case.slurm.call("scontrol", "requeue", str(case.number))
    case.go()


def scancel(case: Case, moment: str) -> None:
    """The same is submitted again."""
    case.start(MOMENT=moment)
    case.there()
    case.slurm.call("scancel", str(case.number))
    assert case.end()["JobState"] == "CANCELLED"
    case.go()
    case.start()


def worker_node_lost(case: Case, moment: str) -> None:
    _lose(case, moment, 1)


def first_node_lost(case: Case, moment: str) -> None:
    """That of rank 0 and of the batch script."""
    _lose(case, moment, 0)


def _lose(case: Case, moment: str, which: int) -> None:
    case.start(MOMENT=moment)
    case.there()
    node = nodes_of(case.slurm, case.number)[which]
    case.slurm.lose(node)
    case.slurm.bring_back(node)
    case.go()


def two_nodes_to_one_and_back(case: Case, moment: str) -> None:
    case.start(MOMENT=moment)
    case.there()
    case.slurm.call("scancel", str(case.number))
    case.end()
    case.go()
    case.start(nodes=1, exit_interval=52, MOST_RESTARTS=0)
    assert case.end()["ExitCode"] == "75:0", case.log
    case.start()


def rank_stopped(case: Case, moment: str) -> None:
    case.start(MOMENT=moment, distributed_timeout_minutes=0.2)
    case.there()
    case.inside(1, "pkill", "-STOP", "-f", "pausing.py")
    case.go()


def disk_full(case: Case, moment: str) -> None:
    """Somebody makes room, and the same is submitted again."""
    case.start(MOMENT=moment, save_retry_minutes=0.05)
    case.there()
    with (case.folder / "filled").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**12))
        except OSError:
            pass
    case.go()
    job = case.end()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "74:0", "0"), case.log
    (case.folder / "filled").unlink()
    case.start()


EVENTS: dict[str, Callable[[Case, str], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        preempted_with_grace,
        preempted_without_grace,
        time_limit,
        requeue,
        scancel,
        worker_node_lost,
        first_node_lost,
        two_nodes_to_one_and_back,
        rank_stopped,
        disk_full,
    )
}
# Its sums are taken in another order meanwhile.
NOT_THE_SAME_BITS = {"two nodes to one and back": 1e-5}


@pytest.fixture(scope="module")
def cases(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which ``python`` is pausing.py, on the disk that all nodes have."""
    folder = tmp_path_factory.mktemp("matrix")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/slurm/pausing.py "$@"\n')
    program.chmod(0o755)
    yield folder


@pytest.fixture(scope="module")
def whole(slurm: Cluster, cases: Path) -> dict[int, float]:
    case = Case(slurm, cases, cases / "whole")
    case.start()
    job = case.end()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), case.log
    return curve(case.folder)


@pytest.mark.parametrize("event", EVENTS)
def test_the_curve_is_whole_whatever_happens_when(slurm, cases, whole, event) -> None:
    def one(moment: str) -> dict[str, object]:
        folder = slurm.disks[MOMENTS.index(moment)] if event == "disk full" else cases
        run = folder / f"{event} {moment}".replace(" ", "-")
        case = Case(slurm, cases, run)
        EVENTS[event](case, moment)
        job = case.end()
        found = curve(run) if (run / "logs" / "metrics.jsonl").exists() else {}
        apart = (
            max((abs(found[i] / whole[i] - 1) for i in whole), default=0)
            if found.keys() == whole.keys()
            else None
        )
        return {
            "event": event,
            "moment": moment,
            "state": job["JobState"],
            "restarts": int(job["Restarts"]),
            "same bits": found == whole,
            "apart": apart,
            "waited": "to see whether it lives" in case.log,
            "log": case.log[-3000:],
        }

    with ThreadPoolExecutor(len(MOMENTS)) as pool:
        results = list(pool.map(one, MOMENTS))
    for result in results:
        assert result["state"] == "COMPLETED", result
        # A requeued job takes its own folder back at once.
        assert event != "first node lost" or not result["waited"], result
        bound = NOT_THE_SAME_BITS.get(event, 0.0)
        assert result["same bits"] or (result["apart"] is not None and result["apart"] <= bound), result
