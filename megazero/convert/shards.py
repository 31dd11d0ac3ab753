"""Writes safetensors files, a piece of a tensor at a time; a finished file is not written again."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megazero.bounded import read_json
from megazero.checkpoint.manifest import FileEntry, checksum
from megazero.convert.folder import DTYPES, SINGLE_FILE
from megazero.files import replacing

NAMES = {dtype: name for name, dtype in DTYPES.items()}
PARTIAL = ".partial"


@dataclass(frozen=True)
class Plain:
    """A tensor to be written: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One file and its tensors, in the order in which they lie in it."""

    file: str
    tensors: tuple[Plain, ...]

    @property
    def header(self) -> bytes:
        """The bytes before the tensors' own: safetensors' length and JSON, padded to 8 bytes."""
        offset, told = 0, dict[str, Any](__metadata__={"format": "pt"})
        for tensor in self.tensors:
            span = [offset, offset + tensor.nbytes]
            told[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": span}
            offset = span[1]
        text = json.dumps(told, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def plan_shards(tensors: Sequence[Plain], limit: int) -> list[Shard]:
    """Deal the tensors out to files of at most ``limit`` bytes of tensors each; a larger tensor has its own file."""
    groups: list[list[Plain]] = [[]]
    held = 0
    for tensor in tensors:
        if groups[-1] and held + tensor.nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.nbytes
    if len(groups) == 1:
        return [Shard(SINGLE_FILE, tuple(groups[0]))]
    count = len(groups)
    return [
        Shard(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(group)) for i, group in enumerate(groups, 1)
    ]


def index_of(shards: Sequence[Shard]) -> dict[str, object]:
    """Return what INDEX_FILE says of several files."""
    total = sum(tensor.nbytes for shard in shards for tensor in shard.tensors)
    return {
        "metadata": {"total_size": total},
        "weight_map": {tensor.name: shard.file for shard in shards for tensor in shard.tensors},
    }


# Yields the pieces of a tensor in order: row-major, contiguous, in the tensor's dtype, on the CPU.
Pieces = Callable[[Plain], Iterator[torch.Tensor]]


def write_shard(
    folder: Path, shard: Shard, pieces: Pieces, source: str, advance: Callable[[int], None]
) -> FileEntry:
    """Write one file and return its size and checksum.

    It is written beside and renamed. A file that an earlier call finished from the same ``source`` (any text that
    names it) stays if its bytes have the checksum that was noted then. advance: called with the bytes written.
    Raises OSError if it cannot be written; finished files stay.
    """
    path, note = folder / shard.file, folder / f".{shard.file}.json"
    plan = f"{zlib.crc32(shard.header):08x} {source}"
    known = _read_note(note)
    if (
        path.exists()
        and known.get("plan") == plan
        and (entry := checksum(path)) == FileEntry(**known["entry"])
    ):
        advance(entry.size)
        return entry
    partial = folder / f"{shard.file}{PARTIAL}"
    try:
        entry = _write(partial, shard, pieces, advance)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    os.rename(partial, path)
    write_json(note, {"plan": plan, "entry": asdict(entry)})
    return entry


def _write(path: Path, shard: Shard, pieces: Pieces, advance: Callable[[int], None]) -> FileEntry:
    size = crc32 = 0

    def write(data: memoryview | bytes) -> None:
        nonlocal size, crc32
        crc32, size = zlib.crc32(data, crc32), size + len(data)
        view = memoryview(data)
        while view:
            view = view[stream.write(view) :]
        advance(len(data))

    with open(path, "wb", buffering=0) as stream:
        write(shard.header)
        for tensor in shard.tensors:
            for piece in pieces(tensor):
                if piece.numel():
                    write(piece.reshape(-1).view(torch.uint8).numpy().data)
        if size != shard.nbytes:
            raise ValueError(f"'{path}' has {size} bytes instead of {shard.nbytes}")
        os.fsync(stream.fileno())
    return FileEntry(size, crc32)


def remove_notes(folder: Path, shards: Iterable[Shard]) -> None:
    """Remove what ``write_shard`` noted. The files are finished then."""
    for shard in shards:
        (folder / f".{shard.file}.json").unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON file beside and rename it."""
    with replacing(path) as handle:
        handle.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _read_note(path: Path) -> dict:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
