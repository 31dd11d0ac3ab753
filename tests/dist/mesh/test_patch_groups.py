"""The communicators of a patch: made by ranks of unlike groups, in one order where all must."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megazero.mesh.mesh import GroupSettings, all_gather_flat
from megazero.patches.agreement import agree_on
from megazero.patches.options import MessageOptions, read_words
from megazero.patches.two_hops import cut_groups
from tests.dist.pool import run_ranks


def cut(bound: bool) -> tuple[list[tuple[int, ...]], list[float]]:
    """Cut groups of which ranks have different ones; return the groups in the order in which this rank makes them
    and what a gather over its first axis brings.

    bound: as if the program had given a device to init_process_group.
    """
    rank, made, new_group = dist.get_rank(), [], dist.new_group
    world: Any = dist.distributed_c10d._get_default_group()
    if bound:
        world.bound_device_id = torch.device("cpu", 0)

    def note(ranks: list[int], **words: Any) -> Any:
        made.append(tuple(ranks))
        device, world.bound_device_id = world.bound_device_id, None  # torch takes no CPU here
        try:
            return new_group(ranks, **words)
        finally:
            world.bound_device_id = device

    pair, every = [rank // 2 * 2, rank // 2 * 2 + 1], list(range(4))
    try:
        with mock.patch.object(dist, "new_group", note):
            hops = cut_groups({"a": pair, "b": every}, 1, torch.device("cpu"), {})
        axis = hops[tuple(pair)].inter
        row = torch.empty(2)
        all_gather_flat(row, torch.tensor([float(rank)]), group=axis.gather_group)
    finally:
        world.bound_device_id = None
    return made, row.tolist()


def test_all_make_all_groups_in_one_order_under_a_bound_device() -> None:
    """Group creation is then collective over the default group: ranks that make their own alone would hang."""
    local, bound = run_ranks(4, cut, False), run_ranks(4, cut, True)
    assert len({tuple(made) for made, _ in local}) > 1  # only the members meet
    assert len({tuple(made) for made, _ in bound}) == 1
    assert set(bound[0][0]) == {(0, 1), (2, 3), (0, 1, 2, 3)}
    for found in (local, bound):
        assert [row for _, row in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def cut_again() -> tuple[list[int], list[bool]]:
    """Cut groups four times, the third time with other settings on rank 3; return how many groups the process has
    after each, and whether the axes are those of the first.
    """
    pair, every = [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1], list(range(4))
    counts, found = [], []
    for number in range(4):
        minutes = 6 if number == 2 and dist.get_rank() == 3 else 5
        settings = {"a": GroupSettings(timedelta(minutes=minutes))}
        found.append(cut_groups({"a": pair, "b": every}, 1, torch.device("cpu"), settings))
        counts.append(len(dist.distributed_c10d._world.pg_names))
    return counts, [hops is found[0] for hops in found]


def test_the_next_patch_takes_the_communicators_of_the_last() -> None:
    """If all ranks have them: where one lacks them, all make new ones."""
    for counts, same in run_ranks(4, cut_again):
        assert counts[0] == counts[1] < counts[2] == counts[3]
        assert same == [True, True, False, True]


def differing() -> str:
    options = read_words(MessageOptions, gradients="int8" if dist.get_rank() == 2 else "int4")
    try:
        agree_on(options)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_options_are_told() -> None:
    for said in run_ranks(3, differing):
        assert "zero_gradient_bits is 4 on rank 0 and 8 on rank 2: give all ranks the same" in said
