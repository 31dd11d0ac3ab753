"""The lease on a folder: who takes it, how long that waits, and how a run learns that it has lost it."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.config import make_config
from megazero.mesh.launch import Launch
from megazero.ops import lease as module
from megazero.ops.lease import (
    LOOK_S,
    NOBODY,
    NOTICE_S,
    SIZE,
    FolderInUse,
    Lease,
    Leaseholder,
    Place,
    read_lease,
)
from tests.messages import names, refused
from tests.sizes import SMALL

SILENT_S = module.SILENT_S


def holder(identity: str = "", **changes: object) -> Leaseholder:
    return replace(Leaseholder.of(Launch(node="gpu01", identity=identity)), **changes)


def lease(
    folder: Path, own: Leaseholder, during: Callable[[float], None] = lambda now: None
) -> tuple[Lease, list[float]]:
    """A lease on ``folder``, and its clock, which sleeps move on. during: called in every sleep."""
    clock = [random.uniform(0, 1e6)]
    began = clock[0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        during(clock[0] - began)

    return Lease((Place(folder, "--save"),), own, clock=lambda: clock[0], sleep=sleep), clock


# what the folder has, who asks, and for how long that waits
CASES = {
    "none": (None, holder(), 0.0),
    "released": (holder(released="2026"), holder(), 0.0),
    "a requeue of its job": (holder(identity="c 7"), holder(identity="c 7", restarts=1), NOTICE_S),
    "another step of its job": (holder(identity="c 7"), holder(identity="c 7"), SILENT_S + NOTICE_S),
    "another job that was requeued": (
        holder(identity="c 7"), holder(identity="d 7", restarts=1), SILENT_S + NOTICE_S,
    ),
    "silent, on this host, too": (holder(), holder(), SILENT_S + NOTICE_S),
    "nothing yet": ("", holder(), SILENT_S + NOTICE_S),  # it died between two calls
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_lease_is_taken_at_once_or_when_its_holder_was_silent(case, tmp_path) -> None:
    before, own, waits = CASES[case]
    if before is not None:
        (tmp_path / "lease").write_text(before if isinstance(before, str) else before.write())
    notes: list[str] = []
    taken, clock = lease(tmp_path, own)
    began = clock[0]
    taken.take(notes.append)
    assert clock[0] - began == pytest.approx(waits, abs=LOOK_S)
    assert len(notes) == (waits > SILENT_S)
    (file,) = tmp_path.iterdir()
    assert file.name == "lease"
    assert file.stat().st_size == SIZE and read_lease(tmp_path) == own and taken.taker(f"{tmp_path}") is None
    taken.release()
    found = read_lease(tmp_path)
    assert found is not None and found.released and found.owner == own.owner


def beats(path: Path, text: str) -> Callable[[float], None]:
    """What another process does meanwhile: it is stopped for 40 s, and then writes its lease."""

    def write(now: float) -> None:
        path.write_text(text % (now > 40))

    return write


@pytest.mark.parametrize(
    "text, words",
    [
        # Its clock is a year behind.
        (
            replace(holder(job="4711", host="gpu07", pid=12, started="2025-05-04"), owner="x", beat=-7)
            .write()
            .replace("-7", "%d"),
            ("job 4711 on gpu07", "process 12", "2025-05-04"),
        ),
        ('{"owner": "x", "later": 1, "beat": %d}', ("cannot be read",)),  # another release wrote it
        ("no JSON %d", ("cannot be read",)),
    ],
)
def test_what_changes_is_alive_and_is_named(text: str, words: tuple[str, ...], tmp_path) -> None:
    path = tmp_path / "lease"
    path.write_text(text % 0)
    asking, clock = lease(tmp_path, holder(), beats(path, text))
    began = clock[0]
    with refused("--save", *words, by=FolderInUse):
        asking.take()
    assert 40 <= clock[0] - began < 41 and [path.name for path in tmp_path.iterdir()] == ["lease"]


def test_of_two_folders_none_is_kept_when_one_is_in_use(tmp_path) -> None:
    (tmp_path / "logs").mkdir()
    path, text = tmp_path / "logs" / "lease", '{"owner": "x", "beat": %d}'
    path.write_text(text % 0)
    asking, _ = lease(tmp_path, holder(), beats(path, text))
    asking.places = (*asking.places, Place(tmp_path / "logs", "--log-dir"))
    with refused("--log-dir", by=FolderInUse):
        asking.take()
    free = read_lease(tmp_path)
    assert free is not None and free.released and asking.folders == []


def test_one_wait_is_enough_for_the_folders_of_one_dead_run(tmp_path) -> None:
    dead, folders = holder(), [tmp_path / name for name in ("save", "copy", "logs")]
    for folder in folders:
        folder.mkdir()
        (folder / "lease").write_text(dead.write())
    asking, clock = lease(tmp_path, holder())
    asking.places, began, notes = tuple(Place(folder, "--save") for folder in folders), clock[0], list[str]()
    asking.take(notes.append)
    assert 0 <= clock[0] - began - SILENT_S - NOTICE_S <= LOOK_S
    assert len(asking.folders) == 3 and len(notes) == 1
    asking.release()


def test_who_learns_from_its_own_beat_that_one_folder_is_lost_frees_the_others(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    mine = Lease((Place(tmp_path / "a", "--save"), Place(tmp_path / "b", "--log-dir")), holder())
    mine.lost = lambda text: mine.release()
    mine.take()
    other = Lease((Place(tmp_path / "a", "--save"),), holder())
    other._put(tmp_path / "a")
    mine._thread.join(10)
    free, taken = read_lease(tmp_path / "b"), read_lease(tmp_path / "a")
    assert free is not None and free.released and taken is not None and not taken.released


def test_a_lease_that_was_deleted_by_hand_is_written_again(tmp_path) -> None:
    mine, _ = lease(tmp_path, holder())
    mine.take()
    (tmp_path / "lease").unlink()
    mine.check(f"{tmp_path}", fresh=True)
    mine.beat()
    assert (found := read_lease(tmp_path)) is not None and found.beat == 1
    other, _ = lease(tmp_path, holder(), lambda now: mine.beat())
    with pytest.raises(FolderInUse):
        other.take()
    other.holder = replace(other.holder, host="gpu02")
    other._put(tmp_path)
    with refused("gpu02", by=FolderInUse):
        mine.check(f"{tmp_path}", fresh=True)
    mine.release()  # into its own file, which has no name any more
    assert (found := read_lease(tmp_path)) is not None and not found.released


def test_a_run_whose_save_was_moved_ends_and_makes_no_new_one(tmp_path) -> None:
    """A start that found an empty folder there would begin again."""
    save, logs = tmp_path / "run", tmp_path / "run" / "logs"
    mine = Lease((Place(save, "--save"), Place(logs, "--log-dir")), holder())
    mine.take()
    lost: list[str] = []
    mine.lost = lost.append
    shutil.rmtree(logs)
    mine.beat()
    assert lost == [] and mine.taker(f"{logs}") is NOBODY and not logs.exists()
    save.rename(tmp_path / "aside")
    mine.beat()
    (text,) = lost
    names(text, f"--save {save}", "moved or deleted")
    mine.release()
    assert [path.name for path in tmp_path.iterdir()] == ["aside"]


def test_a_folder_of_checkpoints_and_logs_has_the_rules_of_save(tmp_path) -> None:
    same = tmp_path / "run"
    mine = Lease.of(make_config({**SMALL, "save": f"{same}", "log_dir": f"{same}"}), Launch())
    assert mine.places == (Place(same, "--save"),)


def test_a_full_log_disk_takes_no_lease_and_ends_no_run(tmp_path, monkeypatch) -> None:
    for name in ("run", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lease").write_text(holder(released="2026").write())

    put = Lease._put

    def full(self: Lease, folder: Path) -> None:
        if folder == tmp_path / "logs":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, folder)

    monkeypatch.setattr(Lease, "_put", full)
    places = Place(tmp_path / "run", "--save"), Place(tmp_path / "logs", "--log-dir")
    mine = Lease(places, Leaseholder.of(Launch()))
    notes = list[str]()
    mine.take(notes.append)
    (note,) = notes
    names(note, f"--log-dir {tmp_path}/logs", "no lease")
    for folder in ("run", "logs"):
        mine.check(f"{tmp_path}/{folder}", fresh=True)
    mine.release()
    found = read_lease(tmp_path / "run")
    assert found is not None and found.released and not mine._thread.is_alive()
