"""The manifest makes a directory a checkpoint. It is written last and read first."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megazero.bounded import load_json, read_bytes
from megazero.checkpoint.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
FORMAT = "megazero-checkpoint"
VERSION = 1
_READ_BYTES = 1 << 22
_SETTLED_S = 2.0  # a file changed since may change once more within one tick of its time stamp


@dataclass(frozen=True)
class FileEntry:
    """``size`` is in bytes. ``crc32`` is zlib's, of the whole file (here 2.5 GB/s on one core; blake2b has 0.6,
    sha256 1.5)."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Describes one checkpoint. ``files`` are all other files of the directory.

    ``step`` is the training step. ``serial`` is the order of saving within one root (a rolled-back run repeats
    steps). ``kinds`` maps a kind of value to the dtypes it is stored in. ``layout`` is the ranks' arrangement, and
    ``configuration`` is the run's. Both have a free form.
    """

    step: int
    serial: int
    world_size: int
    kinds: Mapping[str, tuple[str, ...]]
    layout: Mapping[str, Any]
    configuration: Mapping[str, Any]
    files: Mapping[str, FileEntry]


def to_json(value: Any, what: str) -> Any:
    """Return ``value`` after a round trip through JSON (tuples become lists), or raise CheckpointError."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} must be plain JSON (numbers, text, lists, dicts): {error}") from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write ``manifest`` into the directory ``path``, and fsync it."""
    write_file(path / MANIFEST_FILE, manifest_text(manifest))


def manifest_text(manifest: Manifest) -> bytes:
    """Return a manifest as its file holds it, with a checksum of itself."""
    body = asdict(manifest)
    head = {"format": FORMAT, "version": VERSION, "crc32": _crc32(body)}
    return json.dumps({**head, **body}, indent=1).encode()


def read_manifest(path: str | os.PathLike) -> Manifest:
    """Return the manifest of the checkpoint directory ``path``.

    While its file stays the same, this process reads it once. Raises CheckpointError if the directory or the manifest
    is absent, damaged or of another format, and OSError if the storage does not answer.
    """
    file = Path(path) / MANIFEST_FILE
    try:
        seen = file.stat()
        settled = time.time() - max(seen.st_mtime, seen.st_ctime) > _SETTLED_S
        identity = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
        return _remembered(file, identity) if settled else parse_manifest(read_bytes(file), file)
    except (FileNotFoundError, NotADirectoryError):
        if not Path(path).is_dir():
            raise CheckpointError(f"there is no checkpoint directory '{path}'; check the path") from None
        raise CheckpointError(
            f"'{path}' is no complete checkpoint: it has no '{MANIFEST_FILE}'. Give a directory such as "
            "SAVE/iter_0000100 that has one"
        ) from None
    except CheckpointError:
        raise
    except ValueError as error:  # larger than any manifest
        raise CheckpointError(f"'{file}' is damaged ({error}); load an older checkpoint") from None


@lru_cache(maxsize=256)
def _remembered(file: Path, identity: tuple[int, ...]) -> Manifest:
    return parse_manifest(read_bytes(file), file)


def parse_manifest(text: bytes, file: Path) -> Manifest:
    """Return the manifest that ``file`` holds as ``text``. Raises CheckpointError if it is damaged or of another
    format."""
    try:
        body = load_json(text)
        head, crc32 = (body.pop("format"), body.pop("version")), body.pop("crc32")
        if head == (FORMAT, VERSION) and crc32 == _crc32(body):
            return _parse(body)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"'{file}' is damaged ({error}); load an older checkpoint") from error
    if head != (FORMAT, VERSION):
        raise CheckpointError(
            f"'{file}' is of format {head[0]!r} version {head[1]!r}; this megazero reads '{FORMAT}' version "
            f"{VERSION}"
        )
    raise CheckpointError(f"'{file}' is damaged (its checksum differs); load an older checkpoint")


def _parse(body: dict[str, Any]) -> Manifest:
    files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
    for name in files:
        if not is_plain_name(name):
            raise ValueError(f"'{name}' is not a file of its own directory")
    kinds = {kind: tuple(dtypes) for kind, dtypes in body.pop("kinds").items()}
    return Manifest(**body, kinds=kinds, files=files)


def is_plain_name(name: str) -> bool:
    """Return whether a file of this name lies in the checkpoint's own directory, not elsewhere."""
    return name == os.path.basename(name) and name not in ("", ".", "..")


def open_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there, with their sizes."""
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    return manifest


def has_sizes(path: Path, manifest: Manifest) -> bool:
    """Tell whether every file of the manifest is there with its size."""
    return all(file_size(path / name) == entry.size for name, entry in manifest.files.items())


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless every file of the manifest is there with its size."""
    for name, entry in manifest.files.items():
        size = file_size(path / name)
        if size != entry.size:
            found = "missing" if size is None else f"{size} bytes long instead of {entry.size}"
            raise CheckpointError(
                f"checkpoint '{path}' is incomplete: '{name}' is {found}. Restore the file or load an older "
                "checkpoint"
            )


def check_checksum(path: Path, name: str, entry: FileEntry) -> None:
    """Raise CheckpointError unless the file's bytes are the ones that were written."""
    crc32 = checksum(path / name).crc32
    if crc32 != entry.crc32:
        raise CheckpointError(
            f"checkpoint '{path}' is damaged: '{name}' has checksum {crc32:08x} instead of {entry.crc32:08x}. "
            "Restore the file or load an older checkpoint"
        )


def checksum(file: Path) -> FileEntry:
    """Return size and checksum of a file, which is read in pieces."""
    size = crc32 = 0
    with open(file, "rb", buffering=0) as stream:
        while piece := stream.read(_READ_BYTES):
            size += len(piece)
            crc32 = zlib.crc32(piece, crc32)
    return FileEntry(size, crc32)


def file_size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None


def write_file(file: Path, data: bytes) -> FileEntry:
    """Write and fsync a new file."""
    with open(file, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(len(data), zlib.crc32(data))


def _crc32(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
