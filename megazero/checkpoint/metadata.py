"""Reads ``.metadata``, torch.distributed.checkpoint's description of the tensors, without running what it asks for.

The file is a pickle: a program that looks up names, calls them and sets attributes. Here every name but those of
dtypes is a class made for this file alone, whose objects keep what they are given. So nothing runs, and nothing that
outlives the file is changed. What was kept is then checked field by field.

Another release of torch, or another program, may have written fields that nothing here knows. Where they could change
how bytes are read, they must be None. Elsewhere they are not looked at.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import is_plain_name

METADATA_FILE = ".metadata"
T = TypeVar("T")
Places = dict[tuple[str, tuple[int, ...] | None], "BytesPlace"]  # by a tensor's name and a chunk's offsets


class BytesPlace(NamedTuple):
    """Where something lies: in a file of the directory, from byte ``start`` on."""

    file: str
    start: int
    length: int


class StoredChunk(NamedTuple):
    """A rectangle of a stored tensor. At ``place`` is what torch.save made of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: BytesPlace


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: its shape, the dtype it is stored in, and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class Description:
    """What lies in a directory: tensors and objects by name."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, BytesPlace]

    def places(self) -> Iterator[BytesPlace]:
        yield from self.objects.values()
        for tensor in self.tensors.values():
            yield from (chunk.place for chunk in tensor.chunks)


def read_metadata(path: Path) -> Description:
    """Return the description of the checkpoint directory ``path``, without running code from it.

    Raises CheckpointError where the file is missing or holds anything but fields of such a description.
    """
    try:
        with open(path / METADATA_FILE, "rb") as file:
            return _described(_Unpickler(file).load())
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(
            f"'{path / METADATA_FILE}' is no description of tensors ({type(error).__name__}: {error}): it is damaged "
            "or malicious and was not loaded; load another checkpoint, from a source you trust"
        ) from error


class _Kept:
    """Stands in for an object, or a call's result, and keeps what is set on it."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Gives out dtypes, tuples for sizes, and stand-ins for every other name."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        return tuple if found is torch.Size else type(name, (_Kept,), {})


def _described(kept: Any) -> Description:
    """Check what was kept of the file. Its class may be one of another program's."""
    places: Places = {}
    for index, info in _field(kept, "storage_data", dict).items():
        file, start, length = _place(info, "relative_path", "offset", "length")
        if not is_plain_name(_is(str, file)):
            raise ValueError(f"{file!r} is no name of a file in the directory")
        name, offsets, _ = _place(index, "fqn", "offset", "index")
        where = _is(str, name), None if offsets is None else _lengths(offsets)
        places[where] = BytesPlace(file, _is(int, start), _is(int, length))
    tensors = {
        _is(str, name): _tensor(name, each, places)
        for name, each in _field(kept, "state_dict_metadata", dict).items()
        if type(each).__name__ == "TensorStorageMetadata"
    }
    return Description(tensors, {name: place for (name, _), place in places.items() if name not in tensors})


def _tensor(name: str, kept: Any, places: Places) -> StoredTensor:
    # torch keeps a tensor's properties as a tuple, the dtype first.
    dtype, *_ = _is(tuple, kept.state["properties"].state)
    found = []
    for each in _field(kept, "chunks", list):
        offsets, sizes = _place(each, "offsets", "sizes")
        found.append(StoredChunk(_lengths(offsets), _lengths(sizes), places[name, offsets]))
    return StoredTensor(_lengths(kept.state.get("size")), _is(torch.dtype, dtype), tuple(found))


def _field(kept: Any, name: str, kind: type[T]) -> T:
    return _is(kind, _is(dict, kept.state).get(name))


def _place(kept: Any, *names: str) -> list[Any]:
    """Return all fields of a stand-in that says where bytes lie; None for one that is not there."""
    state = _is(dict, kept.state)
    further = [name for name, value in state.items() if name not in names and value is not None]
    if further:
        raise ValueError(f"{further[0]} is not known here, and may say where bytes lie, or in which coding")
    return [state.get(name) for name in names]


def _lengths(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or any(type(length) is not int or length < 0 for length in value):
        raise ValueError("a size is no tuple of lengths")
    return value


def _is(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value
