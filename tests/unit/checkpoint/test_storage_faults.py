"""Storage that fails: saves are tried again, damage begins no run anew, copies lie in a second folder.

Faults are raised where Python asks the operating system (its audit events, and fsync).
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero import files
from megazero.checkpoint import directory, image, manifest, saving, store
from megazero.checkpoint.directory import Retention, in_the_way, leftovers, retain
from megazero.checkpoint.errors import CheckpointError, SaveError, error_number
from megazero.checkpoint.placement import Placement
from megazero.checkpoint.records import SliceRecord
from megazero.config import ConfigError, World, begun, make_config, parse
from megazero.log.exit_status import ExitStatus, status_of
from megazero.train.state.origin import find_origin, leave_behind
from tests.messages import names, refused
from tests.sizes import TINY

EVENTS = ("open", "os.rename", "os.mkdir", "os.scandir", "os.rmdir", "os.remove", "subprocess.Popen")
PERSON = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM)
FIRST: Any = SimpleNamespace(rank=0)  # a mesh of one rank


class Faults:
    """Raises ``number`` at the operations from ``at`` on, ``left`` times."""

    def __init__(self) -> None:
        self.folder, self.number, self.at, self.left, self.count = "", 0, 0, 0, 0

    def arm(self, folder: Path, number: int, at: int, left: int = 1) -> None:
        self.folder, self.number, self.at, self.left, self.count = f"{folder}", number, at, left, 0

    def operation(self) -> None:
        self.count += 1
        if self.number and self.count > self.at and self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder and event in EVENTS and self._ours(event, arguments):
            self.operation()

    def sync(self, file: int) -> None:
        if self.folder and os.readlink(f"/proc/self/fd/{file}").startswith(self.folder):
            self.operation()

    def _ours(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """Tell whether a save has done it, and no thread that an earlier test has left."""
        if event == "subprocess.Popen":
            return str(image.PROGRAM) in map(str, arguments[1])
        return f"{arguments[0]}".startswith(self.folder)


FAULTS = Faults()
sys.addaudithook(FAULTS.audit)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    monkeypatch.setattr(saving, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(os, "fsync", FAULTS.sync)
    yield FAULTS
    FAULTS.folder = ""


def snapshot(step: int, run: str = "a") -> store.Snapshot:
    values = torch.arange(6, dtype=torch.float32) + step
    record = SliceRecord(Placement.plain("w", (6,)), 0, 6, {"weights": values})
    state = {"iteration": step, "consumed_samples": step, "run_id": run}
    return store.Snapshot(step, [record], state, {"rng": torch.arange(3)}, files={"empty.txt": b""})


def value(path: Path | None) -> float:
    assert path is not None
    return store.load_full(path)["w"][0].item()


@pytest.mark.first(1)
@pytest.mark.parametrize("behind", [False, True])
def test_a_save_goes_on_whichever_operation_fails(tmp_path: Path, faults: Faults, behind: bool) -> None:
    root, staging, told = tmp_path / "save", store.Staging() if behind else None, list[str]()
    for step in (1, 2):  # what a save of later steps has to do
        store.save(root, snapshot(step))
    step, operations = 2, 0
    while True:
        step, at = step + 1, operations
        faults.arm(root, errno.ESTALE, at)
        retry = store.Retry(60, told.append)
        manner: Any = {"staging": staging, "retry": retry, "retention": Retention(2), "overwrite": True}
        path = store.completed(store.saving(root, snapshot(step), **manner), None)
        missed, faults.folder = faults.left, ""
        assert value(path) == step and store.verify(path).step == step and not retry.failures
        retain(root, path, Retention(2))  # where that failed
        operations += 1
        if missed:
            break
    assert operations > (20 if behind else 19) and len(told) > 0.6 * operations
    names(told[0], "Stale file handle", "older ones are unharmed")
    store.save(root, snapshot(step + 1), retention=Retention(2))
    assert len(store.checkpoints(root)) == 2 and not leftovers(root)


@pytest.mark.parametrize("sees", ["the folder", "files of other nodes"])
def test_a_save_waits_for_what_its_node_sees_late(tmp_path: Path, monkeypatch, sees: str) -> None:
    """A network's file system keeps what it knows of a folder. Nothing is tried again for that."""
    prepare, size, late = directory.prepare, manifest.file_size, 0.3
    began: list[float] = []

    def prepare_late(*arguments: Any) -> Path:
        (folder := prepare(*arguments)).rename(aside := tmp_path / "aside")
        threading.Timer(late, aside.rename, [folder]).start()
        return folder

    def size_late(file: Path) -> int | None:
        began.append(time.monotonic())
        return size(file) if began[-1] - began[0] > late else None

    if sees == "the folder":
        monkeypatch.setattr(directory, "prepare", prepare_late)
    else:
        monkeypatch.setattr(manifest, "file_size", size_late)
    assert value(store.save(tmp_path / "save", snapshot(1))) == 1
    monkeypatch.setattr(files, "SEEN_S", 0.0)
    began.clear()
    with pytest.raises(CheckpointError):  # it is another folder there
        store.save(tmp_path / "save", snapshot(2))
    time.sleep(2 * late)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ESTALE, errno.ENOENT])
