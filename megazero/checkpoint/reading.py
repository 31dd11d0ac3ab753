"""Reads a checkpoint in one process: its description, its small files, and its tensors a piece at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.utils import _create_file_view

from megazero.bounded import load_json
from megazero.checkpoint.boxes import Box, boxes
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import STATE_FILE, Manifest, check_checksum, open_manifest, read_manifest
from megazero.checkpoint.metadata import Description, StoredChunk, StoredTensor, read_metadata
from megazero.checkpoint.placement import Placement
from megazero.checkpoint.planning import CHUNK_ELEMENTS
from megazero.checkpoint.records import SliceRecord, split_name, stored_name
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


def open_metadata(path: Path, manifest: Manifest) -> Description:
    """Return the description of the tensors. Raises CheckpointError unless the manifest lists the files of all."""
    description = read_metadata(path)
    for place in description.places():
        if place.file not in manifest.files:
            raise CheckpointError(f"'{path}' refers to '{place.file}', which its manifest does not list")
    return description


def by_kind(description: Description) -> dict[str, dict[str, StoredTensor]]:
    """Map kind to name to every tensor of a checkpoint."""
    kinds: dict[str, dict[str, StoredTensor]] = {}
    for stored, tensor in description.tensors.items():
        kind, name = split_name(stored)
        kinds.setdefault(kind, {})[name] = tensor
    return kinds


# By chunk, views to fill and the part of the chunk that goes there.
_Reads = dict[StoredChunk, list[tuple[torch.Tensor, tuple[slice, ...]]]]


def read_records(
    path: Path, description: Description, records: Sequence[SliceRecord], kinds: Mapping[str, str]
) -> None:
    """Fill the records' tensors, whatever slices the checkpoint was written in. This is not collective.

    kinds: maps a kind of the records to one of the checkpoint ({'master': 'weights'} starts the masters from the
    weights). Records whose stored tensor the checkpoint lacks are left alone (the caller compares names first).
    Padding that the checkpoint does not store becomes zero.
    """
    wanted = [
        (record, kind, name)
        for record in records
        for kind in record.tensors
        if kind in kinds and (name := stored_name(kinds[kind], record.placement.name)) in description.tensors
    ]
    reads: _Reads = {}
    for record, kind, name in wanted:
        _add_reads(reads, name, description.tensors[name], record, kind)
    for file, chunks in groupby(sorted(reads, key=lambda chunk: chunk.place), lambda chunk: chunk.place.file):
        with open(path / file, "rb") as stream:
            for chunk in chunks:
                data = cast(IO[bytes], _create_file_view(stream, chunk.place.start, chunk.place.length))
                tensor = torch.load(data, map_location="cpu", weights_only=True)
                if tensor.shape != chunk.sizes:
                    raise ValueError(
                        f"'{path / file}' holds {tuple(tensor.shape)} where {chunk.sizes} belongs"
                    )
                for view, part in reads[chunk]:
                    view.copy_(tensor[part])
    for record, kind, _ in wanted:
        record.zero_padding(kind)


def _add_reads(reads: _Reads, name: str, stored: StoredTensor, record: SliceRecord, kind: str) -> None:
    for box in boxes(record.placement, record.start, record.stop):
        view, missing = record.view(kind, box), prod(box.stored_sizes)
        for chunk in stored.chunks:
            common = _common(box, chunk)
            if all(low < high for low, high in common):
                here = tuple(
                    slice(a - o, b - o) for (a, b), o in zip(common, box.stored_offsets, strict=True)
                )
                there = tuple(slice(a - o, b - o) for (a, b), o in zip(common, chunk.offsets, strict=True))
                reads.setdefault(chunk, []).append((view[here], there))
                missing -= prod(high - low for low, high in common)
        if missing:
            raise ValueError(f"'{name}': the checkpoint does not hold all of {box}")


def _common(box: Box, chunk: StoredChunk) -> list[tuple[int, int]]:
    """Return in which range of each dim a box and a chunk of one stored tensor overlap, if all are above zero."""
    return [
        (max(a, b), min(a + m, b + n))
        for a, m, b, n in zip(box.stored_offsets, box.stored_sizes, chunk.offsets, chunk.sizes, strict=True)
    ]


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

    def __init__(self, path: Path, description: Description, kind: str) -> None:
        self.path, self.kind, self._description = path, kind, description
        tensors = by_kind(description).get(kind, {})
        self.shapes: dict[str, tuple[int, ...]] = {name: t.shape for name, t in tensors.items()}
        self.dtypes: dict[str, torch.dtype] = {name: t.dtype for name, t in tensors.items()}

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
        read_records(self.path, self._description, records, {self.kind: self.kind})
