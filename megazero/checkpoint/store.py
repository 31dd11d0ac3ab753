"""Save and load sharded checkpoints: atomic, verified, independent of the layout they were written in.
A function that takes ``group`` is collective over it and raises the same CheckpointError on every rank or on none.
The group must be CPU-capable (such as gloo); tensors may live on CUDA. ``group=None`` means this process alone, and
then torch.distributed need not be initialised."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import torch as safetensors

from megazero.checkpoint.directory import Retention, checkpoints, find_checkpoint, latest, stated
from megazero.checkpoint.errors import CheckpointError, agree, agree_local, first_bytes
from megazero.checkpoint.image import Staging
from megazero.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    manifest_text,
    open_manifest,
    parse_manifest,
    read_manifest,
    to_json,
)
from megazero.checkpoint.metadata import Description
from megazero.checkpoint.reading import (
    StoredTensors,
    by_kind,
    check_files,
    open_metadata,
    rank_file,
    read_file,
    read_records,
    read_state,
    verify,
)
from megazero.checkpoint.records import SliceRecord
from megazero.checkpoint.saving import Part, Retry, Snapshot, completed, save, saving

__all__ = [
    "CheckpointError",
    "LoadedState",
    "Manifest",
    "Part",
    "Retention",
    "Retry",
    "SliceRecord",
    "Snapshot",
    "Staging",
    "check_bytes",
    "checkpoints",
    "completed",
    "find_checkpoint",
    "latest",
    "load",
    "load_full",
    "load_kinds",
    "read_file",
    "read_manifest",
    "read_state",
    "save",
    "saving",
    "shared_manifest",
    "shared_state",
    "verify",
]

_SHOWN = 5


@dataclass(frozen=True)
class LoadedState:
    """``state`` is as saved. ``rank_tensors`` are this rank's, on the CPU. They are None for another layout."""

    state: dict[str, Any]
    rank_tensors: dict[str, torch.Tensor] | None
    manifest: Manifest


def load(
    path: str | os.PathLike,
    *,
    records: Sequence[SliceRecord],
    group: dist.ProcessGroup | None = None,
    kinds: Sequence[str] | Mapping[str, str] = ("weights",),
    layout: Mapping[str, Any] | None = None,
    checked: bool = False,
) -> LoadedState:
    """Fill the records' tensors in place from the checkpoint directory ``path``, after checking it whole.

    The ranks' records together must name exactly the checkpoint's tensors. The dtype is converted to theirs.

    kinds: those to fill; other kinds of the records are left alone. A mapping goes from the records' kind to the
        checkpoint's. ``read_manifest(path).kinds`` says what is there.
    layout: If it equals the saved one, and there are as many ranks, ``rank_tensors`` are returned.
    checked: ``check_bytes`` has compared the checksums.
    Raises CheckpointError on every rank if the checkpoint is absent, incomplete, damaged, malicious or of another
    model, or lacks a kind. Nothing is filled before all checks have passed."""
    path = Path(path)
    rank, world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    chosen = dict(kinds) if isinstance(kinds, Mapping) else {kind: kind for kind in kinds}
    doing = f"checkpoint '{path}' not loaded"
    manifest = shared_manifest(path, group)
    if not checked:
        check_bytes(path, manifest, group)
    description = agree_local(group, doing, partial(open_metadata, path, manifest))
    shapes = agree(group, doing, partial(_record_shapes, records, chosen))
    agree_local(group, doing, partial(_check_model, description, shapes, chosen))
    agree_local(group, doing, partial(read_records, path, description, records, chosen))
    same = world_size == manifest.world_size and layout is not None
    same = same and to_json(layout, "layout") == manifest.layout
    state = json.loads(first_bytes(group, doing, lambda: json.dumps(stated(path)).encode()))
    tensors = agree_local(group, doing, partial(_rank_tensors, path, manifest, rank)) if same else None
    return LoadedState(state, tensors, manifest)


def shared_manifest(path: Path, group: dist.ProcessGroup | None = None) -> Manifest:
    """Return the manifest of a checkpoint whose files are all there, as the first rank sees it. Collective.

    Raises CheckpointError on every rank.
    """
    doing = f"checkpoint '{path}' not loaded"
    text = first_bytes(group, doing, lambda: manifest_text(open_manifest(path)))
    return parse_manifest(text, path / MANIFEST_FILE)


def shared_state(path: Path, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Do the same as ``read_state`` on the first rank, for all. Collective."""
    doing = f"checkpoint '{path}' not loaded"
    return json.loads(first_bytes(group, doing, lambda: json.dumps(read_state(path)).encode()))


def check_bytes(path: Path, manifest: Manifest, group: dist.ProcessGroup | None = None) -> None:
    """Read every file of a checkpoint once, by all ranks together, and compare its checksum. Collective.

    Raises CheckpointError on every rank. It has an ``error_number`` if the storage did not answer; else the
    checkpoint is damaged.
    """
    rank, world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    doing = f"checkpoint '{path}' not loaded"
    agree_local(group, doing, partial(check_files, path, manifest, rank, world_size))


def load_full(path: str | os.PathLike, kind: str = "weights") -> dict[str, torch.Tensor]:
    """Return every whole tensor of one kind by its stored name, on the CPU, in the stored dtype. Check all files."""
    return load_kinds(path, (kind,))[kind]


def load_kinds(
    path: str | os.PathLike, kinds: Sequence[str] | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """As ``load_full``, of several kinds, all by default: kind -> name -> tensor."""
    manifest = verify(path)
    stored = [StoredTensors.open(path, kind) for kind in kinds or manifest.kinds]
    return {each.kind: {name: each.read(name) for name in each.shapes} for each in stored}


def _record_shapes(
    records: Sequence[SliceRecord], kinds: Mapping[str, str]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return what the records ask for: stored kind to name to shape. Tensors without elements are left out, as they
    are not stored."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {stored: {} for stored in kinds.values()}
    for record in records:
        if prod(record.placement.shape):
            for kind in [kind for kind in record.tensors if kind in kinds]:
                shapes[kinds[kind]][record.placement.name] = tuple(record.placement.shape)
    return shapes


def _check_model(
    description: Description,
    wanted: Sequence[Mapping[str, Mapping[str, tuple[int, ...]]]],
    kinds: Mapping[str, str],
) -> None:
    stored = by_kind(description)
    for kind in dict.fromkeys(kinds.values()):
        if kind not in stored:
            raise CheckpointError(
                f"it holds no '{kind}', only {', '.join(map(repr, sorted(stored)))}; ask for a kind it holds"
            )
        there = {name: tensor.shape for name, tensor in stored[kind].items()}
        ours = {name: shape for rank in wanted for name, shape in rank[kind].items()}
        names = sorted(ours.keys() | there.keys())
        different = [name for name in names if ours.get(name) != there.get(name)]
        if different:
            lines = [
                f"'{name}': model {ours.get(name, 'absent')}, checkpoint {there.get(name, 'absent')}"
                for name in different[:_SHOWN]
            ]
            raise CheckpointError(
                f"it is of another model: {len(different)} of {len(names)} tensors of '{kind}' differ: "
                f"{'; '.join(lines)}{'; ...' if len(different) > _SHOWN else ''}. Start with the model sizes "
                "the checkpoint was written with (its manifest has the configuration)"
            )


def _rank_tensors(path: Path, manifest: Manifest, rank: int) -> dict[str, torch.Tensor]:
    name = rank_file(rank)
    return safetensors.load((path / name).read_bytes()) if name in manifest.files else {}
