"""Saves behind the training: the same checkpoints, one in flight, complete at a stop, and a failure that is said."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megazero.checkpoint import image, store, writer
from megazero.checkpoint.directory import TRIAL
from megazero.log.exit_status import ExitStatus, status_of
from megazero.ops.failures import NonFiniteLoss
from tests.dist.pool import run_ranks
from tests.dist.runs import train

BASE = {"zero_preset": "zero3", "global_batch_size": 4}
WRITE, PROGRAM = writer.write_image, image.PROGRAM
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def with_writes(values: dict[str, Any], write: Callable) -> Any:
    """A run in this rank whose images are written by ``write(count, path, ...)``: its losses, or error and status."""
    count = [0]

    def counted(path: Path, *rest: Any) -> Any:
        count[0] += TRIAL not in path.parts
        return write(count[0], path, *rest)

    writer.write_image = counted
    try:
        return train(values).losses
    except (store.CheckpointError, NonFiniteLoss) as error:
        return f"{error}", status_of(error)
    finally:
        writer.write_image = WRITE


def slowly(count: int, *arguments: Any) -> Any:
    time.sleep(0.2 * dist.get_rank())
    return WRITE(*arguments)


def full_at_the_second(count: int, path: Path, *rest: Any) -> Any:
    return full_from_the_second(count if count == 2 else 1, path, *rest)


def full_from_the_second(count: int, path: Path, *rest: Any) -> Any:
    if count >= 2 and dist.get_rank() == 1:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return WRITE(path, *rest)


def still_from_the_second(count: int, *arguments: Any) -> Any:
    if count >= 2 and dist.get_rank() == 1:
        time.sleep(5)
    return WRITE(*arguments)


def full_from_the_start(count: int, path: Path, *rest: Any) -> Any:
    return full_from_the_second(2, path, *rest)


@pytest.mark.slow
def test_a_stop_and_the_end_wait_for_what_is_written(tmp_path: Path) -> None:
    run = {**BASE, "save": str(tmp_path / "run"), "async_save": True, "log_dir": str(tmp_path / "logs")}
    stop = {**run, "save_interval": 100, "exit_interval": 3}
    run_ranks(2, with_writes, stop, slowly, timeout=300)
    assert os.listdir(tmp_path / "run") == ["iter_0000003"] and store.latest(tmp_path / "run") is not None
    go_on = {**run, "save_interval": 2, "load": str(tmp_path / "run")}
    run_ranks(2, with_writes, go_on, slowly, timeout=300)
    assert sorted(os.listdir(tmp_path / "run")) == [f"iter_{step:07d}" for step in (3, 4, 6)]


@pytest.mark.first(1)
@pytest.mark.parametrize("fault", [full_from_the_second, still_from_the_second])
def test_a_failed_write_is_an_error_when_the_time_to_try_is_over(tmp_path: Path, fault: Callable) -> None:
    """Of a disk that is full, or stands still for the time limit: on every rank alike, naming the one that has it."""
    values = {**BASE, "save": str(tmp_path / "run"), "async_save": True, "log_dir": str(tmp_path / "logs")}
    values |= {"save_interval": 2, "train_iters": 20, "save_retry_minutes": 0}
    values |= {"distributed_timeout_minutes": 0.05}
    answers = run_ranks(2, with_writes, values, fault, timeout=300)
    ((text, status),) = set(answers)
    what = "No space left" if fault is full_from_the_second else "has made no progress for"
    assert "iter_0000004' not saved, older ones are unharmed: rank 1: " in text and what in text, text
    assert status is (ExitStatus.STORAGE if fault is full_from_the_second else ExitStatus.RANK_LOST)
    latest = store.latest(tmp_path / "run")
    assert latest is not None and latest.name == "iter_0000002" and store.verify(latest).step == 2


@pytest.mark.first(1)
@pytest.mark.parametrize(("iterations", "kept"), [(7, (2, 6, 7)), (4, (2, 4))])
def test_a_save_that_failed_once_is_made_up_for(
    tmp_path: Path, iterations: int, kept: tuple[int, ...]
) -> None:
    """By the next one, which takes its place, and where there is none by another attempt."""
    values = {**BASE, "save": str(tmp_path / "run"), "async_save": True, "log_dir": str(tmp_path / "logs")}
    values |= {"save_interval": 2, "train_iters": iterations}
    for losses in run_ranks(2, with_writes, values, full_at_the_second, timeout=300):
        assert len(losses) == iterations
    assert sorted(os.listdir(tmp_path / "run")) == [f"iter_{step:07d}" for step in kept]
    latest = store.latest(tmp_path / "run")
    assert latest is not None and store.verify(latest).step == iterations


def late(count: int, *arguments: Any) -> Any:
    time.sleep(2)
    return WRITE(*arguments)


def test_a_loss_that_is_not_finite_waits_for_what_is_written(tmp_path: Path) -> None:
    values = {**BASE, "save": str(tmp_path / "run"), "async_save": True, "log_dir": str(tmp_path / "logs")}
    values |= {"clip_grad": 0, "lr_decay_style": "constant", "lr_warmup_iters": 0, "lr": 1e38}
    answers = run_ranks(2, with_writes, {**values, "save_interval": 1}, late, timeout=300)
    assert all("iteration 2: the loss is nan" in text for text, _ in answers), answers
    assert {status for _, status in answers} == {ExitStatus.NON_FINITE}
    assert store.verify(tmp_path / "run" / "iter_0000001").step == 1


def write_under_stop_signals(folder: Path) -> list[str]:
    """Write a file in many pieces; with each one that is written its processes' group is told to stop."""
    got, group = list[str](), os.getpgid(0)
    image.PROGRAM = folder / "image_writer.py"
    room = store.Staging().room(100_000, False)
    room.data.fill_(7)
    before = {number: signal.signal(number, lambda number, _: got.append(number)) for number in STOPS}
    os.setpgid(0, 0)
    try:
        image.write_image(folder / "file", room, lambda: [os.killpg(0, number) for number in STOPS])
    finally:
        os.setpgid(0, group)
        for number, handler in before.items():
            signal.signal(number, handler)
        image.PROGRAM = PROGRAM
    return got


