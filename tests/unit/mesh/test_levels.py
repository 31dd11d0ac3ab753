"""Levels between node and cluster: which links there are, how axes are cut at them, and what is refused."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from megazero.mesh.grid import data_cuts, make_grid, nearest_shards, shard_problem, whole_parts
from megazero.mesh.levels import INTER, INTRA, Level, across, link_between, links_of, make_levels, short
from tests.messages import refused

RACK, SITE = "inter_rack", "inter_site"


def test_a_cluster_has_nodes_and_what_joins_them() -> None:
    assert make_levels(8, 4) == (Level("node", 4, INTRA), Level("cluster", 8, INTER))
    four = make_levels(16, 2, (2, 4))
    assert [(level.name, level.size) for level in four] == [
        ("node", 2),
        ("rack", 4),
        ("site", 8),
        ("cluster", 16),
    ]
    assert tuple(level.link for level in four) == links_of(2) == (INTRA, INTER, RACK, SITE)
    assert [link_between(four, 0, rank) for rank in (0, 1, 2, 4, 8)] == [INTRA, INTRA, INTER, RACK, SITE]
    assert [short(link) for link in links_of(2)] == ["intra", "inter", "inter_rack", "inter_site"]
    assert [across(link) for link in links_of(1)] == ["inside nodes", "across nodes", "across racks"]
    assert [level.size for level in make_levels(4, 2, (4,))] == [2, 4, 4], "a world in one rack"


def test_sizes_that_do_not_divide_are_refused() -> None:
    for sizes, said in (
        ((3,), ("4 nodes", "racks of 3", "nearest: 2")),
        ((2, 3), ("site of 3 nodes", "parts of 2", "nearest: 4")),
        ((1, 2, 4), ("at most 2", "rack, site")),
    ):
        with refused(*said):
            make_levels(8, 2, sizes)


def test_every_axis_has_one_link_and_one_role() -> None:
    """By brute force: all legal factors over 8 ranks on racks of 2 nodes of 2, and with them 2 tensor-parallel ranks
    or pipelines, inside or outside."""
    for tp, pp, outermost in ((1, 1, False), (2, 1, False), (1, 2, False), (1, 2, True)):
        d = 8 // (tp * pp)
        near = [max(1, min(d, size // (tp * (pp if outermost else 1)))) for size in (2, 4)]
        for shards in product((1, 2, 4, 8), repeat=3):
            if shard_problem(shards, d, near):
                continue
            grid = make_grid(8, 2, tp, pp, shards, outermost, level_sizes=(2,))
            assert len({axis.name for axis in grid.axes}) == len(grid.axes)
            for axis in grid.axes:
                for rank in range(8):
                    group = axis.ranks(rank)
                    links = {link_between(grid.levels, group[0], other) for other in group}
                    slowest = max(links, key=links_of(1).index)
                    assert axis.size == 1 or axis.link == slowest, (axis, shards)
            for axis in grid.data_axes:
                near_and_far = [link for link, ranks in grid.others(axis).items() if ranks]
                assert near_and_far == [axis.link], "all ranks of a cut axis lie beyond one kind of link"
            products = [
                prod(axis.size for axis in grid.data_axes[: i + 1]) for i in range(len(grid.data_axes))
            ]
            assert [1, *products] == sorted(set(data_cuts(d, near, shards)))


def test_axes_are_named_by_role_and_link() -> None:
    grid = make_grid(8, 2, shards=(2, 4, 8), level_sizes=(2,))
    assert [axis.name for axis in grid.data_axes] == ["p_intra", "g_inter", "os_inter_rack"]
    assert [axis.name for axis in make_grid(8, 2, shards=(2, 2, 8), level_sizes=(2,)).data_axes] == [
        "p_intra", "os_inter", "os_inter_rack",
    ]  # fmt: skip
    experts = make_grid(8, 2, shards=(2, 2, 8), ep=4, level_sizes=(2,))
    assert [axis.link for axis in experts.ep_axes] == [INTRA, INTER]
    assert [axis.name for axis in experts.expert_axes] == ["os_inter_rack"]


def test_two_levels_are_as_if_there_were_no_others() -> None:
    for shards in ((1, 1, 1), (1, 2, 8), (2, 2, 8), (8, 8, 8)):
        plain, one = make_grid(8, 2, shards=shards), make_grid(8, 2, shards=shards, level_sizes=(4,))
        assert plain.axes == one.axes and plain.levels == (one.levels[0], Level("cluster", 8, INTER))


def test_a_row_of_scalars_crosses_each_link_once() -> None:
    grid = make_grid(24, 2, level_sizes=(3,))
    assert [(axis.name, axis.size, axis.stride) for axis in grid.row_axes] == [
        ("racks", 4, 6), ("nodes", 3, 2), ("node", 2, 1),
    ]  # fmt: skip
    assert grid.rows_sent == {RACK: 3, INTER: 2 * 4, INTRA: 1 * 12}
    assert grid.added_up(48) == {RACK: 72, INTER: 64, INTRA: 48}


@pytest.mark.parametrize("wanted", [(3, 3, 3), (2, 6, 6), (1, 1, 5)])
def test_illegal_factors_name_the_nearest_legal_ones(wanted: tuple[int, int, int]) -> None:
    """Of 12 data-parallel ranks 2 share a node and 4 a rack."""
    problem, nearest = shard_problem(wanted, 12, (2, 4)), nearest_shards(wanted, 12, (2, 4))
    assert ",".join(map(str, nearest)) in problem and not shard_problem(nearest, 12, (2, 4))
    assert whole_parts(12, (2, 4)) == [1, 2, 4, 12]
    assert "rack" in shard_problem((6, 6, 6), 12, (2, 4))