def test_what_lasts_ends_with_a_status_that_says_who_can_help(
    tmp_path: Path, faults: Faults, number: int
) -> None:
    store.save(tmp_path / "save", snapshot(1))
    faults.arm(tmp_path / "save", number, 3, left=-1)
    with pytest.raises(SaveError) as caught:
        store.completed(store.saving(tmp_path / "save", snapshot(2), retry=store.Retry(0.05)), None)
    faults.folder = ""
    assert status_of(caught.value) == (ExitStatus.STORAGE if number in PERSON else ExitStatus.RANK_LOST)
    assert value(store.latest(tmp_path / "save")) == 1
    # Of a mistake nothing is tried again.
    (tmp_path / "save" / "iter_0000003").mkdir()
    with pytest.raises(CheckpointError) as mistake:
        parts = store.saving(tmp_path / "save", snapshot(3), overwrite=True, retry=store.Retry(60))
        store.completed(parts, None)
    assert status_of(mistake.value) is ExitStatus.MISTAKE


@pytest.mark.parametrize("flag", ["--config", "--deepspeed-config"])
def test_a_file_of_the_command_line_on_a_disk_that_fails_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    path = f"{tmp_path / 'file'}"

    def stale(name: Any, *rest: Any, **named: Any) -> Any:
        if name == path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
        return opened(name, *rest, **named)

    opened = open
    with pytest.raises(ConfigError, match="No such file"):
        parse([flag, path], World(1, 1))
    monkeypatch.setattr("builtins.open", stale)
    with pytest.raises((OSError, ConfigError), match="Stale file handle") as caught:
        parse([flag, path], World(1, 1))
    assert status_of(caught.value) is ExitStatus.RANK_LOST


def test_a_folder_that_is_deleted_under_a_save(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SEEN_S", 0.5)  # how long the folder is waited for
    doomed = ["writing", "completing"]
    for part in store.saving(tmp_path, snapshot(1), retry=store.Retry(60)):
        if doomed and part.what.startswith(doomed[0]):
            doomed.pop(0)
            shutil.rmtree(next(tmp_path.glob(".iter*.partial-*")))
        part.start()
        part.wait_for_all(None, 60)
    assert not doomed and value(tmp_path / "iter_0000001") == 1


def test_pauses_double_up_to_a_minute_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    retry, pauses = store.Retry(200.0), list[float]()
    while (pause := retry.again()) is not None:
        pauses.append(pause)
        now[0] += pause
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 17] and store.Retry().again() is None


