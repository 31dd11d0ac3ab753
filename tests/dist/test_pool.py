"""The pool itself: ranks answer, errors arrive, a dead rank does not hang the caller."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import RankError, run_ranks


def _sum():
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x.item()


def _fail(rank):
    if dist.get_rank() == rank:
        raise ValueError("on purpose")
    dist.barrier()


def _die(rank):
    if dist.get_rank() == rank:
        os._exit(3)


def test_error_of_one_rank_reaches_the_caller():
    with pytest.raises(RankError, match="on purpose"):
        run_ranks(2, _fail, 1, timeout=20)
    assert run_ranks(2, _sum) == [3.0, 3.0]


def test_death_of_one_rank_reaches_the_caller():
    with pytest.raises(RankError, match="rank 1: RankDied"):
        run_ranks(2, _die, 1, timeout=20)
    assert run_ranks(2, _sum) == [3.0, 3.0]
