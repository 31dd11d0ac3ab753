"""Axes of experts: legal layouts of a few ranks, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import pytest

from megazero.mesh.grid import Grid, data_ranks, expert_problem, make_grid, shard_problem
from megazero.mesh.levels import INTER, INTRA, make_levels
from tests.messages import refused


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def layouts() -> Iterator[tuple[tuple[int, int, int, int], tuple[int, int, int], int, int]]:
    """(ranks, of a node, tp, pp), legal shards, d and h."""
    for nodes, per_node, tp, pp in product((1, 2, 4), (2, 4, 6), (1, 2), (1, 2)):
        world = nodes * per_node
        if world % (tp * pp):
            continue
        d, h = world // (tp * pp), data_ranks(make_levels(world, per_node), tp, pp)[0]
        for shards in product(divisors(d), repeat=3):
            if not shard_problem(shards, d, (h,)):
                yield (world, per_node, tp, pp), shards, d, h


def test_experts_lie_on_the_ranks_that_hold_the_same_and_keep_the_share_of_every_state() -> None:
    legal = refused = crossing = 0
    for sizes, shards, d, h in layouts():
        for together in divisors(d):
            ep = together * sizes[2]
            inside = not expert_problem(ep, ep, sizes[2], shards, d, (h,))
            if expert_problem(ep, ep, sizes[2], shards, d, (h,), across=True):
                refused += 1
                straddles = h % together and together % h
                assert straddles or any(k % together and together % k for k in shards)
                continue
            legal += inside
            crossing += not inside
            assert inside == (h % together == 0)
            check(make_grid(*sizes, shards, ep=ep), together, inside)
    assert (legal, crossing, refused) == (1085, 478, 314)


def test_the_ranks_of_a_round_have_other_samples_at_the_same_stage() -> None:
    grid = make_grid(32, 8, 2, 2, (1, 1, 1), cp=2)  # 8 data-parallel ranks, 4 of a node; 2 share samples
    near, far = grid.round_axes
    assert [(axis.size, axis.link) for axis in (near, far)] == [(2, INTRA), (2, INTER)]
    for rank in range(grid.world_size):
        together = {other for each in far.ranks(rank) for other in near.ranks(each)}
        stage, place = rank // grid.axis("pp").stride % 2, rank % 2 + 2 * (grid.dp_index(rank) % 2)
        same = [
            r
            for r in range(32)
            if (r // grid.axis("pp").stride % 2, r % 2 + 2 * (grid.dp_index(r) % 2)) == (stage, place)
        ]
        assert together == set(same)
    assert [axis.size for axis in make_grid(8, 4, 1, 1, (1, 1, 1), cp=8).round_axes] == [1, 1]


def check(grid: Grid, together: int, inside: bool) -> None:
    axes = grid.expert_axes
    for level, factor in zip(("p", "g", "os"), grid.shards, strict=True):
        roles = ("p", "g", "os")[: ("p", "g", "os").index(level) + 1]
        assert together * prod(a.size for a in axes if a.role in roles) == max(factor, together)
    for rank in range(grid.world_size):
        group = grid.ep_axis.ranks(rank)
        assert (len({r // grid.ranks_per_node for r in group}) == 1) == inside
        near, far = (axis.ranks(rank) for axis in grid.ep_axes)
        assert {r for each in far for r in grid.ep_axes[0].ranks(each)} == set(group)
        assert len({r // grid.ranks_per_node for r in near}) == 1
        assert len({r // grid.ranks_per_node for r in far}) == len(far)
        span = {rank}
        for axis in axes:
            nodes = {r // grid.ranks_per_node for r in axis.ranks(rank)}
            assert axis.link == (INTRA if len(nodes) == 1 else INTER)
            span = {r for each in span for r in axis.ranks(each)}
        # With the ranks that share the experts, these are the ranks of the stage.
        stage = {r for each in span for r in grid.ep_axis.ranks(each)}
        own = grid.axis("pp").index(rank)
        assert len(span) == grid.dp // together
        assert stage == {r for r in range(grid.world_size) if grid.axis("pp").index(r) == own}


def test_axes_that_other_parameters_have_too_are_the_same() -> None:
    grid = make_grid(8, 4, shards=(4, 4, 8), ep=4)  # zeropp: one group for each node
    assert grid.expert_axes == (grid.axis("os_inter"),) and grid.expert_shards == (1, 1, 2)
    grid = make_grid(8, 4, shards=(8, 8, 8), ep=2)
    assert [axis.name for axis in grid.expert_axes] == ["xp_intra", "p_inter"]
    assert make_grid(4, 2, 2, ep=2).expert_axes == make_grid(4, 2, 2).data_axes
    assert make_grid(4, 2).ep_axis.size == 1


@pytest.mark.parametrize(
    ("ep", "experts", "tp", "shards", "words"),
    [
        (3, 8, 1, (1, 1, 8), "size 3: it does not divide 8 experts, its ranks straddle a node, which has 4"),
        (8, 8, 1, (1, 1, 8), "4 data-parallel ranks, without --moe-dispatch-across-nodes exact; nearest: 4"),
        (3, 9, 2, (1, 1, 8), "it is not a multiple of --tensor-model-parallel-size 2; nearest: 1"),
        (16, 16, 2, (1, 1, 8), "x 2 tensor-parallel ranks, without --moe-dispatch-across-nodes exact; nearest: 8"),
    ],
)  # fmt: skip
def test_other_sizes_are_refused_with_the_nearest(
    ep: int, experts: int, tp: int, shards: tuple[int, int, int], words: str
) -> None:
    assert words in expert_problem(ep, experts, tp, shards, 8, (4,))


def test_a_size_between_two_factors_is_refused_and_so_are_pipelines_inside() -> None:
    problem = expert_problem(2, 8, 1, (3, 3, 6), 6, (6,))
    assert "its 2 data-parallel ranks neither divide P = 3 nor are a multiple of it; nearest: 1" in problem
    problem = expert_problem(4, 8, 2, (1, 1, 4), 4, (4,), dp_outermost=True)
    assert "puts pipelines between data-parallel neighbours; nearest: 2" in problem
    with refused("node", "2 of 6"):
        make_grid(6, 2, ep=3)
