"""Data axes: what their levels are, who counts, and where a reduction first crosses nodes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megazero.mesh.grid import make_grid
from megazero.mesh.mesh import Axis
from megazero.zero import DataAxes
from megazero.zero.plan import GATHER, Hop


def axes_of(rank: int) -> list[Axis]:
    """The data-parallel axes of 8 ranks on nodes of 2 that are cut at 2 and 4, innermost first."""
    grid = make_grid(8, 2, shards=(1, 2, 4))
    return [Axis(spec, spec.index(rank), spec.ranks(rank), None, None) for spec in grid.data_axes]


@pytest.mark.parametrize(
    "shards, order, levels",
    [
        ((2, 2, 4), (0, 1, 2), (1, 1, 2)),
        ((1, 1, 1), (0, 1, 2), (0, 0, 0)),
        ((2, 8, 8), (0, 1, 2), (1, 3, 3)),
        ((2, 2, 2), (1, 0, 2), (1, 1, 1)),
        ((1, 1, 2), (1, 2), (0, 0, 1)),
        ((1, 1, 1), (0,), (0, 0, 0)),
        ((1, 1, 1), (), (0, 0, 0)),
    ],
)
def test_factors_are_levels_of_any_axes_in_any_order(shards, order, levels) -> None:
    every = axes_of(0)
    assert [axis.size for axis in every] == [2, 2, 2]
    axes = DataAxes.over([every[at] for at in order], shards)
    assert (axes.p, axes.g, axes.os, axes.all) == (*levels, len(order))
    assert axes.shards == shards


def test_one_of_the_ranks_that_hold_a_slice_counts() -> None:
    counting = [rank for rank in range(8) if DataAxes.over(axes_of(rank), (1, 2, 4)).counts]
    assert counting == [0, 1, 2, 3]
    counting = [rank for rank in range(8) if DataAxes.over(axes_of(rank)[::-1], (1, 2, 4)).counts]
    assert counting == [0, 2, 4, 6]
    # Of experts along the first axis, each is held by the ranks along the others.
    counting = [rank for rank in range(8) if DataAxes.over(axes_of(rank)[1:], (1, 1, 2)).counts]
    assert counting == [0, 1, 2, 3]


def test_states_of_experts_that_ranks_share_are_cut_by_what_is_left_of_the_factors() -> None:
    grid = make_grid(8, 4, shards=(4, 4, 8), ep=2)
    own = [Axis(spec, spec.index(0), spec.ranks(0), None, None) for spec in grid.expert_axes]
    assert DataAxes.of_experts(SimpleNamespace(grid=grid, expert_axes=own)).shards == (2, 2, 4)


def test_whole_gradients_are_cut_by_no_axis_and_reduced_once() -> None:
    axes = DataAxes.over(axes_of(0), (2, 4, 8))
    whole = replace(axes, g=0)
    assert (whole.p, whole.g, whole.os) == (1, 0, 3) and whole.shards == (2, 1, 8)


def test_hops_are_named_by_kind_and_link() -> None:
    first, second, _ = axes_of(0)
    axes = DataAxes.over([second, first])
    for kind in ("refresh", "gather", "reduce"):
        hops = tuple(Hop(kind, GATHER, level, axes.axis(level).spec, None, 0) for level in (2, 1))
        assert [spec.axis for spec in axes.hop_specs(hops)] == [first.name, second.name]
        assert [spec.hop for spec in axes.hop_specs(hops)] == [f"{kind}_intra", f"{kind}_inter"]
