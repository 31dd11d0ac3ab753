"""The batch scripts of pretrain/slurm with programs in the place of SLURM's: what is started, and what comes after.

tests/slurm runs them on a real SLURM.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megazero.log.exit_status import ExitStatus
from megazero.ops.lease import Leaseholder
from tests import ROOT
from tests.slurm.cluster import Cluster

REQUEUE = "scontrol requeue incomplete 7"
SCRIPTS = sorted(path.name for path in (ROOT / "pretrain" / "slurm").glob("*.sbatch"))
# Each says how it was called. srun ends as ENDS says, and leaves what a run leaves.
PROGRAMS = {
    "srun": """echo "srun $*" >> "$CALLS"
        for node in $LOST; do [[ "$*" == *"=$node "*check-nodes* ]] && exit 1; done
        [[ -n "$CHECKS" && "$*" == *check-nodes* ]] && {
            touch "$RUN/tries"; until [ -e "$RUN/go" ]; do /bin/sleep 0.02; done; }
        [[ "$*" == *check-nodes* ]] && exit 0
        mkdir -p "$RUN/logs" "$RUN/iter_$NEWEST"
        trap 'echo "handed on USR1" >> "$CALLS"; exit 75' USR1
        [ "$ENDS" = waits ] && { touch "$RUN/waits"; for i in $(seq 200); do /bin/sleep 0.05; done; }
        [[ "$*" == *"$BAD"* ]] && { echo "$BAD" > "$MEGAZERO_END_FOLDER/bad_nodes"; exit 76; }
        [ -n "$SAID" ] && echo "$SAID" > "$MEGAZERO_END_FOLDER/exit_status"
        exit $ENDS""",
    "scontrol": """echo "scontrol $*" >> "$CALLS"
        [ "$1 $2" = "show hostnames" ] && printf 'node%s\\n' 0 1 2
        [ "$1 $2" = "show job" ] && echo "JobState=$STATE ReqNodeList=(null) ExcNodeList=$EXCLUDED"
        exit 0""",
    "sleep": "exit 0",  # until SLURM ends a script that is requeued
    "scancel": 'echo "scancel $*" >> "$CALLS"',
}
# Runs a command with a disk at $RUN that has no byte left, as a namespace of its own sees it.
FULL = ("unshare", "-rm", "bash", "-c")
FULL += ('mount -t tmpfs -o size=8k none "$RUN" && head -c 1M /dev/zero 2>&- > "$RUN/all"; exec "$@"', "-")


class Scripts:
    """Runs the scripts in ``folder`` with the programs above. ``calls`` are theirs so far."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        for name, text in PROGRAMS.items():
            path = folder / name
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def start(
        self, script: str, ends: object, inside: Sequence[str] = (), **variables: object
    ) -> subprocess.Popen:
        job = {"SLURM_JOB_ID": 7, "SLURM_JOB_NAME": "name", "SLURM_JOB_NUM_NODES": 3}
        job |= {"SLURM_JOB_NODELIST": "node[0-2]", "RUN": self.run, "CALLS": self.folder / "calls"}
        job |= {"ENDS": ends, "SAID": "", "NEWEST": "0000001", "BAD": "none", "LOST": "", "CHECKS": ""}
        job |= {"SLURM_NTASKS_PER_NODE": 8, "EXCLUDED": "(null)", "STATE": "RUNNING", **variables}
        path = f"{self.folder}:{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, **{name: str(value) for name, value in job.items()}}
        words = [*inside, "bash", f"pretrain/slurm/{script}", "--lr", "1 e"]
        return subprocess.Popen(
            words, cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def end(self, script: str, ends: object, **how: Any) -> tuple[int, str]:
        """The exit status, and what was printed."""
        process = self.start(script, ends, **how)
        text, _ = process.communicate(timeout=60)
        return process.returncode, text


@pytest.mark.parametrize(
    "script, names",
    [
        ("gpt-1b3-deepspeed.sh", ["VOCAB", "MERGES", "DATA_PATH"]),
        ("llama-8b-zeropp.sh", ["TOKENIZER", "DATA_PATH"]),
    ],
)
def test_a_script_names_all_variables_that_are_not_set(script, names) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in names}
    for given in ({}, {names[-1]: "x"}):
        done = subprocess.run(
            [f"pretrain/slurm/{script}"], cwd=ROOT, env={**environ, **given}, capture_output=True, text=True
        )
        missing = " and ".join(name for name in names if name not in given)
        assert done.returncode == 2 and f"set {missing}, as its first lines say" in done.stderr, done.stderr
        assert "unbound" not in done.stderr and done.stdout == ""


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


