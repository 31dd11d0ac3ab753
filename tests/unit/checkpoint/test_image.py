"""A rank's file in host memory is the file that a save at once writes, byte for byte."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megazero.checkpoint import image, store
from megazero.checkpoint.manifest import checksum
from megazero.checkpoint.placement import Placement, RowRange
from tests.messages import refused


def records(scale: float = 1.0) -> list[store.SliceRecord]:
    """Slices that begin in the middle of rows, a transposed one, one that is stored in another dtype, a replica's."""
    flat = torch.arange(60.0) * scale
    turned = Placement("t", (4, 6), (6, 4), (RowRange(0, 6, 0),), transposed=True)
    plain, other = Placement.plain("w", (6, 4)), Placement.plain("v", (3, 4))
    rounded = {"weights": torch.bfloat16}
    return [
        store.SliceRecord(plain, 0, 9, {"weights": flat[:9], "master": flat[:9]}, stored=rounded),
        store.SliceRecord(plain, 9, 24, {"weights": flat[9:24], "master": flat[9:24]}, stored=rounded),
        store.SliceRecord(turned, 0, 24, {"weights": flat[24:48]}),
        store.SliceRecord(other, 0, 12, {"weights": flat[48:].to(torch.float64)}),
        store.SliceRecord(other, 0, 12, {"weights": flat[48:].to(torch.float64)}, owner=False),
    ]


def test_tensors_of_no_elements_are_written_as_torch_writes_them() -> None:
    given = [torch.arange(3.0), torch.empty(0), torch.empty(0, 4, dtype=torch.int8), torch.arange(2)]
    frame, saved = image.FileFrame(), b""
    starts = [frame.add(each.shape, each.dtype)[0] for each in given]
    with image._plain_zip():
        for each in given:
            torch.save(each, file := io.BytesIO())
            saved += file.getvalue()
    written = torch.zeros(frame.size, dtype=torch.uint8)
    frame.fill(written, [lambda each=each: each for each in given])
    assert bytes(written.tolist()) == saved
    for each, start, end in zip(given, starts, [*starts[1:], frame.size], strict=True):
        read = torch.load(io.BytesIO(bytes(written[start:end].tolist())))
        assert torch.equal(read, each) and read.shape == each.shape and read.dtype == each.dtype


def snapshot(step: int, scale: float = 1.0) -> store.Snapshot:
    state = {"fallen": {"a": ["b"]}}
    return store.Snapshot(step, records(scale), state, {"rng": torch.arange(5, dtype=torch.uint8)})


def behind(root: Path, taken: store.Snapshot, staging: store.Staging, meanwhile: Callable[[], None]) -> Path:
    """Save from a copy; ``meanwhile`` is done before the first part."""
    parts = store.saving(root, taken, staging=staging)
    part = next(parts)
    meanwhile()
    part.start()
    part.wait_for_all(None, 60)
    return store.completed(parts, None)


def files(path: Path) -> dict[str, bytes]:
    """A checkpoint's files; of its manifest what does not tell the order of saving."""
    return {each.name: each.read_bytes() for each in path.iterdir() if each.name != "manifest.json"}


def test_a_save_behind_the_training_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    staging, addresses = store.Staging(), set[int]()
    for step, scale in ((1, 1.0), (2, 3.0)):
        at_once = store.save(tmp_path / "at once", snapshot(step, scale))
        taken = snapshot(step, scale)

        def change(taken: store.Snapshot = taken) -> None:
            for record in taken.records:
                for tensor in record.tensors.values():
                    tensor.fill_(-1)
            taken.rank_tensors["rng"].zero_()
            taken.state["fallen"]["a"].append("c")

        path = behind(tmp_path / "behind", taken, staging, change)
        assert files(path) == files(at_once) and store.verify(path) == store.verify(at_once)
        addresses.add(staging.room(1, False).data.data_ptr())
    assert len(addresses) == 1  # the buffer was kept
    size = store.verify(path).files["__0_0.distcp"].size
    assert staging.nbytes == size


def test_an_image_is_written_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, and what goes wrong there is the operating system's error here."""
    program = tmp_path / "image_writer.py"
    program.write_text(image.PROGRAM.read_text().replace("1 << 24", "8192"))
    monkeypatch.setattr(image, "PROGRAM", program)
    room, ticks = store.Staging().room(20_500, False), []
    room.data.copy_(torch.arange(20_500))
    entry = image.write_image(tmp_path / "file", room, lambda: ticks.append(1))
    assert (tmp_path / "file").read_bytes() == bytes(room.data.tolist())
    # Two pieces, the last whole block, and the rest, which goes through the cache.
    assert len(ticks) == 4 + 4 + 1
    assert checksum(tmp_path / "file") == entry
    with pytest.raises(FileExistsError):
        image.write_image(tmp_path / "file", room, lambda: None)
    program.write_text('print("errno 28")')
    with pytest.raises(OSError, match="No space left on device"):
        image.write_image(tmp_path / "full", room, lambda: None)
    program.write_text("import os; os.kill(os.getpid(), 9)")
    with refused("-9", by=OSError):
        image.write_image(tmp_path / "other", room, lambda: None)


RANK = """
import os, subprocess, sys
memory = os.memfd_create("image")
os.posix_fallocate(memory, 0, 1_000_000)
file = os.open(sys.argv[2], os.O_CREAT | os.O_WRONLY)
words = [sys.executable, "-I", "-S", sys.argv[1], *map(str, (memory, file, 1_000_000, os.getpid()))]
writer = subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=(memory, file), start_new_session=True)
writer.stdout.readline()
os.kill(os.getpid(), 9)
"""


def test_what_writes_ends_with_its_rank(tmp_path: Path) -> None:
    """In silence. It holds the rank's standard error, whose end is waited for here."""
    program = tmp_path / "image_writer.py"
    program.write_text(image.PROGRAM.read_text().replace("1 << 24", "1000"))
    command = [sys.executable, "-c", RANK, str(program), str(tmp_path / "file")]
    ended = subprocess.run(command, capture_output=True, timeout=60)
    assert ended.returncode == -9 and ended.stderr == b""
    assert 0 < (tmp_path / "file").stat().st_size < 1_000_000


SPINS = """
import os, sys, time
print(1, flush=True)
until = time.monotonic() + 20
while time.monotonic() < until and not os.path.exists(sys.argv[0] + ".seen"):
    pass
print("crc32 7")
"""


def test_what_waits_for_a_processor_gets_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that says nothing while it could run is told from one that waits for the disk."""
    program, seen = tmp_path / "image_writer.py", tmp_path / "image_writer.py.seen"
    program.write_text(SPINS)
    monkeypatch.setattr(image, "PROGRAM", program)
    monkeypatch.setattr(image, "LOOK_S", 0.01)
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 100:  # it says two lines; 20 s without this end it, too
            seen.touch()

    image.write_image(tmp_path / "file", store.Staging().room(1, False), tick)
    assert seen.exists()

    with subprocess.Popen(["sleep", "60"]) as sleeping:
        # Before its sleep it runs and waits by turns: a tenth of a second without running is the sleep.
        while any(image.runnable(sleeping.pid) or time.sleep(0.005) for _ in range(20)):
            assert sleeping.poll() is None
        sleeping.kill()
    assert not image.runnable(sleeping.pid)
