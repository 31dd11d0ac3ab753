"""Nested slices: every element has one owner per level, deeper slices lie inside, hops land right."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.zero.layout import make_layout

SHAPES = {"w": (7, 5), "norm": (5,), "v": (3, 11), "bias": (3,)}


def layouts(sizes, block=4, exact=frozenset()):
    for indices in itertools.product(*(range(a) for a in sizes)):
        yield make_layout(SHAPES, block=block, sizes=sizes, indices=indices, exact=exact)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (4,), (), (2, 2, 2)])
@pytest.mark.parametrize("exact", [frozenset(), frozenset({"norm", "bias"})])
def test_slices_tile_and_nest(sizes, exact):
    for level in range(len(sizes) + 1):
        count = np.zeros(next(layouts(sizes, exact=exact)).numel, int)
        for layout in layouts(sizes, exact=exact):
            for piece in layout.pieces(level):
                count[piece.start : piece.start + piece.numel] += 1
            for outer in range(level):
                for inner, around in zip(layout.pieces(level), layout.pieces(outer), strict=True):
                    assert around.start <= inner.start
                    assert inner.start + inner.numel <= around.start + around.numel
        assert set(count) == {int(np.prod(sizes[level:], dtype=int))}


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2)])
@pytest.mark.parametrize("exact", [frozenset(), frozenset({"norm", "bias"})])
def test_pieces_are_found_within_the_buffers_of_outer_levels(sizes, exact):
    for layout in layouts(sizes, exact=exact):
        whole = np.arange(layout.numel)

        def compact(level, layout=layout, whole=whole):
            return np.concatenate([whole[piece.span] for piece in layout.pieces(level)])

        for outer, level in itertools.combinations_with_replacement(range(len(sizes) + 1), 2):
            held, wanted = compact(outer), compact(level)
            for piece in layout.within(level, outer):
                assert np.array_equal(held[piece.span], wanted[piece.compact : piece.compact + piece.numel])


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (2, 1, 3)])
def test_gathers_outermost_first_rebuild_the_buffer(sizes):
    """Simulate the hops with numpy: one concatenation over one axis per hop."""
    every = {lay.indices: lay for lay in layouts(sizes)}
    full = np.arange(next(iter(every.values())).numel)
    held = {i: full[p.start : p.start + p.numel] for i, lay in every.items() for p in lay.pieces(len(sizes))}
    for axis in reversed(range(len(sizes))):
        held = {
            i: np.concatenate([held[(*i[:axis], k, *i[axis + 1 :])] for k in range(sizes[axis])])
            for i in every
        }
    assert all(np.array_equal(x, full) for x in held.values())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=6),
    st.lists(st.integers(1, 4), max_size=3),
    st.sampled_from([1, 8, 64]),
)
def test_any_sizes(numels, sizes, block):
    shapes = {f"p{i}": (n,) for i, n in enumerate(numels)}
    layout = make_layout(shapes, block=block, sizes=sizes, indices=[a - 1 for a in sizes])
    assert all(s.start % block == 0 for s in layout.slots)
    assert all(p.start % block == 0 and p.numel % block == 0 for p in layout.pieces(len(sizes)))
    assert sum(s.numel for s in layout.slots) + sum(b - a for a, b in layout.gaps()) == layout.numel
    seen = 0
    for indices in itertools.product(*(range(a) for a in sizes)):
        mine = make_layout(shapes, block=block, sizes=sizes, indices=indices)
        seen += sum(high - low for _, low, high, _ in mine.ranges(len(sizes)))
    assert seen == sum(numels)
    used = {f"p{i}": n // 2 for i, n in enumerate(numels) if i % 2}
    part = make_layout(shapes, block=block, sizes=sizes, indices=layout.indices, used=used)
    for level in range(len(sizes) + 1):  # besides layout's own, what its parameters leave unused
        gaps = {at for low, high in layout.gaps(level) for at in range(low, high)}
        for slot, low, high, start in layout.ranges(level):
            gaps |= {start + at - low for at in range(max(low, used.get(slot.name, high)), high)}
        assert {at for low, high in part.gaps(level) for at in range(low, high)} == gaps
