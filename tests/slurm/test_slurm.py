"""pretrain/slurm on a real SLURM, as it stands: stopped, preempted, robbed of a node, a run comes back.

make slurm-test runs these (some minutes; slurm-wlm and munge installed, as root).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import ITERATIONS, curve, log, nodes_of, submit, wait_for_iterations, words

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    job = slurm.wait(submit(slurm, folder))
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log(folder)
    return curve(folder)


def stop_through_the_script(slurm: Cluster, number: int) -> None:
    slurm.call("scancel", "--batch", "--signal=USR1", str(number))


def kill_a_rank(slurm: Cluster, number: int) -> None:
    node = f"node{nodes_of(slurm, number)[1]}"
    slurm.call(
        "srun", f"--jobid={number}", "--overlap", "-N1", "-n1", "-w", node, "pkill", "-9", "-n", "python"
    )


TORCHRUN = {"script": "torchrun.sbatch", "environ": {"RANKS": "2"}}


@pytest.mark.parametrize(
    "happens, options, script",
    [
        (stop_through_the_script, (), {}),
        (kill_a_rank, (), {}),
        (stop_through_the_script, ("--ntasks-per-node=1",), TORCHRUN),
    ],
    ids=["stopped", "killed", "torchrun"],
)
def test_a_job_comes_back_and_its_curve_is_whole(slurm, whole, tmp_path, happens, options, script) -> None:
    """test_matrix.py has what SLURM itself does to a job."""
    number = submit(slurm, tmp_path / "run", *options, **script)
    wait_for_iterations(tmp_path / "run", 50)
    happens(slurm, number)
    job = slurm.wait(number, timeout=240)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log(tmp_path / "run")
    assert curve(tmp_path / "run") == whole


def test_a_chain_of_jobs_goes_on_until_the_run_is_finished(slurm, whole, tmp_path) -> None:
    """Of four jobs two stop before the end, the third finishes, and the last leaves the queue."""
    folder = tmp_path / "run"
    script = {"script": "chain.sbatch", "flags": words(exit_interval=60)}
    submit(slurm, folder, "--array=1-4%1", "--job-name=array", **script)
    states = slurm.wait_for_jobs("--name=array")
    assert sorted(states) == ["CANCELLED", "COMPLETED", "FAILED", "FAILED"], log(folder)
    assert curve(folder) == whole


SKEW = """#!/bin/bash
# Ranks come at different times; the first comes last.
sleep $((SLURM_PROCID == 0 ? 6 : SLURM_PROCID % 3))
exec "$@"
"""


@pytest.mark.parametrize(
    "script, mistake, said",
    [
        ("pretrain.sbatch", ("--no-such-flag",), "--no-such-flag"),
        ("pretrain.sbatch", ("--exit-on-missing-checkpoint",), "--exit-on-missing-checkpoint"),
        ("spare.sbatch", ("--lr", "-1"), "--lr"),
    ],
)
def test_a_mistake_is_told_and_kept_though_the_first_rank_comes_last(
    slurm, tmp_path: Path, script, mistake, said
) -> None:
    """srun ends the first rank while Python is loaded there, as others have left with their mistake."""
    (tmp_path / "skew").write_text(SKEW)
    (tmp_path / "skew").chmod(0o755)
    folder, environ = tmp_path / "run", {"LAUNCH": str(tmp_path / "skew"), "NODES": "2"}
    number = submit(slurm, folder, script=script, flags=[*words(), *mistake], environ=environ)
    job = slurm.wait(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0"), log(folder)
    assert said in log(folder) and not list(folder.glob(".end-*")), log(folder)


def test_a_second_job_on_a_folder_ends_before_it_touches_anything(slurm, tmp_path) -> None:
    folder = tmp_path / "run"
    first = submit(slurm, folder, flags=words(train_iters=20_000, lr_decay_iters=20_000))
    wait_for_iterations(folder, 20)
    second = slurm.wait(submit(slurm, folder))
    ends = (second["JobState"], second["ExitCode"], second["Restarts"])
    assert ends == ("FAILED", "73:0", "0"), log(folder)
    assert f"is in use: job {first} on node" in log(folder)
    wait_for_iterations(folder, max(curve(folder)) + 20)
    slurm.call("scancel", str(first))
    assert slurm.wait(first)["Restarts"] == "0"
    assert sorted(curve(folder)) == list(range(1, len(curve(folder)) + 1)), log(folder)


@pytest.fixture
def bad_node(slurm, tmp_path) -> Iterator[str]:
    """A node that has another folder in the place of the runs'. Jobs get it: SLURM takes nodes in their order."""
    (tmp_path / "run").mkdir()
    member = slurm.lab.members[1 + 1]
    subprocess.run([*member.inside, "mount", "-t", "tmpfs", "none", str(tmp_path / "run")], check=True)
    yield member.name
    subprocess.run([*member.inside, "umount", "--lazy", str(tmp_path / "run")], check=True)


OF_THREE = words(global_batch_size=6)  # the batch of 3 ranks
THREE = ("--nodes=3", "--ntasks-per-node=1")


@pytest.fixture(scope="module")
def whole_of_three(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The curve of three ranks that nothing stopped."""
    folder = tmp_path_factory.mktemp("three") / "run"
    assert slurm.wait(submit(slurm, folder, *THREE, flags=OF_THREE))["Restarts"] == "0", log(folder)
    assert sorted(curve(folder)) == list(range(1, ITERATIONS + 1)), log(folder)
    return curve(folder)


def test_a_job_is_requeued_without_a_bad_node(slurm, whole_of_three, tmp_path, bad_node) -> None:
    number = submit(slurm, tmp_path / "run", *THREE, flags=OF_THREE)
    job = slurm.wait(number, timeout=300)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log(tmp_path / "run")
    assert job["ExcNodeList"] == bad_node and f"--exclude={bad_node}" in log(tmp_path / "run")
    assert curve(tmp_path / "run") == whole_of_three


@pytest.mark.parametrize("lost", [True, False])
def test_a_spare_node_takes_a_bad_ones_place_inside_the_job(
    slurm, whole_of_three, tmp_path, lost, request
) -> None:
    """A node is lost and stays so, or the health check names one."""
    bad = "" if lost else request.getfixturevalue("bad_node")
    run, nodes = tmp_path / "run", ("--nodes=4", "--ntasks-per-node=1")
    number = submit(slurm, run, *nodes, script="spare.sbatch", flags=OF_THREE, environ={"NODES": "3"})
    if lost:
        wait_for_iterations(run, 50)
        node = nodes_of(slurm, number)[1]
        slurm.lose(node)
        request.addfinalizer(lambda: slurm.bring_back(node))
    job = slurm.wait(number, timeout=300)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "0"), log(run)
    assert "again, inside the job" in log(run) and bad in log(run)
    assert curve(run) == whole_of_three