def test_nothing_is_tried_beside_a_call_that_hangs(tmp_path: Path, faults: Faults) -> None:
    """What hung goes on when its call returns: it must not take a later attempt's files away."""
    go, hung, told = threading.Event(), list[str](), list[str]()
    rename = os.rename

    def hang(source: Any, target: Any) -> None:
        if not hung:
            hung.append(f"{source}")
            go.wait()
        rename(source, target)

    retry = store.Retry(60, told.append)
    for part in store.saving(tmp_path, snapshot(1), overwrite=True, retry=retry):
        os.rename = hang if part.what.startswith("completing") else rename  # type: ignore[assignment]
        part.start()
        if part.pause:
            time.sleep(0.1)
            assert not part.returned(0) and not store.checkpoints(tmp_path)
            go.set()
        part.wait_for_all(None, 0.5 if part.what.startswith("completing") else 60)
    os.rename = rename  # type: ignore[assignment]
    assert hung and "has made no progress for" in told[0] and value(tmp_path / "iter_0000001") == 1
    go.clear()
    hung.clear()
    with pytest.raises(SaveError, match="has made no progress for") as caught:  # it never returns
        for part in store.saving(tmp_path, snapshot(2), overwrite=True, retry=store.Retry(0.3)):
            os.rename = hang if part.what.startswith("completing") else rename  # type: ignore[assignment]
            part.start()
            part.wait_for_all(None, 0.5 if part.what.startswith("completing") else 60)
    go.set()
    os.rename = rename  # type: ignore[assignment]
    assert status_of(caught.value) is ExitStatus.RANK_LOST


# -- damage ----------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_nothing_starts_from_random_weights_where_all_are_damaged(tmp_path: Path) -> None:
    save, other = tmp_path / "save", tmp_path / "other"
    said = {**TINY, "save": str(save), "load": str(save), "save_interval": 1}
    assert find_origin(make_config(said), FIRST).saved is None
    store.save(save, snapshot(2))
    store.save(other, snapshot(3, run="b"))
    with refused(f"--save {other} holds checkpoints of another run", by=CheckpointError):
        find_origin(make_config({**said, "save": str(other)}), FIRST)
    flip(save / "iter_0000002" / "state.json")
    with refused("iter_0000002", "state.json", by=CheckpointError):
        find_origin(make_config(said), FIRST)


def test_storage_that_does_not_answer_is_no_damage(tmp_path: Path, faults: Faults) -> None:
    """Or a run would go on from an older checkpoint, or from random weights, because of a moment."""
    for step in (1, 2):
        store.save(tmp_path, snapshot(step))
    said = {**TINY, "save": str(tmp_path), "load": str(tmp_path), "elastic": True}
    for operation in range(100):
        faults.arm(tmp_path, errno.ESTALE, operation)
        try:
            config = begun(make_config(said, World(1, 1)), World(1, 1))
            assert find_origin(config, FIRST).progress.iteration == 2
        except (CheckpointError, ConfigError) as error:
            assert status_of(error) is ExitStatus.RANK_LOST, (operation, error)
        missed, faults.folder = faults.left, ""
        if missed:
            break
    assert operation > 5


def test_a_checkpoint_that_counts_no_tokens_was_trained_on_what_is_not_left_out(tmp_path: Path) -> None:
    config, before = make_config(TINY), snapshot(9)
    before.state["left_out"] = [{"first": 3, "last": 5, "begin": 2, "end": 5}]
    store.save(tmp_path, replace(before, configuration=config.to_dict()))
    tokens = find_origin(make_config({**TINY, "load": str(tmp_path)}), FIRST).progress.tokens
    assert tokens == (9 - 3) * config.model.seq_length


def test_a_file_that_is_not_there_is_no_error_of_the_storage(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError) as caught:
            store.read_manifest(folder)
        assert error_number(caught.value) is None


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_lies_in_the_way_is_refused_at_the_start(tmp_path: Path, kind: str) -> None:
    store.save(tmp_path, snapshot(1))
    other = tmp_path / "iter_0000005"
    other.mkdir() if kind == "folder" else other.write_text("")
    config = make_config({**TINY, "save": str(tmp_path), "load": str(tmp_path)})
    origin = find_origin(config, FIRST)
    with refused("iter_0000005", by=CheckpointError):
        leave_behind(config, origin, FIRST, 5)
    assert in_the_way(tmp_path, 1, 4) == in_the_way(tmp_path, 5, 9) == []


def test_options_that_contradict_each_other() -> None:
    wrong = {"save_retain_interval": 3, "save_retry_minutes": -1}
    with refused("--save-retain-interval 3", "nearest: 2 or 4", "--save-retry-minutes -1"):
        make_config({**TINY, "save": "s", "save_interval": 2, **wrong})
