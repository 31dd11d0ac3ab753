"""Reads ``.metadata``, torch.distributed.checkpoint's description of the tensors, without running what it asks for.

The file is a pickle: a program that looks up names, calls them and sets attributes. Here it gets stand-ins, which
keep what they are given and nothing else, so that no object that outlives the file is within its reach: an attribute
set on a class, a function or an enumeration's member would stay for the life of the process. What was kept is then
checked field by field and made into torch's classes.

Another release of torch may have written fields that nothing here knows. Fields go by name. An unknown one that is
None is let pass everywhere; one with a plain value only where it cannot change how bytes are read.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any

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

logger = logging.getLogger(__name__)


def read_metadata(path: Path, foreign: bool = False) -> Metadata:
    """Return the tensors' description of the checkpoint directory ``path``, without running code from it.

    foreign: another program wrote it. Of what is no tensor only the place is returned then.
    Raises CheckpointError where the file is missing or holds anything but fields of such a description.
    """
    try:
        with open(path / METADATA_FILE, "rb") as file:
            if foreign:
                return _tensors_alone(_ForeignUnpickler(file).load())
            return _made(Metadata)(_Unpickler(file).load())
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


def _encoding_by_name(owner: Any, name: Any) -> int:
    """Early releases of Python 3.11 write this for an enumeration's member: getattr(class, name)."""
    if owner is not _ENCODING:
        raise ValueError("an attribute of something else than the memory formats is read")
    return _MEM_FORMAT_ENCODING[name].value


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
# A member could be written to, a number cannot.
_ENCODING = _Call(lambda value: _MEM_FORMAT_ENCODING(value).value)
_PATH = _Call(lambda *parts: os.path.join(*parts))


def _named(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


_CLASSES = (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
    TensorProperties,
    ChunkStorageMetadata,
    StorageMeta,
    _StorageInfo,
)
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


# A check turns what a field of the file holds into the field's value, or raises.
_Check = Callable[[Any], Any]


def _is(*types: type) -> _Check:
    def check(value: Any) -> Any:
        if type(value) not in types:
            raise ValueError(f"a {type(value).__name__} where a {types[0].__name__} belongs")
        return value

    return check


def _list(check: _Check) -> _Check:
    return lambda values: [check(value) for value in _is(list)(values)]


def _dict(key: _Check, value: _Check) -> _Check:
    return lambda values: {key(k): value(v) for k, v in _is(dict)(values).items()}


def _or_none(check: _Check) -> _Check:
    return lambda value: None if value is None else check(value)


def _state(kind: type, kept: Any) -> Any:
    if type(kept) is not _KEPT[kind] or not hasattr(kept, "state"):
        raise ValueError(f"no {kind.__name__} where one belongs")
    return kept.state


def _made(kind: type) -> _Check:
    """Return the check of an object of torch's class ``kind`` with the fields of ``_FIELDS``."""
    return lambda kept: _with_fields(kind, _is(dict)(_state(kind, kept)))


def _tensors_alone(kept: Any) -> Metadata:
    """Return the tensors of another program's description, whose class may be its own, and where everything lies."""
    state = _is(dict)(getattr(kept, "state", None))
    tensors = {
        name: each
        for name, each in _is(dict)(state.get("state_dict_metadata")).items()
        if type(each) is _KEPT[TensorStorageMetadata]
    }
    return _with_fields(Metadata, {"state_dict_metadata": tensors, "storage_data": state.get("storage_data")})


def _properties(kept: Any) -> TensorProperties:
    """Check a tensor's properties. torch keeps them as a tuple in the order of the fields: five, from 2.15 on six."""
    state = _is(tuple)(_state(TensorProperties, kept))
    names = [field.name for field in dataclasses.fields(TensorProperties)]
    names += [f"number {i + 1}" for i in range(len(names), len(state))]
    return _with_fields(TensorProperties, dict(zip(names, state, strict=False)))


def _with_fields(kind: type, state: dict[Any, Any]) -> Any:
    """Make a ``kind`` from the fields that the running torch has. Missing ones get its defaults."""
    checks, names = _FIELDS[kind], {field.name for field in dataclasses.fields(kind)}
    unknown = _is(NoneType) if kind in _PLACES else _plain
    made = {}
    for name, value in state.items():
        try:
            made[_is(str)(name)] = checks.get(name, unknown)(value)
        except ValueError as error:
            raise ValueError(f"{kind.__name__}.{name}: {error}") from None
        if name not in names and value is not None:
            _warn_of(kind.__name__, name)
    return kind(**{name: value for name, value in made.items() if name in names})


@functools.cache  # once, not for every tensor
def _warn_of(kind: str, name: str) -> None:
    logger.warning("the checkpoint's %s has a field %r that torch %s lacks", kind, name, torch.__version__)


def _plain(value: Any) -> Any:
    """Check a value of unknown meaning: a number, a text or None, or a tuple, list or dict of such. Deeper nesting is
    refused: objects that hold each other twice, forty times over, would take forever to walk."""
    inside = (*value, *value.values()) if type(value) is dict else value
    for item in inside if type(inside) in (tuple, list, torch.Size) else (value,):
        _is(int, bool, float, str, NoneType)(item)
    return value


def _plain_file(name: Any) -> str:
    if not is_plain_name(_is(str)(name)):
        raise ValueError(f"{name!r} is no name of a file in the directory")
    return name


def _path_of_keys(path: Any) -> tuple[str | int, ...]:
    return tuple(_is(str, int)(key) for key in _is(tuple)(path))


def _memory_format(number: Any) -> torch.memory_format:
    return getattr(torch, _MEM_FORMAT_ENCODING(_is(int)(number)).name.removeprefix("TORCH_").lower())


_SIZE, _TEXT, _NUMBER = _is(torch.Size), _is(str), _is(int)
# They say where a tensor's bytes lie, and in which coding: a field that is not understood could change that.
_PLACES = (ChunkStorageMetadata, MetadataIndex, _StorageInfo)
_FIELDS: dict[type, dict[str, _Check]] = {
    TensorProperties: {
        "dtype": _is(torch.dtype),
        "layout": _is(torch.layout),
        "requires_grad": _is(bool),
        "memory_format": _memory_format,
        "pin_memory": _is(bool),
    },
    ChunkStorageMetadata: {"offsets": _SIZE, "sizes": _SIZE},
    TensorStorageMetadata: {
        "properties": _properties,
        "size": _SIZE,
        "chunks": _list(_made(ChunkStorageMetadata)),
    },
    MetadataIndex: {"fqn": _TEXT, "offset": _or_none(_SIZE), "index": _or_none(_NUMBER)},
    _StorageInfo: {
        "relative_path": _plain_file,
        "offset": _NUMBER,
        "length": _NUMBER,
        "transform_descriptors": _is(NoneType),  # a file that is read through extensions is refused
    },
    StorageMeta: {
        "checkpoint_id": _or_none(_TEXT),
        "save_id": _or_none(_TEXT),
        "load_id": _or_none(_TEXT),
        "modules": _list(_TEXT),
    },
    Metadata: {
        "state_dict_metadata": _dict(_TEXT, _made(TensorStorageMetadata)),
        "planner_data": _or_none(_dict(_TEXT, _path_of_keys)),
        "storage_data": _dict(_made(MetadataIndex), _made(_StorageInfo)),
        "storage_meta": _or_none(_made(StorageMeta)),
        "version": _or_none(_TEXT),
    },
}
