"""A rank's checkpoint file: what torch.save writes of its tensors, and an image of it in host memory.

The bytes that torch.save puts around a tensor do not depend on its values. They are taken from a tensor of that size
whose memory is never touched. Values and bytes are then written one after the other. Or they are copied to an image,
on CUDA asynchronously, so that training continues while the image gets its checksum and is written.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from megazero.checkpoint.manifest import FileEntry
from megazero.kernels.pages import lock_pages, unlock_pages

PROGRAM = Path(__file__).with_name("image_writer.py")
LOOK_S = 5.0  # of silence, after which the writer's state is looked at


@dataclass(frozen=True)
class Image:
    """A file in memory. data: its bytes, 1-D. memory: the descriptor by which another process sees them."""

    data: torch.Tensor
    memory: int


class Staging:
    """Shared memory for the images of a run, one after the other, page-locked where it takes copies from CUDA."""

    def __init__(self) -> None:
        self._memory = -1
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def room(self, nbytes: int, pinned: bool) -> Image:
        """Return room for this many bytes, at least 1. It reuses the last call's. Raises OSError without memory."""
        if self.nbytes < nbytes:
            self.release()
            self._memory = os.memfd_create("megazero save")
            os.posix_fallocate(self._memory, 0, nbytes)
            self._buffer = torch.frombuffer(mmap.mmap(self._memory, nbytes), dtype=torch.uint8)
            if pinned:
                lock_pages(self._buffer)
        return Image(self._buffer[:nbytes], self._memory)

    def release(self) -> None:
        """Give the memory back. Images that lie in it are lost."""
        if self._buffer.is_pinned():
            unlock_pages(self._buffer)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


class FileFrame:
    """The bytes that torch.save puts around the values of tensors, in the order of ``add``.

    size: of all, values included.
    """

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[list[bytes | None]] = []  # of each tensor; None stands for its values
        self._values = range(0)  # addresses of the tensor that is being added

    def add(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
        """Reserve room for torch.save's bytes of a tensor. Returns start and length."""
        start, untouched = self.size, torch.empty(tuple(shape), dtype=dtype)
        self._values = range(untouched.data_ptr(), untouched.data_ptr() + untouched.nbytes)
        self._parts.append([])
        with _plain_zip():
            torch.save(untouched, cast(IO[bytes], self))
        if not self._values:  # nothing was written from there
            self._parts[-1].append(None)
        return start, self.size - start

    def write(self, data: Any) -> int:
        """Take torch.save's output: its own bytes, and the places of the values."""
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0] if len(data) else 0
        if address not in self._values:
            self._parts[-1].append(bytes(data))
        elif address == self._values.start:
            self._parts[-1].append(None)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """All of it is taken already."""

    def each(
        self, values: Sequence[Callable[[], torch.Tensor]], take: Callable[[torch.Tensor], None]
    ) -> None:
        """Hand the file to ``take``, a stretch at a time: uint8 [n], n above 0, on the values' device or the CPU.

        values: return the contiguous tensors. They are called one by one, and nothing here holds what they return.
        """
        for parts, value in zip(self._parts, values, strict=True):
            for part in parts:
                if part is None:
                    _take_bytes(value().detach(), take)
                elif part:
                    take(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def fill(self, image: torch.Tensor, values: Sequence[Callable[[], torch.Tensor]]) -> None:
        """Make ``image`` [size] the file. values: as for ``each``.

        On CUDA they are copied on the current stream, and the host waits once, for all of them.
        """
        done, devices = 0, set[torch.device]()

        def copy(stretch: torch.Tensor) -> None:
            nonlocal done
            image[done : done + len(stretch)].copy_(stretch, non_blocking=True)
            done += len(stretch)
            devices.update({stretch.device} if stretch.is_cuda else ())

        self.each(values, copy)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


def _take_bytes(value: torch.Tensor, take: Callable[[torch.Tensor], None]) -> None:
    if value.numel():
        take(value.view(-1).view(torch.uint8))


@contextmanager
def _plain_zip() -> Iterator[None]:
    """Leave torch.save's own checksums out: the manifest has one of the whole file, and nothing checks two."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def write_image(path: Path, image: Image, tick: Callable[[], None]) -> FileEntry:
    """Write the image to a new file by a separate process, and return its size and checksum. tick: reports progress.

    A thread would not do: training steps come first, so the writer has the lowest priority, and a thread with it
    would hold Python's lock while the machine is busy. On a busy machine the writer may get no processor for minutes;
    waiting for a processor counts as progress. Raises OSError.
    """
    with open(path, "xb", buffering=0) as file:
        size, given = len(image.data), (image.memory, file.fileno())
        command = [sys.executable, "-I", "-S", str(PROGRAM), *map(str, (*given, size, os.getpid()))]
        with _started(command, given) as writer:
            for line in _lines(writer, tick):
                tick()
                kind, _, number = line.decode().partition(" ")
                if kind == "crc32":
                    return FileEntry(size, int(number))
                if kind == "errno":
                    raise OSError(int(number), os.strerror(int(number)), str(path))
    raise OSError(errno.EIO, f"the process that writes it ended with status {writer.returncode}", str(path))


def _lines(writer: subprocess.Popen[bytes], tick: Callable[[], None]) -> Iterator[bytes]:
    """Yield the writer's lines. ``tick`` is called regularly while it waits for a processor."""
    assert writer.stdout is not None
    while True:
        while not select.select([writer.stdout], [], [], LOOK_S)[0]:
            if runnable(writer.pid):
                tick()
        if not (line := writer.stdout.readline()):
            return
        yield line


def runnable(pid: int) -> bool:
    """Return whether a process of one thread could run now: it waits for a processor at most, not for a disk."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return told.rpartition(")")[2].split()[0] == "R"


def _started(command: Sequence[str], given: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the writer so that only SIGKILL ends it: a launcher may send its stop signal to all processes of a job.

    It has its own session and inherits this thread's blocked signals, so there is no moment without protection, and
    no Python code runs between fork and exec. It ends with the process that reads its output.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, bufsize=0, pass_fds=given, start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
