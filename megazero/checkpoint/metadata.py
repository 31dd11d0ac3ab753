"""Reads ``.metadata``, torch.distributed.checkpoint's description of the tensors, without running what it asks for.

The file is a pickle: a program that looks up names, calls them and sets attributes. Here it gets stand-ins, which
keep what they are given and nothing else, so that no object that outlives the file is within its reach: an attribute
set on a class, a function or an enumeration's member would stay for the life of the process. What was kept is then
checked field by field.

Another release of torch may have written fields that nothing here knows. Where they could change how bytes are read,
they must be None. Elsewhere they are not looked at.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import is_plain_name

METADATA_FILE = ".metadata"
T = TypeVar("T")


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


def read_metadata(path: Path, foreign: bool = False) -> Description:
    """Return the description of the checkpoint directory ``path``, without running code from it.

    foreign: another program wrote it, with classes of its own.
    Raises CheckpointError where the file is missing or holds anything but fields of such a description.
    """
    try:
        with open(path / METADATA_FILE, "rb") as file:
            return _described((_ForeignUnpickler if foreign else _Unpickler)(file).load())
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(
            f"'{path / METADATA_FILE}' is no description of tensors ({type(error).__name__}: {error}): it is damaged "
            "or malicious and was not loaded; load another checkpoint, from a source you trust"
        ) from error


class _Kept:
    """Stands in for an object. Pickle looks for ``__setstate__`` before it sets attributes. On the object it finds
    the method, which keeps the state. On the class the call lacks an argument (TypeError)."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        if hasattr(self, "state"):
            raise ValueError("an object's fields are set twice")
        self.state = state


class _Call:
    """Stands in for a function, or for a class that is called. It is an object without attributes to set."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("attributes of a function are set")


def _size(lengths: Any) -> torch.Size:
    if type(lengths) is not tuple or any(type(length) is not int or length < 0 for length in lengths):
        raise ValueError("a size is no tuple of lengths")
    return torch.Size(lengths)


def _encoding_by_name(owner: Any, name: Any) -> None:
    """Early releases of Python 3.11 write this for an enumeration's member: getattr(class, name)."""
    if owner is not _ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise ValueError("an attribute of something else than the memory formats is read")


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_ENCODING = _Call(lambda value: None)  # a member could be written to, and nothing needs it
_PATH = _Call(lambda *parts: None)


def _named(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


# They say where a tensor's bytes lie, and in which coding: a field that is not understood could change that.
_PLACES = (ChunkStorageMetadata, MetadataIndex, _StorageInfo)
_CLASSES = (Metadata, TensorStorageMetadata, TensorProperties, StorageMeta, *_PLACES)
_KEPT: dict[type, type[_Kept]] = {cls: type(cls.__name__, (_Kept,), {"__slots__": ()}) for cls in _CLASSES}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{_named(cls): kept for cls, kept in _KEPT.items()},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    _named(torch.Size): _Call(_size),
    ("torch.serialization", "_get_layout"): _Call(_LAYOUTS.__getitem__),
    _named(_MEM_FORMAT_ENCODING): _ENCODING,
    ("builtins", "getattr"): _Call(_encoding_by_name),
    ("pathlib", "PosixPath"): _PATH,
    ("pathlib._local", "PosixPath"): _PATH,  # Python 3.13
}


class _Unpickler(pickle.Unpickler):
    """Gives out stand-ins and looks nothing up."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise ValueError(
                f"it asks to run '{module}.{name}', which no checkpoint of megazero does"
            ) from None


class _Strange(_Kept):
    """Stands in for an object, or a call's result, of a class that nothing here knows."""

    __slots__ = ()

    def __init__(self, *_: Any) -> None: ...


class _ForeignUnpickler(_Unpickler):
    """Gives out stand-ins for every name: what was planned, and by which classes, is of no use here."""

    def find_class(self, module: str, name: str) -> Any:
        return _ALLOWED.get((module, name)) or type(name, (_Strange,), {"__slots__": ()})


def _described(kept: Any) -> Description:
    """Check what was kept of the file. Its class may be one of another program's."""
    state = _is(dict, getattr(kept, "state", None))
    places = dict[tuple[str, torch.Size | None], BytesPlace]()
    for index, info in _is(dict, state.get("storage_data")).items():
        name, offsets, _ = _fields(MetadataIndex, index, "fqn", "offset", "index")
        file, start, length = _fields(_StorageInfo, info, "relative_path", "offset", "length")
        if not is_plain_name(_is(str, file)):
            raise ValueError(f"{file!r} is no name of a file in the directory")
        where = _is(str, name), None if offsets is None else _is(torch.Size, offsets)
        places[where] = BytesPlace(file, _is(int, start), _is(int, length))
    tensors = {
        _is(str, name): _tensor(name, each, places)
        for name, each in _is(dict, state.get("state_dict_metadata")).items()
        if type(each) is _KEPT[TensorStorageMetadata]
    }
    return Description(tensors, {name: place for (name, _), place in places.items() if name not in tensors})


def _tensor(name: str, kept: Any, places: Mapping[tuple[str, torch.Size | None], BytesPlace]) -> StoredTensor:
    properties, size, chunks = _fields(TensorStorageMetadata, kept, "properties", "size", "chunks")
    if type(properties) is not _KEPT[TensorProperties]:
        raise ValueError(f"'{name}' has no properties")
    dtype, *_ = _is(tuple, properties.state)  # torch keeps them as a tuple, the dtype first
    found = []
    for each in _is(list, chunks):
        offsets, sizes = _fields(ChunkStorageMetadata, each, "offsets", "sizes")
        place = places[name, _is(torch.Size, offsets)]
        found.append(StoredChunk(tuple(offsets), tuple(_is(torch.Size, sizes)), place))
    return StoredTensor(tuple(_is(torch.Size, size)), _is(torch.dtype, dtype), tuple(found))


def _is(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _fields(kind: type, kept: Any, *names: str) -> list[Any]:
    """Return fields of a stand-in for torch's class ``kind``; None for one that is not there."""
    if type(kept) is not _KEPT[kind]:
        raise ValueError(f"no {kind.__name__} where one belongs")
    state = _is(dict, kept.state)
    further = [name for name, value in state.items() if name not in names and value is not None]
    if further and kind in _PLACES:
        raise ValueError(f"{kind.__name__}.{further[0]} is not known here, and may say where bytes lie")
    return [state.get(name) for name in names]
