"""Flat ranges to boxes against brute force: every stored element exactly once over all ranks."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.checkpoint.boxes import boxes, gaps, rectangles
from megazero.checkpoint.placement import Placement, RowRange, Stack


def fill(stored, placement, start, stop, values, limit=None):
    """Add a slice's values into the stored tensor through its boxes, and check each box's bookkeeping."""
    position = start
    for box in boxes(placement, start, stop, limit):
        assert box.offset >= position and prod(box.shape) > 0
        position = box.offset + prod(box.shape)
        assert position <= stop
        block = values[box.offset - start : position - start].reshape(box.shape)
        where = tuple(slice(o, o + n) for o, n in zip(box.stored_offsets, box.stored_sizes, strict=True))
        assert stored[where].shape == box.stored_sizes
        stored[where] += block.T if placement.transposed else block


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_rectangles_are_the_range_in_order(shape, data):
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    flat = np.arange(total).reshape(shape)
    found = list(rectangles(shape, start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    got = [
        flat[tuple(slice(i, i + n) for i, n in zip(index, sizes, strict=True))].ravel()
        for index, sizes in found
    ]
    assert np.concatenate([*got, []]).tolist() == list(range(start, stop))


def column_parallel(rows, columns, tp, padded=None):
    """Rows over tp ranks, padded to a multiple of tp (vocabulary), possibly with empty last ranks."""
    local = -(-(padded or rows) // tp)
    return [Placement.plain("w", (rows, columns), (local, columns), r * local) for r in range(tp)]


def row_parallel(rows, columns, tp):
    whole = (RowRange(0, rows, 0),)
    return [
        Placement("w", (rows, columns * tp), (rows, columns), whole, offset1=r * columns) for r in range(tp)
    ]


def fused_qkv(head_dim, queries, groups, tp, transposed=False, columns=3):
    """[q | k | v] stored whole; each rank holds its heads' part of each, as three segments."""
    q, kv = head_dim * queries * groups, head_dim * groups
    starts = (0, q, q + kv)
    placements = []
    for rank in range(tp):
        parts, segments, local = (q // tp, kv // tp, kv // tp), [], 0
        for start, part in zip(starts, parts, strict=True):
            segments.append(RowRange(local, part, start + rank * part))
            local += part
        shape = (q + 2 * kv, columns)
        stored = shape[::-1] if transposed else shape
        placements.append(Placement("w", stored, (local, columns), tuple(segments), transposed=transposed))
    return placements


def transposed_row_parallel(rows, columns, tp):
    return [
        Placement(
            "w", (columns * tp, rows), (rows, columns), (RowRange(0, rows, 0),), r * columns, transposed=True
        )
        for r in range(tp)
    ]


@st.composite
def layouts(draw):
    tp = draw(st.sampled_from([1, 2, 4]))
    a, b = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    return draw(
        st.sampled_from(
            [
                column_parallel(a, b, tp),
                column_parallel(a, b, tp, padded=a + 5),
                row_parallel(a, b, tp),
                transposed_row_parallel(a, b, tp),
                fused_qkv(a, 2, tp, tp),
                fused_qkv(a, 3, tp, tp, transposed=True, columns=b),
                [Placement.plain("bias", (a,))],
                [Placement.plain("conv", (a, b, 3))],
                [Placement.plain("scalar", ())],
            ]
        )
    )


@settings(max_examples=300, deadline=None)
@given(layouts(), st.integers(1, 5), st.sampled_from([None, 1, 6]), st.data())
def test_every_stored_element_exactly_once(placements, shards, limit, data):
    count = np.zeros(placements[0].shape)
    unstored = 0
    for placement in placements:
        total = prod(placement.local_shape)
        cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=shards - 1, max_size=shards - 1)))
        for start, stop in zip([0, *cuts], [*cuts, total], strict=True):
            fill(count, placement, start, stop, np.ones(stop - start), limit)
            unstored += sum(high - low for low, high in gaps(placement, start, stop))
    assert (count == 1).all()
    assert unstored == sum(prod(p.local_shape) for p in placements) - count.size


@pytest.mark.parametrize("limit, most", [(None, 60), (12, 12), (5, 6)])
def test_limit_bounds_boxes_but_never_cuts_a_row(limit, most):
    found = list(boxes(Placement.plain("w", (12, 6)), 3, 69, limit))
    assert max(prod(box.shape) for box in found) == most
    assert sum(prod(box.shape) for box in found) == 66


def test_padding_in_the_middle_and_at_the_end():
    placement = Placement("w", (3, 2), (6, 2), (RowRange(0, 1, 0), RowRange(3, 2, 1)))
    assert list(gaps(placement, 0, 12)) == [(2, 6), (10, 12)]
    assert list(gaps(placement, 3, 11)) == [(3, 6), (10, 11)]
    assert list(gaps(placement, 6, 10)) == []


@pytest.mark.parametrize(("start", "stop"), [(0, 60), (0, 1), (19, 21), (20, 40), (5, 58), (40, 40)])
def test_a_stack_is_cut_where_another_tensor_begins(start: int, stop: int) -> None:
    stack = Stack(tuple(Placement.plain(f"w{i}", (4, 5)) for i in range(3)))
    assert stack.local_shape == (3, 4, 5)
    flat, held = np.arange(60), {f"w{i}": np.full(20, -1) for i in range(3)}
    for placement, first, low, high in stack.cut(start, stop):
        assert low < high
        held[placement.name][low:high] = flat[first + low : first + high]
    found = np.concatenate(list(held.values()))
    assert np.array_equal(found, np.where((flat >= start) & (flat < stop), flat, -1))


@pytest.mark.parametrize("start, stop", [(0, 48), (3, 41), (7, 9)])
def test_a_part_of_stacked_experts_lies_between_the_others(start: int, stop: int) -> None:
    """Experts 1 and 2 of four, rows 2 to 5 of 7: as the same boxes of all rows."""
    part = Placement("w", (4, 7, 8), (2, 3, 8), (RowRange(0, 2, 1),), offset1=2)
    flat, held, rows = np.arange(1, 49), np.zeros((4, 7, 8), int), np.zeros((28, 8), int)
    fill(held, part, start, stop, flat[start:stop])
    fill(rows, part.rows, start, stop, flat[start:stop])
    wanted = np.zeros((4, 7, 8), int)
    wanted[1:3, 2:5] = np.where((flat > start) & (flat <= stop), flat, 0).reshape(2, 3, 8)
    assert np.array_equal(held, wanted) and np.array_equal(rows, wanted.reshape(28, 8))
    plain = Placement.plain("w", (4, 7))
    assert plain.rows is plain
