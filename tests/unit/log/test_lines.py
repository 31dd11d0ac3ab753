"""Lines wait in memory while a disk is full, in order and whole, and are written when there is room again."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.files import replacing
from megazero.log import line_file
from megazero.log.line_file import LineFile
from megazero.log.metrics import read_metrics
from megazero.log.safe_stream import SafeStream
from megazero.train.trainer import Trainer
from tests.messages import refused
from tests.unit.log.test_history import chain
from tests.unit.train.test_seams import run


class Disk:
    """``open`` of a disk with room for so many bytes more, or that fails in another way."""

    def __init__(self, room: int, error: int = errno.ENOSPC) -> None:
        self.room, self.error, self.opened = room, error, 0

    def open(self, path: Path, mode: str, **options: Any) -> Any:
        self.opened += 1
        disk, file = self, open(path, mode, **options)  # noqa: SIM115

        class File:
            def write(self, data: bytes) -> int:
                if not disk.room:
                    raise OSError(disk.error, os.strerror(disk.error))
                written = file.write(data[: disk.room])
                disk.room -= written
                return written

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return File()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
def test_lines_wait_whole_and_in_order_whatever_room_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    disk, clock = Disk(25, error), Clock()
    monkeypatch.setattr(line_file, "open", disk.open, raising=False)
    file = LineFile(tmp_path / "lines", clock=clock)
    wanted = [b"line %04d\n" % number for number in range(40)]
    with pytest.warns(UserWarning, match="training goes on, and lines are kept in memory") as caught:
        for number, line in enumerate(wanted):
            disk.room += 7 if number > 20 else 0  # parts of lines
            clock.now += line_file.RETRY_S
            file.append(line)
        disk.room = 10_000
        file.close()
    assert (tmp_path / "lines").read_bytes() == b"".join(wanted)
    assert len(caught) <= 2  # with what a short write says, in its own words
    assert disk.opened > 1 or error != errno.ESTALE  # a stale handle is opened again


def test_a_full_disk_is_asked_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, clock = Disk(0), Clock()
    monkeypatch.setattr(line_file, "open", disk.open, raising=False)
    file = LineFile(tmp_path / "lines", clock=clock)
    with pytest.warns(UserWarning, match="training goes on"):
        file.append(b"line 0000\n")
        disk.room = 1000
        for number in range(1, 10):
            file.append(b"line %04d\n" % number)  # not asked again yet
        assert disk.room == 1000
        clock.now += line_file.RETRY_S
        file.append(b"line 0010\n")
    assert (tmp_path / "lines").read_bytes() == b"".join(b"line %04d\n" % n for n in range(11))


def test_what_is_left_at_the_end_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "open", Disk(4).open, raising=False)
    file = LineFile(tmp_path / "lines")
    with pytest.warns(UserWarning) as caught:
        file.append(b"line 1\n")
        file.append(b"line 2\n")
        file.close()
    assert "lines: 2 line(s) lost, for which the disk had no room" in f"{caught[-1].message}"


def test_another_fault_at_the_opening_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "folder").touch()
    with refused("folder/lines", by=OSError):
        LineFile(tmp_path / "folder" / "lines")


class Full:
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_library_that_replaces_write_sees_what_is_safe() -> None:
    stream, seen = SafeStream(io.StringIO()), list[str]()
    found = stream.write

    def write(text: str) -> int:
        seen.append(text)
        return found(text)

    stream.write = write  # type: ignore[method-assign]
    print("it is \a", file=stream)
    assert "".join(seen) == stream.getvalue() == "it is \\x07\n"


def test_a_log_on_a_full_disk_does_not_raise() -> None:
    stream = SafeStream(Full())  # type: ignore[arg-type]
    print("a line", file=stream, flush=True)
    with pytest.raises(OSError, match="Bad file"):
        broken = Full()
        broken.write = lambda text: (_ for _ in ()).throw(OSError(errno.EBADF, "Bad file"))  # type: ignore[method-assign]
        print("a line", file=SafeStream(broken))  # type: ignore[arg-type]


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with open(filler, "ab", buffering=0) as file:
        while True:
            try:
                file.write(b"x" * 512)
            except OSError:
                return filler


def test_a_file_that_does_not_fit_is_named_in_the_error(disk: Path) -> None:
    fill(disk)
    with (
        refused("disk/file", by=OSError),
        replacing(disk / "file") as file,
    ):
        file.write(b"x" * 10_000)
    assert [path.name for path in disk.iterdir()] == ["filler"]


def before(iteration: int, act: Callable[[], object]) -> Callable[[Trainer], None]:
    """What ``run`` takes, to do something before an iteration."""

    def watch(trainer: Trainer) -> None:
        step = trainer._iterate

        def iterate(batches: Any) -> Any:
            if trainer.progress.iteration + 1 == iteration:
                act()
            return step(batches)

        trainer._iterate = iterate  # type: ignore[method-assign]

    return watch


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore:.*torn line")
def test_a_run_goes_on_while_its_log_disk_is_full_and_resumes_on_it(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up in the run; the resume begins on the full disk and gets room on the way."""
    monkeypatch.setattr(line_file, "RETRY_S", 0.0)
    values = chain(tmp_path, train_iters=12, log_dir=str(disk / "logs"), log_interval=1)
    with pytest.warns(UserWarning, match=r"metrics.jsonl: No space left on device; training goes on"):
        traced = {"profile": True, "profile_step_start": 2, "profile_step_end": 3}
        run({**values, **traced, "exit_interval": 8}, before(2, lambda: fill(disk)))
    found = [line["iteration"] for line in read_metrics(disk / "logs")]
    assert found == list(range(1, len(found) + 1)) and len(found) < 8  # what its last block had room for
    with pytest.warns(UserWarning) as caught:
        run({**values, "tensorboard_dir": str(disk / "board")}, before(11, (disk / "filler").unlink))
    said = [f"{each.message}" for each in caught if each.category is UserWarning]
    assert len([text for text in said if "metrics.jsonl: No space left" in text]) == 1, said
    assert len([text for text in said if "logger does not start, training goes on without it" in text]) == 1
    assert [line["iteration"] for line in read_metrics(disk / "logs")] == [*found, 9, 10, 11, 12]
