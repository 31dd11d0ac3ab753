"""Which elements of a bucket are coded, which go exactly, and where they lie in messages.

A bucket of d * n elements has d rows, the shards of the d ranks of a group, in the group's order. Megatron starts
parameters at multiples of 64 elements, and ends shards where it likes. So blocks of a quantised format lie on the
bucket's grid of 64, and none holds elements of two parameters, of which tensor-parallel ranks may replicate one and
split the other. Coded are the grid's blocks that lie in one row whole and hold no element of an exact parameter.
What is left of a row, exact parameters and the ends of rows, goes beside the codes as it is.

Positions are ranges, from which indices are made on the device when they are needed: one operation moves the
elements of all rows, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megazero.kernels.arena import Take
from megazero.mesh.mesh import Axis
from megazero.patches.options import BLOCK
from megazero.patches.two_hops import TwoHops

Range = tuple[int, int]  # begin and end


@dataclass(frozen=True)
class Ranges:
    """Ranges of a 1-D tensor, or of its blocks, one behind the other."""

    shifts: torch.Tensor  # int64: where a range begins, less how many elements the ranges before it have
    numels: torch.Tensor  # int64
    total: int

    @classmethod
    def of(cls, ranges: Iterable[Range], device: torch.device) -> Ranges:
        shifts, numels, total = [], [], 0
        for begin, end in ranges:
            shifts.append(begin - total)
            numels.append(end - begin)
            total += end - begin
        both = torch.tensor([shifts, numels], dtype=torch.int64, device=device)
        return cls(both[0], both[1], total)

    def index(self) -> torch.Tensor:
        """Return the positions, int64 [total]. The host does not wait."""
        own = torch.arange(self.total, device=self.shifts.device)
        return own.add_(torch.repeat_interleave(self.shifts, self.numels, output_size=self.total))


def exact_ranges(bucket: Any, exact: Iterable[Any]) -> list[Range]:
    """Return where these of Megatron's parameters lie in their bucket, in whole blocks of the grid.

    A parameter's gradient is a view of the bucket's. (``bucket.param_to_index`` leaves out the gaps between
    parameters before megatron-core 0.17.)
    """
    found = []
    for parameter in exact:
        grad = getattr(parameter, "main_grad_copy_in_grad_buffer", None)  # where sums have their own copy
        grad = parameter.main_grad if grad is None else grad
        begin = grad.storage_offset() - bucket.grad_data.storage_offset()
        found.append((begin // BLOCK * BLOCK, -(-(begin + grad.numel()) // BLOCK) * BLOCK))
    return sorted(found)


def coded_blocks(row: Range, exact: Sequence[Range]) -> list[Range]:
    """Return the coded blocks of a row [begin, end) of elements, as ranges of the grid's blocks."""
    begin, end = -(-row[0] // BLOCK), row[1] // BLOCK
    found = []
    for low, high in exact:
        if high > row[0] and low < row[1]:
            found.append((begin, min(low // BLOCK, end)))
            begin = max(begin, high // BLOCK)
    return [(low, high) for low, high in (*found, (begin, end)) if high > low]


def left_over(row: Range, coded: Sequence[Range]) -> list[Range]:
    """Return the elements of a row that are not in its coded blocks."""
    begins = [row[0], *(high * BLOCK for _, high in coded)]
    ends = [*(low * BLOCK for low, _ in coded), row[1]]
    return [(low, high) for low, high in zip(begins, ends, strict=True) if high > low]


def cut(ranges: Sequence[Range], first: int, last: int) -> list[Range]:
    """Return what lies in places [first, last) of the ranges, one behind the other."""
    found, place = [], 0
    for begin, end in ranges:
        low, high = max(begin, begin + first - place), min(end, begin + last - place)
        if high > low:
            found.append((low, high))
        place += end - begin
    return found


def count(ranges: Sequence[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


@dataclass(frozen=True)
class Columns:
    """Some columns of a bucket's rows, as they lie."""

    hops: TwoHops
    columns: slice

    def rows(self, tensor: torch.Tensor, _: Take) -> tuple[torch.Tensor, int]:
        """Return the view [h, Y, c] by local index and node, and the place of this rank's local index in it."""
        rows = tensor.view(self.hops.inter.size, self.hops.intra.size, -1)[:, :, self.columns]
        return rows.transpose(0, 1), self.hops.intra.index

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view [c] of this rank's row."""
        return tensor.view(len(self.hops.ranks), -1)[self.hops.index, self.columns]

    def store(self, sums: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put the sums [c] in this rank's row."""
        self.own(tensor).copy_(sums)


@dataclass(frozen=True)
class CodedBlocks:
    """Some of the coded blocks of every row.

    blocks: by row, ranges of the grid's blocks. width: the most elements that a row has here; others are filled up.
    first: how many coded elements of a row come before these.
    """

    hops: TwoHops
    blocks: Sequence[Sequence[Range]]
    width: int
    first: int
    device: torch.device

    def rows(self, tensor: torch.Tensor, take: Take) -> tuple[torch.Tensor, int]:
        """Return a copy [h, Y, width] by local index, this rank's last, and node; and the last place."""
        packed = take(len(self.blocks) * self.width, tensor.dtype)
        torch.index_select(_grid(tensor), 0, self._sent.index(), out=_grid(packed))
        h = self.hops.intra.size
        return packed.view(h, self.hops.inter.size, self.width), h - 1

    def store(self, sums: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put the sums [width], without what fills them up, in this rank's row."""
        values = sums[: self._own.total * BLOCK].to(tensor.dtype)
        _grid(tensor).index_copy_(0, self._own.index(), _grid(values))

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's row, without what fills it up."""
        return _grid(tensor).index_select(0, self._own.index()).view(-1)

    def place(self) -> int:
        """Return this rank's place among the gathered messages, which are by local index and node."""
        return self.hops.intra.index * self.hops.inter.size + self.hops.inter.index

    def load_all(self, tensor: torch.Tensor, gathered: torch.Tensor) -> None:
        """Copy every row out of the tensor into ``gathered`` [d, width], by local index and node."""
        torch.index_select(_grid(tensor), 0, self._taken.index(), out=_grid(gathered))

    def store_all(self, gathered: torch.Tensor, tensor: torch.Tensor, take: Take) -> None:
        """Copy ``gathered`` [d, width] back, without what fills its rows up."""
        rows = _grid(take(self._received.total * BLOCK, tensor.dtype))
        torch.index_select(_grid(gathered), 0, self._places.index(), out=rows)
        _grid(tensor).index_copy_(0, self._received.index(), rows)

    # -- positions in the grid --------------------------------------------------------------------

    def _order(self, locals_: Iterable[int]) -> list[Sequence[Range]]:
        return [row for local in locals_ for row in self.blocks[local :: self.hops.intra.size]]

    def _ranges(self, ranges: Iterable[Range]) -> Ranges:
        return Ranges.of(ranges, self.device)

    def _filled(self, locals_: Iterable[int]) -> Ranges:
        """Return the blocks of rows in this order, each filled up with blocks that nobody reads."""
        width = self.width // BLOCK
        return self._ranges(part for row in self._order(locals_) for part in (*row, (0, width - count(row))))

    @cached_property
    def _sent(self) -> Ranges:
        own = self.hops.intra.index
        return self._filled([*(i for i in range(self.hops.intra.size) if i != own), own])

    @cached_property
    def _taken(self) -> Ranges:
        return self._filled(range(self.hops.intra.size))

    @cached_property
    def _own(self) -> Ranges:
        return self._ranges(self.blocks[self.hops.index])

    @cached_property
    def _received(self) -> Ranges:
        return self._ranges(part for row in self._order(range(self.hops.intra.size)) for part in row)

    @cached_property
    def _places(self) -> Ranges:
        begins = range(0, len(self.blocks) * self.width // BLOCK, self.width // BLOCK)
        rows = self._order(range(self.hops.intra.size))
        return self._ranges((at, at + count(row)) for at, row in zip(begins, rows, strict=True))


@dataclass(frozen=True)
class Exact:
    """What goes beside the codes: by row, ranges of elements."""

    hops: TwoHops
    ranges: Sequence[Sequence[Range]]
    device: torch.device

    @cached_property
    def numels(self) -> list[list[int]]:
        """Return how many elements each row has, by local index and node."""
        h = self.hops.intra.size
        return [[count(row) for row in self.ranges[local::h]] for local in range(h)]

    @cached_property
    def all(self) -> Ranges:
        """Return the elements of all rows, by local index and node."""
        h = self.hops.intra.size
        parts = (part for local in range(h) for row in self.ranges[local::h] for part in row)
        return Ranges.of(parts, self.device)

    @cached_property
    def own(self) -> Ranges:
        """Return the elements of this rank's row."""
        return Ranges.of(self.ranges[self.hops.index], self.device)

    @property
    def crosses(self) -> bool:
        """Whether ranks of this local index have any, which they send across nodes."""
        return self.hops.inter.size > 1 and sum(self.numels[self.hops.intra.index]) > 0

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return the axes over which it goes, the inner one first."""
        return tuple(axis for axis in self.hops.axes if axis is not self.hops.inter or self.crosses)


def cut_bucket(
    numel: int,
    exact: Sequence[Range],
    hops: TwoHops,
    pieces: Callable[[int], Iterable[slice]],
    device: torch.device,
) -> tuple[list[CodedBlocks], Exact | None]:
    """Return the coded pieces of a bucket, and what goes beside them. ``pieces(n)`` cuts a row of n elements."""
    d = len(hops.ranks)
    n = numel // d
    rows = [(i * n, i * n + n) for i in range(d)]
    coded = [coded_blocks(row, exact) for row in rows]
    rest = [left_over(row, blocks) for row, blocks in zip(rows, coded, strict=True)]
    most = max(map(count, coded)) * BLOCK
    parts = [
        CodedBlocks(
            hops,
            [cut(blocks, columns.start // BLOCK, columns.stop // BLOCK) for blocks in coded],
            columns.stop - columns.start,
            columns.start,
            device,
        )
        for columns in pieces(most)
    ]
    return parts, Exact(hops, rest, device) if any(rest) else None


def _grid(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, BLOCK)