@pytest.mark.parametrize("script", ["pretrain.sbatch", "torchrun.sbatch"])
@pytest.mark.parametrize("status", [0, 1, 2, 65, 73, 74, 75, 76, 77])
def test_a_job_is_requeued_after_a_stop_or_a_lost_rank_alone(scripts, script, status) -> None:
    assert scripts.end(script, ends=1, SAID=status)[0] == status  # the run's word, not the launcher's
    again = ExitStatus(status) in (ExitStatus.STOPPED, ExitStatus.RANK_LOST)
    assert (REQUEUE in scripts.calls) == again


@pytest.mark.parametrize(
    "state, again",
    [
        ("RUNNING", "incomplete "),  # it may be cancelled meanwhile: SLURM is to look again
        ("COMPLETING Reason=TimeLimit", ""),  # it is over for SLURM
        *((state, None) for state in ("COMPLETING Reason=None", "CANCELLED Reason=None", "")),
    ],
)
@pytest.mark.parametrize(
    "task, job", [({}, "7"), ({"SLURM_ARRAY_JOB_ID": 7, "SLURM_ARRAY_TASK_ID": 2}, "7_2")]
)
def test_a_job_that_is_cancelled_stays_so(scripts, state, again, task, job) -> None:
    """It is COMPLETING: its ranks were told to stop, and its script runs on. A task asks about itself alone."""
    for script in ("pretrain.sbatch", "torchrun.sbatch", "spare.sbatch"):
        status, text = scripts.end(script, ends=75, STATE=state, **task)
        requeues = [call for call in scripts.calls if call.startswith("scontrol requeue")]
        assert status == 75 and requeues == ([] if again is None else [f"scontrol requeue {again}{job}"]), (
            text
        )
        assert {call for call in scripts.calls if "show job" in call} == {f"scontrol show job {job}"}
        last = json.loads((scripts.run / "logs" / "events.jsonl").read_text().splitlines()[-1])
        assert (last["event"], last["job_id"]) == ("job", job)
        assert last["then"] == ("end" if again is None else "queue")
        assert last["why"] in text and last["status"] == 75
        shutil.rmtree(scripts.run)
        (scripts.folder / "calls").unlink()


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("job, released, written", [("8", "", 0), ("8", "2026-05-04", 1), ("7", "", 1)])
def test_a_script_writes_no_word_into_a_folder_that_another_job_holds(
    scripts, job, released, written, indent
) -> None:
    logs = scripts.run / "logs"
    logs.mkdir(parents=True)
    lease = json.loads(Leaseholder("b", job, released=released).write())
    (logs / "lease").write_text(json.dumps(lease, indent=indent, separators=(",", ":")))
    scripts.end("pretrain.sbatch", ends=2)
    events = (logs / "events.jsonl").read_text() if (logs / "events.jsonl").exists() else ""
    assert events.count("it is not started again") == written


def test_a_script_that_was_not_submitted_says_how(scripts) -> None:
    for script in SCRIPTS:
        status, text = scripts.end(script, ends=0, SLURM_JOB_ID="")
        assert status == 2 and "sbatch --nodes=N" in text and not scripts.calls, text


