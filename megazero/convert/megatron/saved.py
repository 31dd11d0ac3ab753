"""Reads files of torch.save without running what they ask for, and finds the folder of one iteration.

Megatron's files hold an argparse.Namespace, enumerations and more: names that torch.load(weights_only=True) refuses.
Here each gets a stand-in, which keeps what it is given. torch's reader calls these and what is on its own list, and
nothing else. Tensors are mapped, not read.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megazero.checkpoint.errors import CheckpointError

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"


class StandIn:
    """Stands in for an object of a class that is not imported. ``state`` is what was set on it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_saved(file: Path, data: bytes | None = None) -> dict[str, Any]:
    """Return the dict that torch.save wrote. Objects of classes that torch does not allow are StandIns.

    data: what is read instead of the whole file, of which it is a part.

    Raises CheckpointError if it is damaged, of a torch before 1.6, or no dict.
    """
    try:
        unknown = {
            name: type(name.rpartition(".")[2], (StandIn,), {})
            for name in get_unsafe_globals_in_checkpoint(file if data is None else io.BytesIO(data))
        }
        with safe_globals([(made, name) for name, made in unknown.items()]):
            source = file if data is None else io.BytesIO(data)
            saved = torch.load(source, map_location="cpu", weights_only=True, mmap=data is None)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(
            f"'{file}' cannot be read as what torch.save writes since torch 1.6 ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'nothing said'}): get it again, from a source you trust"
        ) from error
    if isinstance(saved, list) and len(saved) == 1:  # as dist_checkpointing keeps an object
        (saved,) = saved
    if not isinstance(saved, dict):
        raise CheckpointError(f"'{file}' holds a {type(saved).__name__}, and Megatron saves a dict")
    return saved


def arguments(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the run by name, or nothing where it saved none."""
    told = saved.get("args")
    if isinstance(told, argparse.Namespace):  # a program that imports megatron-core has let torch make it
        told = vars(told)
    state = told.state if isinstance(told, StandIn) else told
    return dict(state) if isinstance(state, dict) else {}


def find_iteration(folder: Path, step: int | None) -> Path:
    """Return the folder of one iteration: that of ``step``, the newest by Megatron's tracker, or ``folder`` itself.

    Raises CheckpointError if it is not there.
    """
    tracker = folder / TRACKER
    if step is not None:
        path = folder / f"iter_{step:07d}"
    elif tracker.is_file():
        newest = tracker.read_text().strip()
        path = folder / (newest if newest == RELEASE else f"iter_{newest:0>7}")
    else:
        path = folder
    if not path.is_dir():
        there = ", ".join(sorted(each.name for each in folder.glob("iter_*"))) or "no iter_* folder"
        raise CheckpointError(f"'{path}' is missing; '{folder}' has {there}")
    return path
