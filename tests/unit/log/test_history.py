"""A run over its restarts: its id before the first checkpoint, its events, its end line, its hosts and its job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.log.exit_status import STATUS_FILE, ExitStatus, read_status
from megazero.log.history import EVENTS_FILE, RUN_FILE, Start, event_line, identify, read_events
from megazero.log.metrics import read_metrics
from megazero.mesh.launch import Launch, is_first, read_launch
from megazero.train.supervisor import Supervisor
from megazero.train.trainer import Trainer
from tests import ROOT
from tests.unit.train.test_seams import SMALL, run


class Killed(BaseException):
    """The process is gone: nothing is closed or saved."""


def killed_after(iteration: int) -> Callable[[Trainer], None]:
    def watch(trainer: Trainer) -> None:
        step = trainer._iterate

        def iterate(batches: Any) -> Any:
            if trainer.progress.iteration == iteration:
                raise Killed
            return step(batches)

        trainer._iterate = iterate  # type: ignore[method-assign]

    return watch


def chain(folder: Path, **changes: Any) -> dict[str, Any]:
    save = str(folder / "run")
    return {**SMALL, "train_iters": 4, "save": save, "load": save, "log_dir": str(folder / "logs"), **changes}


def test_a_run_is_one_run_also_when_killed_before_its_first_save(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tmp_path / "board"
    values = chain(tmp_path, save_interval=3, tensorboard_dir=str(board), eval_iters=1, eval_at_start=True)
    for last in (2, 3):  # before the first save, and after it
        with pytest.raises(Killed):
            run(values, killed_after(last))
        assert (tmp_path / "run" / RUN_FILE).exists() == (last == 2)
    run(values)
    starts = [event for event in read_events(tmp_path / "logs") if event["event"] == "start"]
    assert len({event["run_id"] for event in starts}) == 1
    assert [(event["iteration"], event["restarts"]) for event in starts] == [(0, 0), (0, 1), (3, 2)]
    lines = [line for line in read_metrics(tmp_path / "logs") if "lm_loss" in line]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
    assert [line.get("restarts") for line in lines] == [1, None, None, 2]
    events = EventAccumulator(str(board))
    events.Reload()
    assert [event.step for event in events.Scalars("lm_loss")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("eval_lm_loss")].count(0) == 1


def test_who_is_another_run(tmp_path: Path) -> None:
    save, logs, launch = str(tmp_path / "run"), str(tmp_path / "logs"), Launch()
    first = identify(save, logs, "", launch)
    assert identify(save, logs, "", launch).run_id == first.run_id and not first.notes
    assert "which had saved nothing yet" in identify(save, logs, "", launch).notes[0]
    assert identify(save, logs, "checkpoint1", launch).run_id == "checkpoint1"
    assert identify(None, logs, "", launch).run_id != first.run_id  # nothing can be continued
    (tmp_path / "run" / RUN_FILE).write_text("not an id \x00")
    assert identify(save, logs, "", launch).run_id not in (first.run_id, "not an id")
    (tmp_path / "file").touch()
    unsaved = identify(str(tmp_path / "file" / "run"), logs, "", Launch(restarts=4))
    assert unsaved.restarts == 4 and "is another run at outside loggers" in unsaved.notes[0]


def test_lines_of_another_run_in_the_folder_are_told(tmp_path: Path) -> None:
    logs, launch = str(tmp_path), Launch()
    (tmp_path / EVENTS_FILE).write_bytes(event_line("start", {"run_id": "first"}))
    assert not identify(None, logs, "first", launch).notes
    (note,) = identify(None, logs, "second", launch).notes
    assert f"--log-dir {logs} has the lines of another run, first" in note


def test_the_head_of_a_log_names_job_restarts_and_hosts() -> None:
    hosts = tuple(f"gpu{i}" for i in range(10) for _ in range(2))
    header = Start("1", 3, "4711", hosts).header()
    assert (header["job"], header["restarts"]) == ("4711", "3")
    assert header["hosts"].startswith("gpu0 (2 ranks), gpu1 (2 ranks)") and header["hosts"].endswith("2 more")
    assert "job" not in Start("1").header()


def test_the_end_of_a_run_is_one_line_with_the_reason(tmp_path: Path, capsys: Any) -> None:
    supervisor: list[Supervisor] = []

    def watch(trainer: Trainer) -> None:
        supervisor.append(Supervisor(trainer.config, Launch()))
        supervisor[0].trainer = trainer

    run(chain(tmp_path, exit_interval=3), watch)
    supervisor[0].report_end(ExitStatus.STOPPED, "received SIGUSR1\nin the step")
    (event,) = [event for event in read_events(tmp_path / "logs") if event["event"] == "end"]
    assert (event["status"], event["why"], event["iteration"], event["iterations"]) == (
        75,
        "received SIGUSR1",
        3,
        3,
    )
    assert event["consumed_tokens"] == 3 * SMALL["global_batch_size"] * SMALL["seq_length"]
    assert event["checkpoint"].endswith("iter_0000003")
    assert read_status(tmp_path / "logs" / STATUS_FILE) == ExitStatus.STOPPED
    supervisor[0].report_end(ExitStatus.RANK_LOST, "what others see of it")  # counts no more
    assert [event["event"] for event in read_events(tmp_path / "logs")] == ["start", "save", "end"]


def test_the_first_end_counts_but_a_loss_gives_way_to_a_ranks_own_account(tmp_path: Path) -> None:
    config = run(chain(tmp_path))
    first, other = Supervisor(config, Launch()), Supervisor(config, Launch(1, 2))
    for supervisor, status, stays in (
        (
            other,
            ExitStatus.RANK_LOST,
            ExitStatus.RANK_LOST,
        ),  # the watchdog's: it found the first rank missing
        (first, ExitStatus.STOPPED, ExitStatus.RANK_LOST),  # the launcher's signal
        (other, ExitStatus.UNEXPECTED, ExitStatus.RANK_LOST),  # a collective's error in unknown words
        (first, ExitStatus.STORAGE, ExitStatus.STORAGE),  # why it was silent
        (other, ExitStatus.MISTAKE, ExitStatus.STORAGE),
        (first, ExitStatus.RANK_LOST, ExitStatus.STORAGE),
    ):
        supervisor.report_end(status, status.name)
        assert read_status(tmp_path / "logs" / STATUS_FILE) == stays
    assert [e["why"] for e in read_events(tmp_path / "logs") if e["event"] == "end"] == [
        "RANK_LOST",
        "STORAGE",
    ]


@pytest.mark.parametrize(
    ("environ", "job", "restarts"),
    [
        ({}, "", 0),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}, "17", 2),
        ({"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "3"}, "15_3", 0),
        ({"PBS_JOBID": "9.head"}, "9.head", 0),
        ({"TORCHELASTIC_RUN_ID": "none"}, "", 0),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            | {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1", "SLURM_RESTART_COUNT": "2"},
            "a",
            3,
        ),
    ],
)
def test_the_job_and_its_restarts_by_the_environment(
    environ: dict[str, str], job: str, restarts: int
) -> None:
    launch = read_launch(environ)
    assert (launch.job, launch.restarts) == (job, restarts)


def test_a_mistake_of_the_launcher_is_said_by_the_first_process_alone() -> None:
    uneven = {"SLURM_NTASKS": "3", "SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "2,1", "SLURM_JOB_ID": "1"}
    for task, said in (("0", 1), ("1", 0)):
        done = subprocess.run(
            [sys.executable, "pretrain/pretrain_gpt.py"],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "SLURM_PROCID": task, **uneven},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == ExitStatus.MISTAKE
        assert done.stderr.count("different numbers of tasks") == said, done.stderr
    assert is_first({}) and is_first({"RANK": "0", "SLURM_PROCID": "1"}) and not is_first({"PMI_RANK": "2"})