def test_a_launchers_status_counts_where_the_run_said_none(scripts) -> None:
    (scripts.run / "logs").mkdir(parents=True)
    (scripts.run / "logs" / "exit_status").write_text("75\n")  # of an earlier job
    assert scripts.end("pretrain.sbatch", ends=1)[0] == 1
    assert REQUEUE not in scripts.calls


def test_torchruns_success_does_not_count_where_the_run_said_nothing(scripts) -> None:
    """It is that of a planned stop, too, which could not be written down."""
    assert scripts.end("torchrun.sbatch", ends=0)[0] == 1
    assert scripts.end("torchrun.sbatch", ends=0, SAID=75)[0] == 75
    assert REQUEUE in scripts.calls
    assert scripts.end("torchrun.sbatch", ends=0, SAID=0)[0] == 0


@pytest.mark.parametrize("ends", [137, 134])  # 134: torch ends a process after an error of NCCL by SIGABRT
def test_ranks_that_were_all_killed_are_lost(scripts, ends) -> None:
    assert scripts.end("pretrain.sbatch", ends=ends)[0] == ExitStatus.RANK_LOST
    assert REQUEUE in scripts.calls


@pytest.mark.parametrize("checkpoints", [True, False])
def test_restarts_without_a_new_checkpoint_have_an_end(scripts, checkpoints) -> None:
    if not checkpoints:  # 3 restarts and a first start without any; the end ends the row
        calls = [scripts.end("pretrain.sbatch", ends=76, NEWEST="../other") for _ in range(4)]
        assert ["not again" in text for _, text in calls] == [False, False, False, True]
        return
    for _ in range(3):
        scripts.end("pretrain.sbatch", ends=76)
    assert scripts.calls.count(REQUEUE) == 3
    _, text = scripts.end("pretrain.sbatch", ends=76)
    assert "3 restarts without a new checkpoint: not again" in text
    scripts.end("pretrain.sbatch", ends=76, NEWEST="0000002")  # by hand, and it got on
    assert scripts.calls.count(REQUEUE) == 4


def test_only_restarts_of_one_job_in_a_row_are_counted(scripts) -> None:
    for _ in range(4):
        scripts.end("pretrain.sbatch", ends=2)  # submitted again by hand, with another mistake
    for job in range(5):
        scripts.end("pretrain.sbatch", ends=76, SLURM_JOB_ID=job)
    assert sum("requeue" in call for call in scripts.calls) == 5
    ends = [scripts.end("chain.sbatch", ends=76, SLURM_JOB_ID=job)[1] for job in range(4)]  # one chain
    assert ["not again" in text for text in ends] == [False, False, False, True]


@pytest.mark.skipif(
    subprocess.run([*FULL[:2], "true"], capture_output=True).returncode != 0, reason="no namespaces here"
)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("status", [75, 137])
def test_a_restart_that_cannot_be_counted_is_not_made(scripts, script, status) -> None:
    """The disk is full: the ranks' word, their checkpoints and the count of restarts do not fit."""
    scripts.run.mkdir()
    ends, text = scripts.end(script, ends=status, inside=FULL, SAID=74)
    assert ends == ExitStatus.STORAGE and "restarts cannot be counted: not again" in text, text
    assert not any("requeue" in call for call in scripts.calls)


def test_a_folder_of_any_name_has_checkpoints(tmp_path) -> None:
    (folder := tmp_path / "superseded").mkdir()
    scripts = Scripts(folder)
    for checkpoint in range(5):  # each start got on
        _, text = scripts.end("pretrain.sbatch", ends=76, NEWEST=f"{checkpoint:07d}")
        (scripts.run / "iter_9999999.superseded").mkdir(exist_ok=True)
        assert f"newest checkpoint iter_{checkpoint:07d}:" in text
    assert scripts.calls.count(REQUEUE) == 5
    _, text = scripts.end("pretrain.sbatch", ends=76, NEWEST="10000000")
    assert "newest checkpoint iter_10000000:" in text


