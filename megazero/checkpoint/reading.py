"""Reads a checkpoint in one process: its description, its small files, and its tensors a piece at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megazero.bounded import load_json
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import STATE_FILE, Manifest, check_checksum, open_manifest, read_manifest
from megazero.checkpoint.metadata import read_metadata
from megazero.checkpoint.placement import Placement
from megazero.checkpoint.planners import CHUNK_ELEMENTS, SliceLoadPlanner, tensors_by_kind
from megazero.checkpoint.records import SliceRecord
from megazero.files import decoded

PIECE_ELEMENTS = CHUNK_ELEMENTS  # smaller pieces would read a chunk several times


def rank_file(rank: int) -> str:
    """Return the name of the file of a rank's own tensors."""
    return f"rank_{rank:05d}.safetensors"


def check_files(path: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Check the checksums of this rank's share of the files; together the ranks read each file once."""
    for name in share_of(manifest.files, rank, world_size):
        check_checksum(path, name, manifest.files[name])


def share_of(names: Collection[str], rank: int, world_size: int) -> list[str]:
    """Return which of a checkpoint's files a rank checks.

    Files that are numbered by rank go to ranks in that order, so a rank checks what it, or its node, loads next: the
    node's memory still has those bytes, and the storage is read once.
    """

    def numbered(name: str) -> tuple[list[str], list[int]]:
        return re.split(r"\d+", name), [int(number) for number in re.findall(r"\d+", name)]

    alike = groupby(sorted(names, key=numbered), lambda name: numbered(name)[0])
    series = (list(files) for _, files in alike)
    return [name for files in series for i, name in enumerate(files) if i * world_size // len(files) == rank]


def open_metadata(path: Path, manifest: Manifest) -> Metadata:
    """Return the description of the tensors. Raises CheckpointError unless the manifest lists the files of all."""
    metadata = read_metadata(path)
    for info in metadata.storage_data.values():
        if info.relative_path not in manifest.files:
            raise CheckpointError(
                f"'{path}' refers to '{info.relative_path}', which its manifest does not list"
            )
    return metadata


class Reader(FileSystemReader):
    """Reads tensors with ``weights_only=True`` (torch's own) and the metadata without running it.

    The signature has no ``kwargs``, so torch does not fall back to per-rank metadata files.
    """

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return read_metadata(Path(self.path))


def read_records(
    path: Path, metadata: Metadata, records: Sequence[SliceRecord], kinds: Mapping[str, str]
) -> None:
    """Drive DCP's planner and reader without its collectives: each rank reads for itself."""
    reader, planner = Reader(path), SliceLoadPlanner(records, kinds)
    planner.set_up_planner({}, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()
    planner.finish()


def read_file(path: str | os.PathLike, name: str) -> bytes:
    """Return a small file of a checkpoint. CheckpointError is raised if it is damaged or not there."""
    path, manifest = Path(path), read_manifest(path)
    if name not in manifest.files:
        raise CheckpointError(f"checkpoint '{path}' has no file '{name}'")
    check_checksum(path, name, manifest.files[name])
    return (path / name).read_bytes()


def read_state(path: str | os.PathLike) -> dict[str, Any]:
    """Return a checkpoint directory's ``state`` as saved. CheckpointError is raised if it is damaged or not there."""
    return decoded(load_json(read_file(path, STATE_FILE)))


def verify(path: str | os.PathLike) -> Manifest:
    """Check every file of the checkpoint directory ``path`` against its manifest, or raise CheckpointError."""
    manifest = open_manifest(Path(path))
    check_files(Path(path), manifest)
    open_metadata(Path(path), manifest)
    return manifest


def pieces(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of the pieces of a tensor: of at most PIECE_ELEMENTS, or one row."""
    rows = shape[0] if shape else 1
    step = max(1, PIECE_ELEMENTS // max(1, prod(shape[1:])))
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


class StoredTensors:
    """The tensors of one kind in a directory of torch.distributed.checkpoint. Reading takes the memory of a piece.

    shapes, dtypes: of every tensor, by name, as they are stored.
    """

    def __init__(self, path: Path, metadata: Metadata, kind: str) -> None:
        self.path, self.kind, self._metadata = path, kind, metadata
        tensors = tensors_by_kind(metadata).get(kind, {})
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(t.size) for name, t in tensors.items()}
        self.dtypes: dict[str, torch.dtype] = {name: t.properties.dtype for name, t in tensors.items()}

    @classmethod
    def open(cls, path: str | os.PathLike, kind: str = "weights") -> StoredTensors:
        """Open a kind of the checkpoint directory ``path``. ``check_files`` or ``verify`` checks the bytes, not this.

        Raises CheckpointError if the checkpoint is incomplete or lacks the kind.
        """
        manifest = open_manifest(Path(path))
        if kind not in manifest.kinds:
            raise CheckpointError(
                f"'{path}' holds no '{kind}', only {', '.join(map(repr, sorted(manifest.kinds)))}"
            )
        return cls(Path(path), open_metadata(Path(path), manifest), kind)

    def read(self, name: str, first: int = 0, rows: int | None = None) -> torch.Tensor:
        """Return rows ``first`` .. of a tensor, on the CPU and in the stored dtype; all of it by default."""
        shape = self.shapes[name]
        local = (shape[0] - first if rows is None else rows, *shape[1:]) if shape else ()
        out = torch.empty(local, dtype=self.dtypes[name])
        record = SliceRecord(
            Placement.plain(name, shape, local, first), 0, out.numel(), {self.kind: out.view(-1)}
        )
        self.fill([record])
        return out

    def fill(self, records: Sequence[SliceRecord]) -> None:
        """Fill those tensors of the records that are of this kind. The dtype is converted to theirs."""
        read_records(self.path, self._metadata, records, {self.kind: self.kind})