def test_stop_signals_to_all_processes_do_not_end_what_writes(tmp_path: Path) -> None:
    text = PROGRAM.read_text()
    assert "1 << 24" in text
    (tmp_path / "image_writer.py").write_text(text.replace("1 << 24", "1000"))
    (got,) = run_ranks(1, write_under_stop_signals, tmp_path)
    assert set(got) == set(STOPS)
    assert (tmp_path / "file").read_bytes() == bytes([7]) * 100_000


def cannot_write(values: dict[str, Any]) -> Any:
    """A run in this rank, where rank 1 cannot write a file of tensors."""
    write = writer.Writer.write_tensors
    if dist.get_rank() == 1:
        writer.Writer.write_tensors = lambda *_: full_from_the_start(0, Path("tensors"))
    try:
        return train(values).losses
    except store.CheckpointError as error:
        return f"{error}", status_of(error)
    finally:
        writer.Writer.write_tensors = write


@pytest.mark.parametrize("behind", [True, False])
def test_a_run_that_cannot_save_says_so_before_the_first_step(tmp_path: Path, behind: bool) -> None:
    """And one that can leaves nothing of the checkpoint that it tried."""
    values = {**BASE, "save": str(tmp_path / "run"), "async_save": behind, "log_dir": str(tmp_path / "logs")}
    values |= {"save_interval": 2, "train_iters": 2, "lr_warmup_iters": 0}
    if behind:
        answers = run_ranks(2, with_writes, values, full_from_the_start, timeout=300)
    else:
        answers = run_ranks(2, cannot_write, values, timeout=300)
    ((text, status),) = set(answers)
    assert "this run could not save, so it does not begin" in text and "rank 1: " in text, text
    assert "No space left" in text and status is ExitStatus.STORAGE
    assert not (tmp_path / "logs" / "metrics.jsonl").exists() and os.listdir(tmp_path / "run") == []
    run_ranks(2, train, values, timeout=300)
    assert os.listdir(tmp_path / "run") == ["iter_0000002"]
