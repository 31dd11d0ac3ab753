"""Planners of torch.distributed.checkpoint for flat slices: no DTensor, no nested state dict.

A record's range becomes boxes (megazero.checkpoint.boxes). Each box is a chunk of the stored tensor 'kind/name' in
global coordinates, so any layout can read what any other wrote. DCP removes duplicate chunks by (name, offset) only.
This is why there is ``SliceRecord.owner``. Replicas that cut a tensor identically (key-value heads shared by
tensor-parallel ranks) may all be owners.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megazero.checkpoint.boxes import Box, boxes, gaps
from megazero.checkpoint.records import SliceRecord, split_name, stored_name

CHUNK_ELEMENTS = 1 << 24  # 64 MiB of fp32: bounds what a rank reads to get a part of a chunk


def box_view(record: SliceRecord, kind: str, box: Box) -> torch.Tensor:
    """Return the box as the stored tensor sees it: a view of the record's flat tensor, maybe transposed."""
    first = box.offset - record.start
    view = record.tensors[kind][first : first + prod(box.shape)].view(box.shape)
    return view.t() if record.placement.transposed else view


class SliceSavePlanner(DefaultSavePlanner):
    """Writes every box of every owned record of this rank."""

    def __init__(self, records: Sequence[SliceRecord]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.records = records
        self.places: dict[tuple[str, torch.Size | None], tuple[SliceRecord, str, Box, torch.dtype]] = {}
        self._made: tuple[SliceRecord, str, torch.Tensor] | None = None

    def create_local_plan(self) -> SavePlan:
        items = []
        for record in self.records:
            if record.owner:
                for box in boxes(record.placement, record.start, record.stop, CHUNK_ELEMENTS):
                    items += [self._item(record, kind, box) for kind in record.tensors]
        self.plan = SavePlan(items)
        return self.plan

    def _item(self, record: SliceRecord, kind: str, box: Box) -> WriteItem:
        offsets, sizes = torch.Size(box.stored_offsets), torch.Size(box.stored_sizes)
        index = MetadataIndex(stored_name(kind, record.placement.name), offsets)
        if (index.fqn, offsets) in self.places:
            raise ValueError(
                f"'{index.fqn}' has two owners of the box at {tuple(offsets)} on one rank: give one of the "
                "records owner=False (tied parameters have one owner)"
            )
        dtype = record.stored.get(kind, record.tensors[kind].dtype)
        self.places[index.fqn, offsets] = record, kind, box, dtype
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(record.placement.shape),
        )
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        record, kind, box, dtype = self.places[index.fqn, index.offset]
        view = box_view(self._held(record, kind), kind, box)
        return view.to(dtype).contiguous()  # copies a box that is converted or transposed only

    def _held(self, record: SliceRecord, kind: str) -> SliceRecord:
        """Return the record with its tensor, which stays until that of another record is made."""
        if record.make is None or not record.tensors[kind].is_meta:
            return record
        if self._made is None or self._made[0] is not record or self._made[1] != kind:
            self._made = None  # before the next one is made
            self._made = record, kind, record.make(kind)
        return dataclasses.replace(record, tensors={kind: self._made[2]})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Do the same as DCP's, which refuses overlaps, but name the tensor and the cause (2.11 names neither)."""
        chunks = {item.index: item.tensor_data for plan in all_plans for item in plan.items}
        covered: Counter[tuple[str, torch.Size]] = Counter()
        for index, data in chunks.items():
            assert data is not None and data.chunk is not None
            covered[index.fqn, data.size] += prod(data.chunk.sizes)
        for (name, size), elements in covered.items():
            if elements != prod(size):
                raise ValueError(
                    f"'{name}' {tuple(size)}: the owners' records hold {elements} of its {prod(size)} elements; "
                    "every element needs one owner, and every rank the same shape"
                )
        return super().create_global_plan(all_plans)


class SliceLoadPlanner(DefaultLoadPlanner):
    """Reads what this rank's records need, in place, whatever slices the checkpoint was written in.

    ``kinds`` maps kind in the records to kind in the checkpoint ({'master': 'weights'} starts the masters from the
    weights). Records whose stored tensor the checkpoint lacks are left alone (the caller compares names first).
    Padding that the checkpoint does not store becomes zero in ``finish``.
    """

    def __init__(self, records: Sequence[SliceRecord], kinds: Mapping[str, str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.records = records
        self.kinds = kinds
        self.views: list[torch.Tensor] = []
        self.padding: list[torch.Tensor] = []

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for record in self.records:
            for kind in [kind for kind in record.tensors if kind in self.kinds]:
                items += self._items(record, kind)
        return LoadPlan(items)

    def _items(self, record: SliceRecord, kind: str) -> list[ReadItem]:
        assert self.metadata is not None
        name = stored_name(self.kinds[kind], record.placement.name)
        stored = self.metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            return []
        for low, high in gaps(record.placement, record.start, record.stop):
            self.padding.append(record.tensors[kind][low - record.start : high - record.start])
        items: list[ReadItem] = []
        for box in boxes(record.placement, record.start, record.stop):
            chunk = ChunkStorageMetadata(torch.Size(box.stored_offsets), torch.Size(box.stored_sizes))
            found = create_read_items_for_chunk_list(name, stored, [chunk])
            if sum(prod(item.lengths) for item in found) != prod(chunk.sizes):
                raise ValueError(f"'{name}': the checkpoint does not hold all of {chunk}")
            target = MetadataIndex(name, chunk.offsets, len(self.views))  # index distinguishes two readers
            self.views.append(box_view(record, kind, box))
            items += [dataclasses.replace(item, dest_index=target) for item in found]
        return items

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        assert index.index is not None
        return self.views[index.index]

    def finish(self) -> None:
        """Zero the local rows that no stored row fills."""
        for padding in self.padding:
            padding.zero_()


def tensors_by_kind(metadata: Metadata) -> dict[str, dict[str, TensorStorageMetadata]]:
    """Map kind to name to description of every tensor of a checkpoint."""
    kinds: dict[str, dict[str, Any]] = {}
    for stored, tensor in metadata.state_dict_metadata.items():
        kind, name = split_name(stored)
        kinds.setdefault(kind, {})[name] = tensor
    return kinds
