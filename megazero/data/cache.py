"""Arrays that one process builds and many use: .npy files, named by a hash of their inputs."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.bounded import read_json
from megazero.files import exclusive, replacing

Arrays = dict[str, NDArray[Any]]
FORMAT = 1  # part of every description: raise it when the meaning of a cached array changes


def cached_arrays(directory: Path, description: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of ``description``, memory-mapped. ``build`` runs only where the cache has no sound copy.

    Every rank may call it at once: one builds under a file lock, and the others wait for it. Where a file system
    ignores locks, two may build, and they rename identical files over each other. A file that is missing, truncated
    or altered (CRC-32 of the data) is built again. Raises ValueError when the directory cannot be written.
    """
    text = json.dumps({"format": FORMAT, **description}, sort_keys=True)
    base = directory / hashlib.sha256(text.encode()).hexdigest()[:32]
    found = _load(base, text)
    if found is not None:
        return found
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with exclusive(base.with_suffix(".lock")):
            found = _load(base, text)  # another rank may have built it while this one waited
            if found is not None:
                return found
            _save(base, text, build())
    except OSError as error:
        raise ValueError(
            f"cannot write the index cache in {directory} ({error.strerror or error}); "
            f"name another data cache path, which can be written"
        ) from error
    found = _load(base, text)
    assert found is not None, f"the index cache {base} cannot be read back"
    return found


def _array_path(base: Path, name: str) -> Path:
    return base.with_name(f"{base.name}-{name}.npy")


def _checksum(array: NDArray[Any]) -> int:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    value, step = 0, 1 << 26  # in pieces, so that the lock of the interpreter is given up now and then
    for start in range(0, len(flat), step):
        value = zlib.crc32(flat[start : start + step].data, value)
    return value


def _save(base: Path, text: str, arrays: Arrays) -> None:
    record = {"description": text, "arrays": {}}
    for name, array in arrays.items():
        with replacing(_array_path(base, name)) as handle:
            np.save(handle, array, allow_pickle=False)
        record["arrays"][name] = _checksum(array)  # type: ignore[index]
    with replacing(base.with_suffix(".json")) as handle:  # last: it vouches for the arrays
        handle.write(json.dumps(record, indent=1).encode())


def _load(base: Path, text: str) -> Arrays | None:
    try:
        record = read_json(base.with_suffix(".json"))
        if record["description"] != text:
            return None
        arrays: Arrays = {}
        for name, checksum in record["arrays"].items():
            path = _array_path(base, name)
            array = np.load(path, mmap_mode="r" if os.path.getsize(path) else None, allow_pickle=False)
            if _checksum(array) != checksum:
                return None
            arrays[name] = array
    except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError):
        return None
    return arrays
