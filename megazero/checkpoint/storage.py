"""torch.distributed.checkpoint storage, with checksums and without unrestricted unpickling.

The files stay what torch writes: other DCP tools can read them.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import FileEntry

METADATA_FILE = ".metadata"

_CLASSES = (
    dcp_metadata.Metadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.TensorStorageMetadata,
    dcp_metadata.TensorProperties,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.StorageMeta,
    dcp_metadata._MEM_FORMAT_ENCODING,
    dcp_filesystem._StorageInfo,
    torch.Size,
)
_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _CLASSES},
    **_DTYPES,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # 'torch.strided' to the object
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's metadata classes and refuses to look up anything else."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise CheckpointError(
                f"'{METADATA_FILE}' asks to run '{module}.{name}', which no checkpoint of megazero does: the "
                "file is damaged or malicious and was not loaded; take a checkpoint from a source you trust"
            ) from None


def read_metadata(path: Path) -> Metadata:
    """The tensors' description of the checkpoint directory ``path``, without running code from it."""
    try:
        with open(path / METADATA_FILE, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(
            f"'{path / METADATA_FILE}' cannot be read ({type(error).__name__}: {error}); load another checkpoint"
        ) from error
    tensors = getattr(metadata, "state_dict_metadata", None)
    storage = getattr(metadata, "storage_data", None)
    if not (
        isinstance(metadata, Metadata)
        and isinstance(tensors, dict)
        and isinstance(storage, dict)
        and all(isinstance(value, TensorStorageMetadata) for value in tensors.values())
        and all(_safe(value) for value in storage.values())
    ):
        raise CheckpointError(
            f"'{path / METADATA_FILE}' is no description of tensors; load another checkpoint"
        )
    return metadata


def _safe(info: Any) -> bool:
    """Whether a storage entry names a plain file of the directory, read without extensions."""
    name = getattr(info, "relative_path", None)
    return (
        isinstance(name, str)
        and name == os.path.basename(name)
        and name not in ("", ".", "..")
        and not getattr(info, "transform_descriptors", None)
    )


class Writer(FileSystemWriter):
    """One file per rank, one chunk in host memory at a time, checksums taken while writing.

    torch's own loop (2.13) keeps a host copy of every tensor of the file until the end, which is a
    second copy of the rank's whole state; loses an error in one of several writer threads; and hides
    'no space left' behind torch.save's own 'unexpected pos', hence the buffer. ``files`` holds this
    rank's file after the save. No machine path is stored.
    """

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True, thread_count=1, overwrite=False)
        self.file_name = f"__{rank}_0.distcp"
        self.files: dict[str, FileEntry] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the plan's tensors into the rank's one file, synced; note its size and checksum. Done on return."""
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
    """The tensor on the host, alone in its storage (torch.save writes whole storages)."""
    tensor = data.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class Reader(FileSystemReader):
    """Reads tensors with ``weights_only=True`` (torch's own) and the metadata by the allow-list.

    The signature has no ``kwargs``: torch then does not fall back to per-rank metadata files.
    """

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return read_metadata(Path(self.path))
