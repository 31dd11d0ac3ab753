"""This is torch.distributed.checkpoint storage with checksums, without unrestricted unpickling (metadata.py).

The files stay what torch writes: other DCP tools can read them.
"""

from __future__ import annotations

import io
import os
import zlib
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megazero.checkpoint.manifest import FileEntry
from megazero.checkpoint.metadata import read_metadata


class Writer(FileSystemWriter):
    """It writes one file per rank, has one chunk in host memory at a time, and takes checksums while writing.

    torch's own loop (2.13) has three faults. It keeps a host copy of every tensor of the file until the end, which is
    a second copy of the rank's whole state. It loses an error in one of several writer threads. It hides 'no space
    left' behind torch.save's own 'unexpected pos', hence the buffer here. ``files`` holds this rank's file after the
    save. No machine path is stored.
    """

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        self.file_name = f"__{rank}_0.distcp"
        self.files: dict[str, FileEntry] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the plan's tensors into the rank's file, sync it, note size and checksum. It is done on return."""
        results = []
        if plan.items:
            buffer = io.BytesIO()  # grows once to the largest chunk
            size = crc32 = 0
            with open(Path(self.path) / self.file_name, "xb", buffering=0) as file:
                for item in plan.items:
                    buffer.seek(0)
                    torch.save(_compact(planner.resolve_data(item)), buffer)
                    length = buffer.tell()
                    with buffer.getbuffer() as whole:
                        crc32 = zlib.crc32(whole[:length], crc32)
                        _write_all(file, whole[:length])
                    place = dcp_filesystem._StorageInfo(self.file_name, size, length)
                    results.append(WriteResult(item.index, length, place))
                    size += length
                os.fsync(file.fileno())
            self.files[self.file_name] = FileEntry(size, crc32)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _compact(data: Any) -> torch.Tensor:
    """Return the tensor on the host, alone in its storage (torch.save writes whole storages)."""
    tensor = data.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Reader(FileSystemReader):
    """It reads tensors with ``weights_only=True`` (torch's own) and the metadata without running it.

    The signature has no ``kwargs``, so torch does not fall back to per-rank metadata files.
    """

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return read_metadata(Path(self.path))
