"""Files at any address that fsspec reads (a path, s3://, gs://, https://): found, and read in ranges.

A store that fails is asked again after growing waits. With a cache folder, what was fetched from elsewhere stays
there, for later starts and for the other ranks of the node.
"""

from __future__ import annotations

import hashlib
import io
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from megazero.files import replacing

WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0)  # five minutes
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    ValueError,
    ImportError,
)  # asking again helps none
_LOCAL = ("file", "local")
Result = TypeVar("Result")


class FileStore:
    """Reads files by address. Threads may share it. Raises ValueError, naming the address, for what cannot be read.

    cache: folder for what is fetched, or None. pause: waits for so many seconds.
    """

    def __init__(self, cache: str | Path | None = None, pause: Callable[[float], None] = time.sleep) -> None:
        self._cache, self._pause = cache and Path(cache), pause

    def find(self, word: str) -> dict[str, int]:
        """Return the bytes of each file, by address in order, that an address, a glob or a folder names, or {}."""

        def look(fs: Any, path: str) -> dict[str, int]:
            if any(mark in path for mark in "*?["):
                found = fs.glob(path, detail=True)
            else:
                try:
                    found = {path: fs.info(path)}
                except FileNotFoundError:
                    return {}
                found = fs.find(path, detail=True) if found[path]["type"] == "directory" else found
            return {
                fs.unstrip_protocol(at): told["size"] for at, told in found.items() if told["type"] == "file"
            }

        return dict(sorted(self._asked(word, look).items()))

    def read(self, address: str, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file."""

        def fetch(fs: Any, path: str) -> bytes:
            name = hashlib.sha256(f"{address} {start} {stop}".encode()).hexdigest()
            kept = (
                self._cache and not set(_LOCAL) & {*fs.protocol} and self._cache / "pieces" / name[:2] / name
            )
            if kept and kept.is_file() and kept.stat().st_size == stop - start:
                return kept.read_bytes()
            raw: bytes = fs.cat_file(path, start=start, end=stop)
            if len(raw) != stop - start:
                raise OSError(f"{len(raw)} bytes came of {stop - start}")
            if kept:
                with suppress(OSError):  # a full disk keeps no more, and stops nobody
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    with replacing(kept) as handle:
                        handle.write(raw)
            return raw

        return self._asked(address, fetch) if stop > start else b""

    def open(self, address: str, size: int, buffer: int) -> io.BufferedReader:
        """Open a file of ``size`` bytes, of which ``buffer`` are fetched at a time."""
        return io.BufferedReader(_Ranges(self, address, size), buffer)

    def _asked(self, address: str, ask: Callable[[Any, str], Result]) -> Result:
        for wait in (*WAITS_S, 0.0):
            try:
                fs, path = fsspec.core.url_to_fs(address)
                return ask(fs, path)
            except _FINAL as error:
                raise ValueError(f"{address}: {_said(error)}") from None
            except Exception as error:  # of any store's library, which have no base in common
                if not wait:
                    raise ValueError(
                        f"{address}: the store has failed for {sum(WAITS_S) / 60:.0f} minutes ({_said(error)}); the "
                        "same command continues when it answers again"
                    ) from error
                warnings.warn(f"{address}: asked again in {wait:g} s ({_said(error)})", stacklevel=2)
                fs.invalidate_cache()
            self._pause(wait)
        raise AssertionError("the last wait is 0")


class _Ranges(io.RawIOBase):
    """A file of a store. Each read fetches what it returns."""

    def __init__(self, store: FileStore, address: str, size: int) -> None:
        self._store, self._address, self._size, self._at = store, address, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        raw = self._store.read(self._address, self._at, min(self._at + len(buffer), self._size))
        buffer[: len(raw)] = raw
        self._at += len(raw)
        return len(raw)


def _said(error: Exception) -> str:
    return f"{error}".strip() or type(error).__name__
