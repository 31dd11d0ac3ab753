"""Writes a rank's file of tensors, from where they are or from an image of the file."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path

import torch

from megazero.checkpoint.image import FileFrame, Image, Staging, write_image
from megazero.checkpoint.manifest import FileEntry
from megazero.checkpoint.planning import OwnChunk, PlaceRow
from megazero.checkpoint.records import SliceRecord


class Writer:
    """Writes one file per rank, which holds ``chunks`` as torch.save writes them, one after the other.

    It copies at most one tensor at a time, and takes the checksum while it writes. torch's own loop (2.13) has two
    faults: it keeps a host copy of every tensor of the file until the end, which is a second copy of the rank's whole
    state, and it loses an error in one of several writer threads.
    """

    def __init__(self, rank: int, chunks: Sequence[OwnChunk]) -> None:
        self.file_name = f"__{rank}_0.distcp"
        self._chunks, self._frame = chunks, FileFrame()
        self._places = [self._frame.add(chunk.box.stored_sizes, chunk.dtype) for chunk in chunks]
        self._image: Image | None = None
        self._made: tuple[SliceRecord, str, torch.Tensor] | None = None

    @property
    def rows(self) -> list[PlaceRow]:
        """Where each chunk lies."""
        return [
            [chunk.name, list(chunk.box.stored_offsets), self.file_name, start, length]
            for chunk, (start, length) in zip(self._chunks, self._places, strict=True)
        ]

    def take_image(self, staging: Staging) -> None:
        """Copy the file, as it will be, to host memory: from then on the tensors may change."""
        if self._chunks:
            pinned = any(chunk.record.tensors[chunk.kind].is_cuda for chunk in self._chunks)
            self._image = staging.room(self._frame.size, pinned)
            self._frame.fill(self._image.data, self._values())

    def write_tensors(self, folder: Path, tick: Callable[[], None]) -> dict[str, FileEntry]:
        """Write the rank's file and sync it. Return its size and checksum by name; nothing if the rank has no file.

        tick: is called after every tensor. This is not collective, and can be done again in another folder.
        """
        path = folder / self.file_name
        if self._image is not None:
            return {self.file_name: write_image(path, self._image, tick)}
        if not self._chunks:
            return {}
        crc32 = 0

        def write(stretch: torch.Tensor) -> None:
            nonlocal crc32
            data = stretch.cpu().numpy().data
            crc32 = zlib.crc32(data, crc32)
            _write_all(file, data)
            tick()

        with open(path, "xb", buffering=0) as file:
            self._frame.each(self._values(), write)
            os.fsync(file.fileno())
        return {self.file_name: FileEntry(self._frame.size, crc32)}

    def _values(self) -> list[Callable[[], torch.Tensor]]:
        return [partial(self._value, chunk) for chunk in self._chunks]

    def _value(self, chunk: OwnChunk) -> torch.Tensor:
        """Return what is stored of a chunk. It is a copy only of a box that is converted or transposed."""
        view = self._held(chunk.record, chunk.kind).view(chunk.kind, chunk.box)
        return view.to(chunk.dtype).contiguous()

    def _held(self, record: SliceRecord, kind: str) -> SliceRecord:
        """Return the record with its tensor, which stays until that of another record is made."""
        if record.make is None or not record.tensors[kind].is_meta:
            return record
        if self._made is None or self._made[0] is not record or self._made[1] != kind:
            self._made = None  # before the next one is made
            self._made = record, kind, record.make(kind)
        return replace(record, tensors={kind: self._made[2]})


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
