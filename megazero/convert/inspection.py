"""Describes a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from megazero.checkpoint.directory import stated
from megazero.checkpoint.errors import CheckpointError
from megazero.checkpoint.manifest import check_checksum, open_manifest
from megazero.checkpoint.reading import StoredTensors

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


def _words(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}".replace(" ", "") for name, value in values.items())
