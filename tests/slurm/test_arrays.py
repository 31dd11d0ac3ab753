"""Job arrays on a real SLURM: what happens to one task leaves its siblings alone; one that is cancelled stays so.

Of each array, task 0 has finished and task 1 was cancelled; task 2 trains on, and task 3, whose job number is that
of the array, is told to stop, requeued or cancelled. A shell script trains in the place of pretrain_gpt.py.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slurm.cluster import OVER, Cluster, until
from tests.slurm.jobs import SCRIPTS

pytestmark = pytest.mark.slow
FINISHED, CANCELLED, SIBLING, TASK = range(4)
MOMENTS = ("before the start", "training", "saving")
# The second start of a task ends at once. Before its start a run leaves at a signal; later it saves first, for 3 s.
TRAINING = """#!/bin/bash
[[ "$*" != *check-nodes* ]] || exit 0
mkdir -p "${RUN:?}/logs"
echo x >> "$RUN/starts"
leave() { echo "$1" > "$MEGAZERO_END_FOLDER/exit_status"; exit "$1"; }
save() { trap "" USR1 TERM; touch "$RUN/at"; sleep 3; mkdir -p "$RUN/iter_0000001"; leave 75; }
[ "$SLURM_ARRAY_TASK_ID" = 0 ] || [ "$(wc -l < "$RUN/starts")" -gt 1 ] && leave 0
[ "$MOMENT" = training ] && trap save USR1 TERM || trap "leave 75" USR1 TERM
[ "$MOMENT" = saving ] && [ "$SLURM_ARRAY_TASK_ID" = 3 ] && save
touch "$RUN/at"
until [ -e "$RUN/go" ]; do sleep 0.2; done
leave 0
"""


class Array:
    """An array of four tasks at ``moment``. ``runs``: the folder of their runs."""

    def __init__(self, slurm: Cluster, folder: Path, moment: str, script: str = "pretrain.sbatch") -> None:
        self.slurm, self.runs = slurm, folder / moment.replace(" ", "-")
        self.runs.mkdir()
        (self.runs / "python").write_text(TRAINING)
        # The script has torchrun ignore signals, and a shell cannot heed them again.
        (self.runs / "torchrun").write_text(
            f"#!/bin/bash\nexec env --default-signal=USR1,TERM {self.runs}/python\n"
        )
        for program in ("python", "torchrun"):
            (self.runs / program).chmod(0o755)
        job = self.runs / "job.sh"  # the variable RUN is one for all tasks
        job.write_text(f"#!/bin/bash\nexport RUN={self.runs}/$SLURM_ARRAY_TASK_ID\n. {SCRIPTS / script}\n")
        sizes = ("--array=0-3", "--nodes=1", "--ntasks-per-node=1", "--exclusive", "--signal=USR1@5")
        self.number = slurm.submit(
            job,
            options=(*sizes, "--requeue", "--open-mode=append", f"--output={self.runs}/%a.out"),
            environ={"MOMENT": moment, "PATH": f"{self.runs}:{os.environ['PATH']}", "NODES": "1"},
        )
        slurm.wait(f"{self.number}_{FINISHED}")
        for task in (CANCELLED, SIBLING, TASK):
            until((self.runs / f"{task}/at").exists, 60, lambda: f"a task does not begin: {self.log}")
        slurm.call("scancel", f"{self.number}_{CANCELLED}")

    @property
    def log(self) -> str:
        return "".join(f"{path.name}: {path.read_text()}\n" for path in sorted(self.runs.glob("*.out")))

    def task(self, task: int) -> tuple[str, str, int]:
        """State, number of restarts, and how often it was started."""
        job = self.slurm.wait(f"{self.number}_{task}")
        return job["JobState"], job["Restarts"], (self.runs / f"{task}/starts").read_text().count("x")


def told_to_stop(slurm: Cluster, task: str) -> None:
    slurm.call("scancel", "--signal=USR1", task)


def requeued(slurm: Cluster, task: str) -> None:
    slurm.call("scontrol", "requeue", task)


def cancelled(slurm: Cluster, task: str) -> None:
    slurm.call("scancel", task)


def all_moments(slurm: Cluster, folder: Path, happens, script: str = "pretrain.sbatch") -> list[Array]:
    """Arrays at all moments, whose last tasks have been through it and whose siblings were let finish."""

    def one(moment: str) -> Array:
        array = Array(slurm, folder, moment, script)
        task = f"{array.number}_{TASK}"
        assert slurm.job(task)["JobId"] == f"{array.number}"
        happens(slurm, task)
        slurm.wait(task, *({"CANCELLED"} if happens is cancelled else OVER - {"CANCELLED"}), timeout=60)
        (array.runs / f"{SIBLING}/go").touch()
        return array

    with ThreadPoolExecutor(len(MOMENTS)) as pool:
        return list(pool.map(one, MOMENTS))


@pytest.mark.parametrize(
    "happens, script",
    [
        *((told_to_stop, name) for name in ("pretrain.sbatch", "torchrun.sbatch", "spare.sbatch")),
        (requeued, "pretrain.sbatch"),
        (cancelled, "pretrain.sbatch"),
    ],
)
def test_what_happens_to_one_task_leaves_its_siblings_alone(slurm, tmp_path, happens, script) -> None:
    for array in all_moments(slurm, tmp_path, happens, script):
        expected = ("CANCELLED", "0", 1) if happens is cancelled else ("COMPLETED", "1", 2)
        assert array.task(TASK) == expected, array.log
        assert array.task(SIBLING) == ("COMPLETED", "0", 1), array.log
        assert array.task(FINISHED) == ("COMPLETED", "0", 1), array.log
        assert array.task(CANCELLED) == ("CANCELLED", "0", 1), array.log


def test_a_task_that_is_cancelled_while_it_asks_for_its_requeue_stays_so(slurm, tmp_path) -> None:
    """It is cancelled between the script's question for its state and its request: SLURM itself decides."""
    array = Array(slurm, tmp_path, "training")
    task, program = f"{array.number}_{TASK}", array.runs / "scontrol"
    late = f'[ "$1" != requeue ] || {{ scancel {task}; sleep 1; trap "touch {array.runs}/asked" EXIT; }}'
    program.write_text(f'#!/bin/bash\ntrap "" TERM\n{late}\n{shutil.which("scontrol")} "$@"\n')
    program.chmod(0o755)
    told_to_stop(slurm, task)
    until((array.runs / "asked").exists, 60, lambda: array.log)
    (array.runs / f"{SIBLING}/go").touch()
    assert array.task(SIBLING) == ("COMPLETED", "0", 1), array.log
    assert array.task(TASK) == ("CANCELLED", "0", 1), array.log
