"""Gathers of small values between ranks. They are sent as JSON: torch's gathers of objects send pickles, and a pickle
runs whatever its sender asks for.

Plain values (None, numbers, text) and lists are JSON's own. What JSON lacks is an object of one key, the name of its
kind. A dataclass or a named tuple is built only if the caller names its class.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megazero.bounded import load_json
from megazero.mesh.waiting import waiting

if TYPE_CHECKING:  # who only describes checkpoints needs no torch
    import torch.distributed as dist

_PLAIN = (type(None), bool, int, float, str)
_KINDS: Mapping[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "set": set,
    "path": lambda held: Path(*held),
    "OSError": lambda held: OSError(*held),
}


def gather_objects(value: Any, *classes: type, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank of ``group`` (None: of the world), by rank. Collective.

    A value is made of plain values, lists, tuples, dicts, sets, paths, OSErrors and instances of ``classes``. Raises
    TypeError for another one here, ValueError if a rank has sent something else.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return [value]
    return [unpacked(text, *classes) for text in _exchange(packed(value), group)]


def gather_beside(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Do the same as ``gather_objects``, on a thread beside the main one, over a group of its own."""
    import torch.distributed as dist

    return [unpacked(text) for text in _exchanged(packed(value), group)] if dist.is_initialized() else [value]


def gather_to_first(value: Any, *classes: type, group: dist.ProcessGroup) -> list[Any]:
    """Do the same as ``gather_objects`` for the first rank of ``group``; the others get an empty list. Collective."""
    return [unpacked(text, *classes) for text in _exchange(packed(value), group, to_all=False)]


def packed(value: Any) -> bytes:
    """Return a value as JSON. Raises TypeError for a value that is not one of ``gather_objects``."""
    return json.dumps(_packed(value)).encode()


def unpacked(text: bytes, *classes: type) -> Any:
    """Return the value that was ``packed``. Raises ValueError for a text that is none, or holds another class."""
    kinds: dict[str, Callable[[list[Any]], Any]] = {
        **_KINDS,
        **{cls.__name__: partial(_instance, cls) for cls in classes},
    }
    try:
        return load_json(text, object_hook=partial(_unpacked, kinds))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"a rank sent what is no value here ({type(error).__name__}: {error})") from error


def _packed(value: Any) -> Any:
    cls = type(value)
    if cls in _PLAIN:
        return value
    if cls is list:
        return [_packed(each) for each in value]
    if cls is dict:
        return {"dict": [[_packed(key), _packed(held)] for key, held in value.items()]}
    if cls in (tuple, set):
        return {cls.__name__: [_packed(each) for each in value]}
    if isinstance(value, Path):
        return {"path": [f"{value}"]}
    if isinstance(value, OSError):
        return {"OSError": [value.errno, value.strerror, value.filename and f"{value.filename}"]}
    if dataclasses.is_dataclass(value):
        return {cls.__name__: [_packed(getattr(value, field.name)) for field in dataclasses.fields(value)]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {cls.__name__: [_packed(each) for each in value]}
    raise TypeError(f"{cls.__name__} is no kind of value that ranks send each other: {value!r}")


def _unpacked(kinds: Mapping[str, Callable[[list[Any]], Any]], found: dict[str, Any]) -> Any:
    ((kind, held),) = found.items()
    return kinds[kind](held)


def _instance(cls: type, held: list[Any]) -> Any:
    return cls(*held)


@waiting
def _exchange(own: bytes, group: dist.ProcessGroup | None, to_all: bool = True) -> list[bytes]:
    return _exchanged(own, group, to_all)


def _exchanged(own: bytes, group: dist.ProcessGroup | None, to_all: bool = True) -> list[bytes]:
    """Return every rank's bytes, by rank; without ``to_all`` on the group's first rank only. Collective."""
    import torch
    import torch.distributed as dist

    device = dist.distributed_c10d._get_object_coll_device(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(own)], device=device), group=group)
    longest = max(map(int, lengths))
    row = torch.zeros(longest, dtype=torch.uint8)
    row[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    row = row.to(device)
    takes = to_all or dist.get_rank(group) == 0
    rows = [torch.empty_like(row) for _ in lengths] if takes else []
    if to_all:
        dist.all_gather(rows, row, group=group)
    else:
        dist.gather(row, rows if takes else None, group_dst=0, group=group)
    return [each.cpu().numpy()[: int(length)].tobytes() for each, length in zip(rows, lengths, strict=False)]
