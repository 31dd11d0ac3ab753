"""A hop's communicator and its bytes. No ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.comm import hops
from megazero.comm.hops import Traffic

AXIS: Any = SimpleNamespace(
    spec=SimpleNamespace(role="os"),
    size=4,
    index=1,
    link="inter_node",
    gather_group="gathers",
    reduce_group="reductions",
)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, object]]:
    """The communicators that were used, each with how many elements each rank was sent."""
    out: list[tuple[object, object]] = []
    monkeypatch.setattr(hops, "all_gather_flat", lambda *_, group, async_op: out.append((group, None)))
    monkeypatch.setattr(
        dist, "all_to_all_single", lambda _, sent, there, here, group, async_op: out.append((group, there))
    )
    return out


@pytest.mark.parametrize(
    "kind, group", [("gather", "gathers"), ("refresh", "gathers"), ("reduce", "reductions")]
)
def test_a_gathers_communicator_is_its_lanes(
    used: list[tuple[object, object]], kind: str, group: str
) -> None:
    """Two lanes on one communicator would issue in an order that the ranks' timing decides."""
    traffic = Traffic()
    own = torch.zeros(10, dtype=torch.bfloat16)
    hops.start_gather(AXIS, torch.zeros(40, dtype=torch.bfloat16), own, kind, traffic)
    assert used == [(group, None)] and dict(traffic.bytes) == {(kind, "inter_node"): 3 * 10 * 2}
    assert traffic.messages == {(kind, "inter_node"): 1}


@pytest.mark.parametrize("in_place", [True, False])
def test_two_cpu_ranks_swap_their_messages(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    def swap(
        out: torch.Tensor, sent: torch.Tensor, there: list, here: list, group: str, async_op: bool
    ) -> None:
        assert group == "gathers" and there == here == [5, 0] and sent.tolist() == [1.0] * 5
        out.copy_(sent + 1)

    monkeypatch.setattr(dist, "all_to_all_single", swap)
    axis: Any = SimpleNamespace(**{**vars(AXIS), "size": 2})
    out, traffic = torch.zeros(10), Traffic()
    own = out[5:].fill_(1.0) if in_place else torch.ones(5)
    hops.start_gather(axis, out, own, "gather", traffic)
    assert out.tolist() == [2.0] * 5 + [1.0] * 5 and dict(traffic.bytes) == {("gather", "inter_node"): 20}


@pytest.mark.parametrize("rows, there", [(4, [5, 5, 5, 5]), (3, [5, 0, 5, 5])])
def test_an_exchange_counts_what_goes_to_others(
    used: list[tuple[object, object]], rows: int, there: list[int]
) -> None:
    traffic, messages = Traffic(), torch.zeros(rows, 5)
    hops.start_exchange(AXIS, torch.empty_like(messages), messages, traffic)
    assert used == [("reductions", there)] and traffic.take()["reduce_inter_node_bytes"] == 3 * 5 * 4
    assert traffic.take() == {"intra_node_bytes": 0, "inter_node_bytes": 0}, "a step's own"


def test_what_crosses_the_outer_axis_counts_apart(used: list[tuple[object, object]]) -> None:
    """There and back of a reduction, on its communicator."""
    axis: Any = SimpleNamespace(**{**vars(AXIS), "spec": SimpleNamespace(role="outer")})
    traffic, messages = Traffic(), torch.zeros(4, 5)
    hops.start_exchange(axis, torch.empty_like(messages), messages, traffic)
    hops.start_gather(axis, torch.zeros(20), torch.zeros(5), "reduce", traffic)
    assert used == [("reductions", [5, 5, 5, 5]), ("reductions", None)]
    assert dict(traffic.bytes) == {("outer", "inter_node"): 2 * 3 * 5 * 4}
