"""megazero status: what the files of a run say, in words and as a curve of text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from megazero.cli import status as command
from megazero.config.run import all_options
from megazero.ops import status
from megazero.ops.lease import Leaseholder
from megazero.ops.status import facts, read_run, restarts, state
from tests import ROOT
from tests.messages import names, refused
from tests.unit.log.test_metrics import _line

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


def at(seconds: float) -> str:
    return (NOON + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def write(folder: Path, **files: list[dict[str, Any]]) -> Path:
    """Write files of JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_run(folder: Path, iterations: int = 300, ends: tuple[dict[str, Any], ...] = ()) -> Path:
    """A run of 1000 iterations that was stopped after 150, killed after 220 and started from 200."""
    start = {"event": "start", "run_id": "a1", "last_iteration": 1000, "job_id": "77", "hosts": ["n1", "n2"]}
    older = {"event": "start", "run_id": "older", "last_iteration": 5, "restarts": 0, "iteration": 0}
    events: list[dict[str, Any]] = [
        {**older, "hosts": []},
        {**start, "time": at(0), "iteration": 0, "restarts": 0},
        {"event": "save", "time": at(150), "iteration": 150, "path": "run/iter_0000150", "seconds": 1.5},
        {"event": "end", "time": at(151), "status": 75, "why": "received SIGUSR1 <b>"},
        {**start, "time": at(400), "iteration": 150, "restarts": 1},
        {"event": "save", "time": at(450), "iteration": 200, "path": "run/iter_0000200", "seconds": 2.0},
        {"event": "save", "time": at(470), "iteration": 220, "path": "run/iter_0000220", "seconds": 2.0},
        {**start, "time": at(500), "iteration": 200, "restarts": 2, "lease": "o2"},
    ]
    lines: list[dict[str, Any]] = []
    for i in range(1, iterations + 1):
        ranks = {"least_s": 0.4, "most_s": 0.6, "slowest_rank": 3 if i % 4 else 1, "slowest_host": "n2"}
        extra: dict[str, Any] = {"time": at(1000 + 2 * i), "rank_times": ranks}
        extra |= {"restarts": 2, "resumed_from": 200} if i == 201 else {}
        lines.append(_line(i, lm_loss=8 - i / 100, extra=extra).as_dict())
    lines.insert(200, {"iteration": 200, "eval_lm_loss": 5.5, "eval_ppl": 1.0})
    return write(folder, events=[*events, *ends], metrics=lines)


def test_facts_of_a_run_under_way(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "logs"))
    said = facts(run)
    assert said["position"] == "iteration 300 of 1,000 (30.0%), 2,400 samples"
    assert said["speed"].startswith("0.5 s per iteration, 1,000 tokens/s")
    assert said["loss"] == "5.0000, evaluation 5.5000 at iteration 200"
    assert said["done"].startswith("in 23 min 20 s")  # 700 iterations of 2 s by the clock
    # That of iteration 220 was left behind by the start from 200.
    assert said["checkpoint"].startswith("run/iter_0000200, 2026-05-04 ")
    names(said["slowest rank"], "3 on n2", "75 of the last 100", "0.6 s")
    assert (said["restarts"], said["runs as"]) == ("2", "job 77 on n1, n2")
    first, second = restarts(run)
    names(first, "iteration 150", "status 75", "received SIGUSR1 <b>")
    names(second, "iteration 200", "killed")


END = {"event": "end", "lease": "o2", "time": at(1601)}
STOP = {**END, "status": 75, "why": "received SIGUSR1"}
LOST = {**END, "status": 76, "why": "missing: rank 5"}
SCRIPT = {"event": "job", "time": at(1602), "status": 75, "then": "queue", "why": "back into the queue"}
GAVE_UP = {**SCRIPT, "status": 76, "then": "end", "why": "3 restarts without a new checkpoint"}
CANCELLED = {**SCRIPT, "then": "end", "why": "not again: it was cancelled"}
HELD, OVER = {"phase": "iteration 301", "phase_s": 3.0}, {"released": at(0)}
# what is true: (the state, whether it needs a person, words of it, the lease's fields, events, seconds of silence)
STATES: dict[str, tuple[str, bool, str, dict[str, Any] | None, tuple[dict[str, Any], ...], float]] = {
    "trains": ("under way", False, "iteration 301, for 3.0 s", HELD, (), 2),
    "is silent": ("silent", True, "on n1 for 1 min 40 s", HELD, (), 100),
    "starts again": ("under way", False, "joining", {"owner": "o3", "phase": "joining"}, (STOP, SCRIPT), 2),
    "was told to stop": ("stopped", False, "SIGUSR1", OVER, (STOP,), 400),
    "left without a word": ("stopped", False, "n1", OVER, (), 400),
    "waits after a stop": ("waits", False, "back into the queue", OVER, (STOP, SCRIPT), 400),
    "goes on in a chain": ("waits", False, "rank 5", OVER, (LOST, {**SCRIPT, "status": 76, "then": "chain"}), 9),
    "was cancelled": ("stopped", False, "cancelled", OVER, (STOP, CANCELLED), 400),
    "found the kill switch": ("stopped", False, "", OVER, ({**LOST, "status": 77}, {**GAVE_UP, "status": 77}), 9),
    "lost a rank": ("gave up", True, "rank 5", HELD, (LOST,), 2),
    "got no new checkpoint": ("gave up", True, "3 restarts", OVER, (LOST, GAVE_UP), 9),
    "made a mistake": ("failed", True, "mistake", OVER, ({**LOST, "status": 2},), 9),
    "made one at its next start": ("failed", True, "2", OVER, (STOP, SCRIPT, {**GAVE_UP, "status": 2}), 9),
    "lost its folder": ("failed", True, "in use", OVER, ({**LOST, "status": 73},), 9),
    "has finished": ("finished", False, "done", OVER, ({**END, "status": 0, "why": "done"},), 9),
    "wrote no lease, and trains": ("under way", False, "", None, (), 500),
    "wrote no lease, and is silent": ("silent", True, "", None, (), 700),
}  # fmt: skip


