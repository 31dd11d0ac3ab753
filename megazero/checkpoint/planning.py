"""What each rank writes of a checkpoint, and the description of all tensors that torch's checkpointing reads.

A record's range becomes boxes (megazero.checkpoint.boxes). Each box is a chunk of the stored tensor 'kind/name' in
global coordinates, so any layout can read what any other wrote. Replicas that cut a tensor identically (key-value
heads shared by tensor-parallel ranks) may all be owners: of equal chunks one is written. Other replicas are not
recognised, which is why there is ``SliceRecord.owner``.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megazero.checkpoint.boxes import Box, boxes
from megazero.checkpoint.records import SliceRecord, split_name, stored_name

CHUNK_ELEMENTS = 1 << 24  # 64 MiB of fp32: bounds what a rank reads to get a part of a chunk

# Plain values, which ranks can send each other.
ChunkRow = list[Any]  # a chunk: name, offsets, sizes, dtype, and the tensor's shape
PlaceRow = list[Any]  # where it lies: name, offsets, file, first byte, bytes


@dataclass(frozen=True)
class OwnChunk:
    """A chunk that a rank owns: a box of one kind of a record. dtype: what it is stored in."""

    record: SliceRecord
    kind: str
    box: Box
    name: str
    dtype: torch.dtype

    @property
    def row(self) -> ChunkRow:
        sizes = [list(self.box.stored_offsets), list(self.box.stored_sizes)]
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.name, *sizes, dtype, list(self.record.placement.shape)]


def own_chunks(records: Iterable[SliceRecord]) -> list[OwnChunk]:
    """Return the chunks of all owned records. Raises ValueError if two are one."""
    found = dict[tuple[str, tuple[int, ...]], OwnChunk]()
    for record in records:
        parts = boxes(record.placement, record.start, record.stop, CHUNK_ELEMENTS) if record.owner else ()
        for box in parts:
            for kind, tensor in record.tensors.items():
                name = stored_name(kind, record.placement.name)
                if (name, box.stored_offsets) in found:
                    raise ValueError(
                        f"'{name}' has two owners of the box at {box.stored_offsets} on one rank: give one of the "
                        "records owner=False (tied parameters have one owner)"
                    )
                dtype = record.stored.get(kind, tensor.dtype)
                found[name, box.stored_offsets] = OwnChunk(record, kind, box, name, dtype)
    return list(found.values())


def arranged(chunks: Sequence[Sequence[ChunkRow]]) -> tuple[Metadata, list[list[int]]]:
    """Return torch's description of the tensors whose chunks the ranks own, which does not say yet where they lie.

    And for each rank, which of its chunks another one writes, by position. Raises ValueError unless every element of
    a tensor has one owner.
    """
    plans = [SavePlan([_item(*row) for row in rows]) for rows in chunks]
    _check_covered(plans)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    kept, metadata = planner.create_global_plan(plans)
    left_out = []
    for all_of_rank, written in zip(plans, kept, strict=True):
        indices = {item.index for item in written.items}
        left_out.append([i for i, item in enumerate(all_of_rank.items) if item.index not in indices])
    return metadata, left_out


def _item(name: str, offsets: list[int], sizes: list[int], dtype: str, shape: list[int]) -> WriteItem:
    if not isinstance(kind := getattr(torch, dtype, None), torch.dtype):  # the row came from another rank
        raise ValueError(f"'{name}' is to be stored as {dtype!r}, which is no dtype")
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        properties=TensorProperties(dtype=kind),
        size=torch.Size(shape),
    )
    return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)


def _check_covered(plans: Sequence[SavePlan]) -> None:
    """Do as torch's planner, which refuses overlaps, but name the tensor and the cause (2.11 names neither)."""
    chunks = {item.index: cast(TensorWriteData, item.tensor_data) for plan in plans for item in plan.items}
    covered: Counter[tuple[str, torch.Size]] = Counter()
    for index, data in chunks.items():
        covered[index.fqn, data.size] += prod(data.chunk.sizes)
    for (name, size), elements in covered.items():
        if elements != prod(size):
            raise ValueError(
                f"'{name}' {tuple(size)}: the owners' records hold {elements} of its {prod(size)} elements; "
                "every element needs one owner, and every rank the same shape"
            )


def description(metadata: Metadata, places: Iterable[Sequence[PlaceRow]]) -> bytes:
    """Return the file ``.metadata``, which names no path of this machine. places: where the chunks lie, by rank."""
    tensors = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
    numbers = {
        (name, chunk.offsets): i for name, tensor in tensors.items() for i, chunk in enumerate(tensor.chunks)
    }
    metadata.storage_data = {
        MetadataIndex(name, offsets, numbers[name, torch.Size(offsets)]): _StorageInfo(file, start, length)
        for rows in places
        for name, offsets, file, start, length in rows
    }
    metadata.storage_meta, metadata.version = StorageMeta(), CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def dtypes_by_kind(metadata: Metadata) -> dict[str, tuple[str, ...]]:
    """Map each kind to the names of the dtypes that its tensors are stored in."""
    kinds = dict[str, set[str]]()
    for name, tensor in metadata.state_dict_metadata.items():
        dtype = cast(TensorStorageMetadata, tensor).properties.dtype
        kinds.setdefault(split_name(name)[0], set()).add(str(dtype).removeprefix("torch."))
    return {kind: tuple(sorted(dtypes)) for kind, dtypes in kinds.items()}
