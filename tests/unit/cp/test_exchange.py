"""Which heads and tokens a context-parallel rank has, without ranks."""

from __future__ import annotations

import pytest
import torch

from megazero.comm.hops import Traffic
from megazero.cp import ContextParallel, swap, swap_back
from megazero.cp.exchange import _dealt
from megazero.mesh.grid import INTER, INTRA, make_grid
from megazero.models.dropout import sharded_key
from megazero.tp import TensorParallel

RANKS = [ContextParallel(None, rank, 4, near=2) for rank in range(4)]


@pytest.mark.parametrize(
    ("heads", "dealt"), [(8, [[0, 1], [2, 3], [4, 5], [6, 7]]), (2, [[0], [0], [1], [1]])]
)
def test_heads_go_to_the_ranks_whose_queries_need_them(heads: int, dealt: list[list[int]]) -> None:
    x = torch.arange(heads, dtype=torch.float64).view(1, 1, heads, 1).requires_grad_()
    rows = _dealt(x, 4)
    assert rows[:, 0, 0, :, 0].tolist() == dealt
    rows.sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == [max(1, 4 // heads)] * heads


def test_a_sequence_is_cut_in_the_order_of_the_ranks() -> None:
    assert [list(range(12))[rank.own(12)] for rank in RANKS] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert ContextParallel().own(5) == slice(0, 5)


def test_one_rank_swaps_nothing() -> None:
    q, k, v = (torch.ones(3, 1, 2, 4) for _ in range(3))
    assert all(one is other for one, other in zip(swap(q, k, v, ContextParallel()), (q, k, v), strict=True))
    assert swap_back(q, ContextParallel()) is q


def test_dropout_has_a_key_for_each_part_and_the_old_one_without() -> None:
    tp = TensorParallel(None, 1, 2)
    keys = [sharded_key((7, 0, 1), tp, cp, sharded=True) for cp in RANKS]
    assert len(set(keys)) == 4
    assert sharded_key((7, 0, 1), tp, ContextParallel(), sharded=True) == (7, 0, 1, 1)


def test_bytes_count_where_they_go() -> None:
    """Of 4 ranks on nodes of 2, one lies on the same node and two on the other."""
    traffic = Traffic()
    ContextParallel(None, 0, 4, near=2, traffic=traffic).count(10)
    assert traffic.bytes == {("cp", INTRA): 10, ("cp", INTER): 20}


def test_neighbours_share_samples_inside_a_node_first() -> None:
    grid = make_grid(16, 4, tp=2, cp=2)
    assert [grid.cp_axis.ranks(rank) for rank in (0, 1, 4)] == [(0, 2), (1, 3), (4, 6)]
    assert (grid.cp_axis.link, grid.cp_near, grid.batch_ranks) == (INTRA, 2, 4)
    wide = make_grid(16, 4, tp=2, cp=4)
    assert (wide.cp_axis.ranks(0), wide.cp_axis.link, wide.cp_near) == ((0, 2, 4, 6), INTER, 2)
    with pytest.raises(
        ValueError, match="--context-parallel-size 3 over 8 data-parallel ranks, which it does"
    ):
        make_grid(16, 4, tp=2, cp=3)