def true_state(folder: Path, what: str) -> Path:
    """Write the files of a run in this state."""
    _, _, _, fields, events, silence = STATES[what]
    write_run(folder, ends=events)
    file = folder / "metrics.jsonl"
    if fields is not None:
        usual = {"owner": "o2", "job": "77", "host": "n1", "restarts": 2}
        file = folder / "lease"
        file.write_text(Leaseholder(**{**usual, **fields}).write())
    os.utime(file, (0, time.time() - silence))
    return folder


@pytest.mark.parametrize("what", STATES)
def test_the_state_is_true(tmp_path: Path, what: str) -> None:
    wanted, alarming, words = STATES[what][:3]
    run = read_run(true_state(tmp_path, what))
    found = state(run)
    assert found.words.startswith(wanted) and found.alarming == alarming, found
    names(found.words, words)
    assert ("done" in facts(run)) == (wanted == "under way")


def test_the_page_has_every_state() -> None:
    page = (ROOT / "docs" / "guide" / "slurm.md").read_text()
    assert {wanted for wanted, *_ in STATES.values() if f"| `{wanted}" not in page} == set()


def test_iterations_that_were_left_out_took_no_time(tmp_path: Path) -> None:
    lines = [_line(i, extra={"time": at(2 * place)}).as_dict() for place, i in enumerate((10, 11, 512, 513))]
    lines[2] |= {"left_out": [{"iterations": [12, 511], "samples": [0, 1]}]}
    start = {"event": "start", "last_iteration": 613, "restarts": 0, "hosts": [], "job_id": ""}
    assert read_run(write(tmp_path, events=[start], metrics=lines)).seconds_left == 200.0
    lines[-1] |= {"tokens_left": 2500}  # 1,500 took six seconds
    assert read_run(write(tmp_path, events=[start], metrics=lines)).seconds_left == 10.0


def test_a_run_at_its_start_an_old_one_and_no_run(tmp_path: Path) -> None:
    begun = write_run(tmp_path / "begun", iterations=0)
    (begun / "metrics.jsonl").unlink()
    assert facts(read_run(begun))["position"] == "no iteration yet"
    old = write_run(tmp_path / "old")
    (old / "events.jsonl").unlink()
    with (old / "metrics.jsonl").open("a") as file:
        file.write('{"torn')
    said = facts(read_run(old))
    assert said["position"].startswith("iteration 300,") and "done" not in said
    with refused("metrics.jsonl", "events.jsonl", "--log-dir"):
        read_run(write(tmp_path / "other", metrics=[{"step": 1, "loss": 2.0}], events=[{"level": "info"}]))


def test_a_long_file_is_read_in_part_with_its_end_and_its_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MOST_LINES", 30)
    run = read_run(write_run(tmp_path / "logs"))
    assert [line["iteration"] for line in run.iterations[-100:]] == list(range(201, 301))
    assert len(run.iterations) < 130 and len(run.evaluations) == 1


def test_without_a_folder_it_reports_the_run_of_the_default_log_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main([]) == 2 and "--log-dir" in capsys.readouterr().err
    true_state(tmp_path / all_options()["log_dir"].default, "is silent")
    assert command.main(["--quiet"]) == 1
    assert capsys.readouterr().out.count("\n") == 1
    true_state(tmp_path / "other", "trains")
    assert command.main(["other", "--quiet"]) == 0 and capsys.readouterr().out == ""


def test_the_program_prints_and_loads_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "logs")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "megazero", "status", str(folder), str(tmp_path / "none")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "none has neither" in done.stderr  # the other one is told all the same
    assert "iteration 300 of 1,000" in done.stdout
