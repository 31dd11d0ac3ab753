"""Describes a checkpoint, and the differences between two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.directory import stated
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import check_checksum, open_manifest
from megazero.checkpoint.reading import StoredTensors, pieces

DAMAGED = "DAMAGED"  # the last word of a damaged file's line


def describe(path: Path, tensors: bool = False, check: bool = True) -> Iterator[str]:
    """Yield lines that say what the checkpoint directory ``path`` holds. check: read every file's checksum.

    Raises CheckpointError if it is incomplete.
    """
    manifest, state = open_manifest(path), stated(path)
    samples = f"{state.get('consumed_samples', 0):,} samples"
    yield f"{path}: step {manifest.step}, {samples}, written by {manifest.world_size} ranks"
    if origin := state.get("imported"):
        yield f"imported from {'a Hugging Face folder' if origin is True else origin}: weights alone"
    yield f"layout      {_words(manifest.layout) or 'one process'}"
    model = manifest.configuration.get("model", {})
    yield f"model       {_words({name: value for name, value in model.items() if value is not None})}"
    for name, loss in (state.get("losses") or {}).items():
        yield f"{name:<11} {loss:.4f}"
    for kind in sorted(manifest.kinds):
        stored = StoredTensors.open(path, kind)
        numel = sum(prod(shape) for shape in stored.shapes.values())
        size = sum(prod(shape) * stored.dtypes[name].itemsize for name, shape in stored.shapes.items())
        dtypes = ", ".join(manifest.kinds[kind])
        yield f"{kind:<11} {len(stored.shapes)} tensors, {numel:,} elements, {size:,} bytes, {dtypes}"
        if tensors:
            yield from (
                f"  {name} {list(shape)} {stored.dtypes[name]}" for name, shape in stored.shapes.items()
            )
    for name, entry in sorted(manifest.files.items()):
        yield f"  {name:<24} {entry.size:>16,} bytes  crc32 {entry.crc32:08x}  {_state(path, name, entry, check)}"


def _state(path: Path, name: str, entry: Any, check: bool) -> str:
    if not check:
        return "not read"
    try:
        check_checksum(path, name, entry)
    except CheckpointError:
        return DAMAGED
    return "good"


def differences(one: Path, other: Path) -> Iterator[str]:
    """Yield lines that say in what two checkpoints differ: options, layout, and every tensor, a piece at a time."""
    first, second = open_manifest(one), open_manifest(other)
    for what in ("step", "world_size"):
        if getattr(first, what) != getattr(second, what):
            yield f"{what}: {getattr(first, what)}, {getattr(second, what)}"
    yield from _changed("layout", first.layout, second.layout)
    for section in sorted({*first.configuration, *second.configuration}):
        options = (first.configuration.get(section, {}), second.configuration.get(section, {}))
        yield from _changed(section, *options)
    for kind in sorted({*first.kinds, *second.kinds}):
        if kind not in first.kinds or kind not in second.kinds:
            yield f"{kind}: only in {one if kind in first.kinds else other}"
        else:
            yield from _tensors(kind, StoredTensors.open(one, kind), StoredTensors.open(other, kind))


def _changed(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name):
            yield f"{what}.{name}: {one.get(name)}, {other.get(name)}"


def _tensors(kind: str, one: StoredTensors, other: StoredTensors) -> Iterator[str]:
    for name in sorted(one.shapes.keys() | other.shapes.keys()):
        shapes = one.shapes.get(name), other.shapes.get(name)
        if shapes[0] is None or shapes[1] is None or shapes[0] != shapes[1]:
            yield f"{kind}/{name}: {shapes[0] or 'absent'}, {shapes[1] or 'absent'}"
        elif line := _distance(one, other, name):
            yield f"{kind}/{name}: {line}"


def _distance(one: StoredTensors, other: StoredTensors, name: str) -> str:
    """Say how far apart two tensors of one shape are, or '' if they are equal."""
    unequal, square, norm, largest = 0, 0.0, 0.0, 0.0
    for first, rows in pieces(one.shapes[name]):
        ours, theirs = (stored.read(name, first, rows) for stored in (one, other))
        if ours.dtype == theirs.dtype and torch.equal(ours, theirs):
            norm += float(ours.double().norm()) ** 2
            continue
        difference = theirs.double() - ours.double()
        unequal += int((difference != 0).sum())
        square, norm = square + float(difference.norm()) ** 2, norm + float(ours.double().norm()) ** 2
        largest = max(largest, float(difference.abs().max()))
    if unequal == 0 and one.dtypes[name] == other.dtypes[name]:
        return ""
    if unequal == 0:
        return f"equal values in {one.dtypes[name]} and {other.dtypes[name]}"
    relative = (square / norm) ** 0.5 if norm else float("inf")
    return f"{unequal:,} elements differ, relative {relative:.2e}, largest {largest:.2e}"


def _words(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}".replace(" ", "") for name, value in values.items())
