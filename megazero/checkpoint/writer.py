"""Writes a rank's tensors for torch.distributed.checkpoint, from where they are or from an image of the file.

The files stay what torch writes: other DCP tools can read them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megazero.checkpoint.image import Image, ImageBuilder, Staging, write_image
from megazero.checkpoint.manifest import FileEntry

Row = list[Any]  # where a chunk lies, as plain values: name, offset, hint, and file, first byte, bytes


def _result(row: Row) -> WriteResult:
    name, offset, hint, file, start, length = row
    place = dcp_filesystem._StorageInfo(file, start, length)
    return WriteResult(MetadataIndex(name, torch.Size(offset), hint), length, place)


class Writer(FileSystemWriter):
    """Writes one file per rank, copying at most one tensor at a time, and takes the checksum while writing.

    torch's own loop (2.13) has three faults. It keeps a host copy of every tensor of the file until the end, which is
    a second copy of the rank's whole state. It loses an error in one of several writer threads. It hides 'no space
    left' behind torch.save's own 'unexpected pos', hence ``_Sink``. No machine path is stored.

    ``torch.distributed.checkpoint.save``, which is collective, only arranges who writes what: it leaves the plan and,
    on the first rank, the description of all tensors here. It touches no file. ``write_tensors`` then writes this
    rank's file into a folder, and leaves in ``results`` where each chunk lies. ``write_metadata``, on the first rank,
    takes all ranks' results. Both can be done again, in another folder.
    """

    def __init__(self, rank: int) -> None:
        super().__init__("", single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        self.file_name = f"__{rank}_0.distcp"
        self.results: list[Row] = []
        self._plan: tuple[SavePlan, SavePlanner] | None = None
        self._metadata: Metadata | None = None
        self._image: Image | None = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Do not make a folder, as torch's does: a disk that hangs would hold the main thread."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Note what is to be written."""
        self._plan = plan, planner
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note the description of the tensors, which says nothing of files yet."""
        self._metadata = metadata

    def take_image(self, staging: Staging) -> None:
        """Copy the rank's file, as it will be, to host memory: from then on the tensors may change."""
        if self._plan is None or not self._plan[0].items:
            return
        plan, planner = self._plan
        frame = ImageBuilder()
        with _plain_zip():
            for item in plan.items:
                assert item.tensor_data is not None
                chunk = item.tensor_data
                self._note(item, *frame.add(chunk.chunk.sizes, chunk.properties.dtype))
        values = [partial(planner.resolve_data, item) for item in plan.items]
        pinned = torch.cuda.is_available() and cast(torch.Tensor, values[0]()).is_cuda
        self._image = staging.room(frame.size, pinned)
        frame.fill(self._image.data, cast(Any, values))

    def write_tensors(self, folder: Path, tick: Callable[[], None]) -> dict[str, FileEntry]:
        """Write the rank's file and sync it. Return its size and checksum by name; nothing if the rank has no file.

        tick: is called after every tensor. This is not collective.
        """
        path = folder / self.file_name
        if self._image is not None:
            return {self.file_name: write_image(path, self._image, tick)}
        assert self._plan is not None
        plan, planner = self._plan
        if not plan.items:
            return {}
        self.results.clear()  # of an attempt that failed
        with open(path, "xb", buffering=0) as file, _plain_zip():
            sink = _Sink(file)
            for item in plan.items:
                start = sink.size
                torch.save(_compact(planner.resolve_data(item)), cast(IO[bytes], sink))
                if sink.error is not None:
                    raise sink.error
                self._note(item, start, sink.size - start)
                tick()
            os.fsync(file.fileno())
        return {self.file_name: FileEntry(sink.size, sink.crc32)}

    def _note(self, item: WriteItem, start: int, length: int) -> None:
        index = item.index
        self.results.append([index.fqn, list(index.offset or ()), index.index, self.file_name, start, length])

    def write_metadata(self, folder: Path, results: Sequence[Sequence[Row]]) -> None:
        """Write ``.metadata`` of the chunks that all ranks have written. On the first rank."""
        assert self._metadata is not None
        self.path = folder
        super().finish(self._metadata, [list(map(_result, rows)) for rows in results])

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


@contextmanager
def _plain_zip() -> Iterator[None]:
    """Leave torch.save's own checksums out: the manifest has one of the whole file, and nothing checks two."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Sink:
    """Hands what torch.save writes on to a file, and keeps size and checksum of all of it.

    error: what the file's write raised. torch.save would hide it, so the write reports success and the caller looks
    here.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.size = self.crc32 = 0
        self.error: Exception | None = None

    def write(self, data: memoryview | bytes) -> int:
        try:
            if self.error is None:
                self.crc32 = zlib.crc32(data, self.crc32)
                _write_all(self._file, memoryview(data))
        except Exception as error:
            self.error = error
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """All of it is written already."""


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _compact(data: Any) -> torch.Tensor:
    """Return the tensor on the host, alone in its storage (torch.save writes whole storages), as a view of it."""
    tensor = data.detach().cpu()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.numel():
        return tensor.clone()
    array = tensor.contiguous().view(-1).view(torch.uint8).numpy()  # its bytes: numpy has no bfloat16
    return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)