def test_a_count_of_restarts_is_a_number_and_nothing_else(scripts) -> None:
    (scripts.run / "iter_0000001").mkdir(parents=True)
    for count, goes_on in {"x[$(touch$IFS$RUN/run)]": True, "08": False, "-9": True, "": True}.items():
        (scripts.run / "restarts").write_text(f"{count} iter_0000001 7\n")
        _, text = scripts.end("pretrain.sbatch", ends=76)
        assert ("back into the queue" in text) == goes_on, text
    assert not (scripts.run / "run").exists()


def test_a_chain_without_a_name_is_refused(scripts) -> None:
    status, text = scripts.end("chain.sbatch", ends=0, SLURM_JOB_NAME="chain.sbatch")
    assert status == 2 and "--job-name=NAME" in text and scripts.calls == []


@pytest.mark.parametrize("name", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_while_nodes_are_tried_is_a_stop(scripts, name) -> None:
    process = scripts.start("spare.sbatch", 0, NODES=2, CHECKS="wait")
    while not (scripts.run / "tries").exists():
        time.sleep(0.02)
    process.send_signal(name)
    (scripts.run / "go").touch()
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 75, text
    assert REQUEUE in scripts.calls and "pretrain_gpt.py" not in "".join(scripts.calls)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_signal_to_the_script_goes_on_to_the_ranks(scripts, script) -> None:
    process = scripts.start(script, "waits")
    while not (scripts.run / "waits").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode == 75 and "handed on USR1" in scripts.calls


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_arrive_as_they_are_and_may_replace_where_the_run_begins(scripts, script) -> None:
    scripts.end(script, ends=0)
    (call,) = [line for line in scripts.calls if "pretrain_gpt.py" in line]
    assert call.startswith("srun --kill-on-bad-exit=1 --wait=60 ")
    own = f"--save {scripts.run} --log-dir {scripts.run}/logs --exit-signal-handler"
    assert call.endswith(f"pretrain/pretrain_gpt.py --load {scripts.run} --lr 1 e {own}")


@pytest.mark.parametrize(
    "script, array, run",
    [
        ("pretrain.sbatch", {}, "-7"),  # a second job of that name has another
        ("pretrain.sbatch", {"SLURM_ARRAY_JOB_ID": 5, "SLURM_ARRAY_TASK_ID": 4}, "-5_4"),
        ("chain.sbatch", {}, ""),  # one for the jobs of a name, or of an array
        ("chain.sbatch", {"SLURM_ARRAY_JOB_ID": 5, "SLURM_ARRAY_TASK_ID": 4}, "-5"),
    ],
)
def test_the_run_that_is_not_named_is_the_jobs_or_the_chains_own(scripts, script, array, run) -> None:
    scripts.end(script, ends=0, RUN="", SLURM_JOB_NAME=f"{scripts.folder}/a", **array)
    assert f"--save runs/{scripts.folder}/a{run} " in scripts.calls[0]


def test_a_job_whose_folder_is_in_use_leaves_the_other_jobs_files_alone(scripts) -> None:
    (scripts.run / "logs").mkdir(parents=True)
    names = ("restarts", "excluded", "logs/exit_status", "logs/bad_nodes")
    for name in names:
        (scripts.run / name).write_text("of the other\n")
    assert scripts.end("pretrain.sbatch", ends=143, SAID=73)[0] == ExitStatus.IN_USE
    assert {name: (scripts.run / name).read_text() for name in names} == dict.fromkeys(
        names, "of the other\n"
    )
    assert not list(scripts.run.glob(".end-*"))


@pytest.mark.parametrize("status, goes_on", [(0, False), (2, False), (75, True), (76, True)])
def test_a_chain_ends_with_its_first_job_that_finishes_or_fails(scripts, status, goes_on) -> None:
    assert scripts.end("chain.sbatch", ends=status)[0] == status
    assert scripts.end("chain.sbatch", ends=status, SLURM_ARRAY_JOB_ID=5)[0] == status
    cancelled = [line for line in scripts.calls if line.startswith("scancel")]
    by_name = f"--user={os.popen('id -un').read().strip()} --name=name"
    ended = [f"scancel --state=PENDING {by_name}", "scancel --state=PENDING 5"]
    assert cancelled == ([] if goes_on else ended)


def test_torchrun_and_its_ranks_ignore_signals_until_the_run_heeds_them(scripts) -> None:
    scripts.end("torchrun.sbatch", ends=0)
    (call,) = [line for line in scripts.calls if line.startswith("srun")]
    assert "--nnodes 3 --nproc-per-node 8" in call and "--rdzv-endpoint node0:20007" in call
    assert 'trap "" USR1 TERM INT; exec' in call and "--signals-to-handle SIGQUIT" in call


@pytest.mark.parametrize("excluded, wanted", [("(null)", "node1"), ("node7,node9", "node1,node7,node9")])
def test_a_node_that_is_named_bad_is_excluded_when_the_job_is_requeued(scripts, excluded, wanted) -> None:
    assert scripts.end("pretrain.sbatch", ends=0, BAD="pretrain", EXCLUDED=excluded)[0] == 76
    wanted = wanted.replace("node1", "pretrain")  # what the program in srun's place looks for, and names
    assert scripts.calls[-1] == f"scontrol update JobId=7 ExcNodeList={wanted}"


def test_nodes_stay_excluded_until_there_is_a_new_checkpoint_and_the_users_for_good(scripts) -> None:
    def start(bad: str, excluded: str, newest: str) -> str:
        scripts.end("pretrain.sbatch", ends=75, BAD=bad, EXCLUDED=excluded, NEWEST=newest)
        return scripts.calls[-1]

    update = "scontrol update JobId=7 ExcNodeList="
    assert start("pretrain", "user", "0000001") == f"{update}pretrain,user"
    assert start("srun", "b1,user", "0000001") == REQUEUE  # nothing bad, in the row: as it is
    assert start("srun", "b1,user", "0000002") == f"{update}user"
    assert start("pretrain", "user", "0000002") == f"{update}pretrain,user"


def test_a_spare_node_takes_the_place_of_one_that_is_lost_or_named_bad(scripts) -> None:
    """The job has node0 to node2 and trains on two of them. node0 does not answer; node1 is named bad by the run."""
    assert scripts.end("spare.sbatch", ends=0, NODES=2)[0] == 0
    assert scripts.end("spare.sbatch", ends=0, NODES=2, LOST="node0")[0] == 0
    runs = [line for line in scripts.calls if "pretrain_gpt.py" in line]
    assert ["--nodelist=node0,node1 " in runs[0], "--nodelist=node1,node2 " in runs[1]] == [True, True]
    status, text = scripts.end("spare.sbatch", ends=0, NODES=2, BAD="node1")
    runs = [line.split("--nodelist=")[1].split()[0] for line in scripts.calls if "pretrain_gpt.py" in line]
    assert status == 0 and runs[2:] == ["node0,node1", "node0,node2"] and "again, inside the job" in text
    assert REQUEUE not in scripts.calls


def test_without_enough_good_nodes_the_job_goes_back_into_the_queue(scripts) -> None:
    status, text = scripts.end("spare.sbatch", ends=0, NODES=2, LOST="node0 node2")
    assert status == 76 and scripts.calls[-1] == REQUEUE, text
    assert "node2 is left out" in text and "1 nodes are good, 2 are needed" in text


def test_no_job_writes_into_the_checkout(tmp_path) -> None:
    """The scripts write beside themselves; in the tests' SLURM another folder goes before what they say."""
    assert Cluster(tmp_path).environ["SBATCH_OUTPUT"] == f"{tmp_path}/%x-%j.out"
    tracked = subprocess.run(["git", "ls-files", "*.log", "*.out"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("no git checkout")
    assert tracked.stdout == ""
