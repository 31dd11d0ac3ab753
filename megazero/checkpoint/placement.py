"""Where a rank-local parameter lies in the model-wide tensor that a checkpoint stores.

Glossary
--------
local tensor
    This is the parameter as the rank's module holds it, after tensor parallelism and vocabulary padding.
stored tensor
    This is the tensor that a checkpoint holds under ``name``. It has the true vocabulary, no tensor-parallel split,
    and the Hugging Face layout where the family has one (fused or transposed tensors included).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Values = TypeVar("Values", bound=Any)  # a tensor or an array


@dataclass(frozen=True)
class RowRange:
    """``length`` consecutive dim-0 rows of the local tensor, and the row where they go.

    With ``Placement.transposed`` the stored rows counted here are columns of the stored tensor.
    """

    local: int
    length: int
    stored: int


@dataclass(frozen=True)
class Placement:
    """Maps a local tensor (mostly 1-D or 2-D; of stacked experts 3-D) to boxes of the stored tensor.

    name: the stored tensor's fully qualified name (no rank, no stage, no local index in it).
    shape: the stored tensor's shape, as stored.
    local_shape: the rank's own shape (padded rows included).
    segments: dim-0 row ranges, sorted by ``local`` and disjoint. Local rows in no segment (vocabulary
        padding) are not stored and are zero when loaded.
    offset1: the start of the local dim-1 columns (row-parallel weights; a part of stacked experts, which lie along
        dim 0). It is 0 for 1-D tensors.
    transposed: the stored tensor is the transpose (GPT-2's Conv1D): local [r, c] is stored [c, r].
    """

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    segments: tuple[RowRange, ...]
    offset1: int = 0
    transposed: bool = False

    @staticmethod
    def plain(
        name: str, shape: Sequence[int], local_shape: Sequence[int] | None = None, offset0: int = 0
    ) -> Placement:
        """Make one box of whole rows: local row i is stored row ``offset0 + i``, cut off at the stored tensor's end.

        A scalar (shape ``()``) is stored whole.
        """
        local = tuple(local_shape if local_shape is not None else shape)
        rows = max(0, min(local[0], shape[0] - offset0)) if local else 0
        segments = (RowRange(0, rows, offset0),) if rows else ()
        return Placement(name, tuple(shape), local, segments)

    @property
    def parts(self) -> tuple[Placement, ...]:
        return (self,)

    def held(self, local: Values) -> Iterator[tuple[Placement, Values]]:
        """Yield the placement with the local tensor, as ``Stack.held``."""
        yield self, local

    def cut(self, start: int, stop: int) -> Iterator[tuple[Placement, int, int, int]]:
        """Yield the flat local range [start, stop), as ``Stack.cut``."""
        yield self, 0, start, stop

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, RowRange]]:
        """Yield the parts of the flat local range [start, stop) that each segment stores, in order."""
        row = prod(self.local_shape[1:])
        for segment in self.segments:
            low, high = segment.local * row, (segment.local + segment.length) * row
            if max(low, start) < min(high, stop):
                yield max(low, start), min(high, stop), segment

    @property
    def rows(self) -> Placement:
        """The same place of all rows: dims before the last one are one. A vector has rows of one element."""
        if len(self.shape) == 1:
            return Placement(self.name, (*self.shape, 1), (*self.local_shape, 1), self.segments)
        if len(self.shape) < 3:
            return self
        (_, there, width), (_, here, _) = self.shape, self.local_shape
        each = [
            RowRange((s.local + i) * here, here, (s.stored + i) * there + self.offset1)
            for s in self.segments
            for i in range(s.length)
        ]
        local = (prod(self.local_shape[:-1]), width)
        return Placement(self.name, (prod(self.shape[:-1]), width), local, tuple(each))

    def slices(self) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """Yield each segment's local rows, and their rows and columns in the stored tensor.

        With ``transposed`` those are rows and columns of the stored tensor's transpose.
        """
        columns = [slice(self.offset1, self.offset1 + n) for n in self.local_shape[1:2]]
        for s in self.segments:
            yield slice(s.local, s.local + s.length), (slice(s.stored, s.stored + s.length), *columns)

    def boxes(self, local: Tensor, stored: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of equal-shaped views: rows of the local tensor, and their box of the stored one."""
        stored = stored.t() if self.transposed else stored
        for ours, theirs in self.slices():
            yield local[ours], stored[theirs]


@dataclass(frozen=True)
class Stack:
    """Maps a local tensor [n, ...] to n stored ones: each of its slices along dim 0 has a placement of its own.

    Experts lie so in memory, and in a checkpoint each under a name of its own.
    """

    parts: tuple[Placement, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return len(self.parts), *self.parts[0].local_shape

    def held(self, local: Values) -> Iterator[tuple[Placement, Values]]:
        """Yield each placement with its slice of the local tensor."""
        yield from zip(self.parts, local, strict=True)

    def cut(self, start: int, stop: int) -> Iterator[tuple[Placement, int, int, int]]:
        """Yield the parts of the flat local range [start, stop): the placement, where its slice begins in the flat
        local tensor, and the range within that slice."""
        size = prod(self.parts[0].local_shape)
        for number in range(start // size, -(-stop // size)):
            first = number * size
            yield self.parts[number], first, max(start - first, 0), min(stop - first, size)


Places = Placement | Stack
