"""Two runs on one folder, as processes: the second ends before it touches anything, the first goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from megazero.log.exit_status import END_FOLDER, STATUS_FILE, ExitStatus, read_status
from megazero.log.metrics import read_metrics
from megazero.ops import lease
from tests.dist.failures.test_failing_ranks import LONG, errors, iterations
from tests.dist.runs import Processes, digest

LIVELY = {"BEAT_S": 0.2, "SILENT_S": 3.0, "LOOK_S": 0.05, "FRESH_S": 0.1, "NOTICE_S": 0.3}


def lively(rank: int) -> None:
    """Beat faster, so that the test is short."""
    for name, value in LIVELY.items():
        setattr(lease, name, value)
    os.environ[END_FOLDER] = f"{os.getpid()}.end"  # of its own, as from two batch scripts


def run_values(folder: Path) -> dict[str, object]:
    save = str(folder / "run")
    own = {
        "save": save,
        "load": save,
        "log_dir": str(folder / "logs"),
        "save_interval": 5,
        "save_keep_last": 2,
    }
    return {**LONG, **own}


def started(folder: Path, name: str, ranks: int = 1, prepare=lively) -> Processes:
    (folder / name).mkdir()
    return Processes.start(ranks, run_values(folder), folder / name, prepare=prepare)


def until(folder: Path, more: int, run: Processes) -> None:
    """Wait until a run has written so many lines more."""
    before = iterations(folder / "logs")
    run.wait_for(lambda: iterations(folder / "logs") > before + more)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_second_run_on_a_folder_ends_and_the_first_goes_on(folder) -> None:
    first = started(folder, "first")
    until(folder, 3, first)
    second = started(folder, "second", ranks=2)
    codes, text = second.statuses(), "".join(second.texts())
    until(folder, 2, first)
    first.stop()
    assert codes == [ExitStatus.IN_USE] * 2, text
    (line,) = [line for line in text.splitlines() if "is in use" in line]
    assert (
        f"--save {folder}/run is in use: a run on {os.uname().nodename} (process {first.ranks[0].pid})"
        in line
    )
    assert "Traceback" not in text and read_status(folder / "logs" / STATUS_FILE) is None
    steps = [row["iteration"] for row in read_metrics(folder / "logs") if "lm_loss" in row]
    assert steps == list(range(1, len(steps) + 1))
    assert [path.name.split(".")[0] for path in (folder / "logs").glob("events*")] == ["events"]


@pytest.mark.slow
def test_a_run_whose_folder_is_moved_ends_and_writes_nothing_more(folder) -> None:
    run = started(folder, "first", ranks=2)
    until(folder, 8, run)
    (folder / "run").rename(folder / "aside")
    first, second = run.statuses(60)
    assert first == ExitStatus.IN_USE and second in (ExitStatus.IN_USE, ExitStatus.RANK_LOST), run.texts()
    assert f"--save {folder}/run was moved or deleted under this run" in run.texts()[0]
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_a_run_that_was_stopped_for_long_ends_instead_of_writing(folder) -> None:
    first = started(folder, "first")
    until(folder, 8, first)
    os.kill(first.ranks[0].pid, signal.SIGSTOP)
    began = time.monotonic()
    second = started(folder, "second", ranks=2)
    until(folder, 3, second)
    waited = time.monotonic() - began
    before = (folder / "logs" / "events.jsonl").read_bytes()
    os.kill(first.ranks[0].pid, signal.SIGCONT)
    assert first.statuses() == [ExitStatus.IN_USE]
    assert re.search(r"was taken over by a run on .*; it ends here and writes nothing more", first.texts()[0])
    assert (folder / "logs" / "events.jsonl").read_bytes().startswith(before)
    assert "waiting up to 3 s" in second.texts()[0] and waited > LIVELY["SILENT_S"]
    second.stop()
    steps = [row["iteration"] for row in read_metrics(folder / "logs") if "lm_loss" in row]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_of_a_run_that_lost_its_lease_is_not_completed(folder, asynchronous) -> None:
    values = {**run_values(folder), "async_save": asynchronous, "save_interval": 1}
    (folder / "first").mkdir()
    first = Processes.start(2, values, folder / "first", prepare=lose_it_while_saving)
    codes = first.statuses()
    assert codes[0] == ExitStatus.IN_USE and codes[1] in (ExitStatus.IN_USE, ExitStatus.RANK_LOST), (
        first.texts()
    )
    assert {Path(name).parts[0] for name in digest(folder / "run") if name.startswith("iter_")} == {
        "iter_0000001"
    }
    assert [kind for kind, _ in errors(first.texts()[0])] == ["FolderInUse"]
    assert (folder / f"{first.ranks[0].pid}.end" / "exit_status").read_text() == "73\n"


def lose_it_while_saving(rank: int) -> None:
    """Another run takes the folder while the second checkpoint is written, and the renewal has not seen it yet."""
    lively(rank)
    lease.BEAT_S = 1000.0
    from megazero.checkpoint import directory, saving

    prepare, saves = directory.prepare, []

    def prepared(root: Path, step: int, overwrite: bool) -> Path:
        saves.append(step)
        if step == 2:
            (root / "lease").unlink()
            (root / "lease").write_text(lease.Leaseholder("other", "4712", "gpu09").write())
        return prepare(root, step, overwrite)

    saving.directory.prepare = prepared
