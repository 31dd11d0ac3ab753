"""Cuts a flat range of a local tensor into boxes of the stored tensor. Pure arithmetic; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megazero.checkpoint.placement import Placement


@dataclass(frozen=True)
class Box:
    """A contiguous run of the flat local tensor that is a rectangle in the local and the stored tensor.

    offset: the flat index of the first element, in the row-major local tensor.
    shape: the rectangle as the local tensor sees it. Its elements are consecutive in the flat tensor.
    stored_offsets, stored_sizes: the rectangle in the stored tensor. With ``Placement.transposed``
        ``stored_sizes`` is ``shape`` swapped.
    """

    offset: int
    shape: tuple[int, ...]
    stored_offsets: tuple[int, ...]
    stored_sizes: tuple[int, ...]


def rectangles(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the flat range [start, stop) of a row-major tensor into (first index, sizes) rectangles.

    There are at most ``max(1, 2 * len(shape) - 1)`` of them, in flat order: the tail of a first broken row, whole
    rows, and the head of a last broken row. A broken row is cut by the same rule one dim further in.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows are [first, last)
    if first > last:  # the range lies inside one row
        yield from _broken(shape, last, start - last * row, stop - last * row)
        return
    yield from _broken(shape, first - 1, start - (first - 1) * row, row if start % row else 0)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    yield from _broken(shape, last, 0, stop - last * row)


def _broken(
    shape: Sequence[int], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for index, sizes in rectangles(shape[1:], start, stop):
        yield (row, *index), (1, *sizes)


def boxes(placement: Placement, start: int, stop: int, limit: int | None = None) -> Iterator[Box]:
    """Yield the boxes of the flat range [start, stop) of ``placement``'s local tensor, in flat order.

    There are at most ``max(1, 2 * ndim - 1)`` per segment. Local rows in no segment give none. With ``limit``, ranges
    are first cut at whole rows so that no box of whole rows exceeds ``limit`` elements (but one row is never cut).
    The reason is that a reader that wants a part of a large box must read all of it.
    """
    shape = placement.local_shape
    if not shape:
        if start < stop:
            yield Box(0, (), (), ())
        return
    row = prod(shape[1:])
    for low, high, segment in placement.ranges(start, stop):
        for begin, end in _pieces(low, high, row, limit):
            for index, sizes in rectangles(shape, begin, end):
                yield _place(placement, segment.stored - segment.local, index, sizes)


def gaps(placement: Placement, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the flat ranges inside [start, stop) that no segment stores (vocabulary padding), in order."""
    if not placement.local_shape:
        return
    position = start
    for low, high, _ in placement.ranges(start, stop):
        if position < low:
            yield position, low
        position = high
    if position < stop:
        yield position, stop


def _pieces(start: int, stop: int, row: int, limit: int | None) -> Iterator[tuple[int, int]]:
    if limit is None or stop - start <= limit:
        yield start, stop
        return
    step = max(1, limit // row) * row
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield start, end
        start = end


def _place(placement: Placement, shift: int, index: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    shape = placement.local_shape
    offset = sum(i * prod(shape[dim + 1 :]) for dim, i in enumerate(index))
    stored = [index[0] + shift, *index[1:]]
    if len(stored) > 1:
        stored[1] += placement.offset1
    if placement.transposed:
        return Box(offset, sizes, tuple(stored[::-1]), sizes[::-1])
    return Box(offset, sizes, tuple(stored), sizes)
