"""Hops: their communicators, bytes and sums. One process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.comm import hops
from megazero.comm.codec import Blockwise, Codec, Identity
from megazero.comm.hops import Channel, Leg, Traffic
from megazero.comm.rows import RowRun, Rows
from megazero.kernels.arena import Arena, Frame

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


# -- verbs, on ranks of one process ----------------------------------------------------------------

SIZE = 4
EXACT, CODED = Identity(torch.float32), Blockwise(8, 8)


def on_ranks(monkeypatch: pytest.MonkeyPatch, hop: Callable[[Any], Any], hops_of_each: int = 1) -> None:
    """Run a verb on every rank of an axis; ``hop(axis)`` begins it. Messages are delivered between its steps."""
    sent: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(hops, "start_exchange", lambda axis, out, own, _: sent.append((axis, out, own)))
    monkeypatch.setattr(hops, "start_gather", lambda axis, out, own, *_: sent.append((axis, out, own)))
    chains = [hop(SimpleNamespace(**{**vars(AXIS), "index": i})) for i in range(SIZE)]
    for _ in range(hops_of_each):
        for chain in chains:
            next(chain)
        deliver(sent)
        sent.clear()
    for chain in chains:
        assert next(chain, "ended") == "ended"


def deliver(sent: list[tuple[Any, torch.Tensor, torch.Tensor]]) -> None:
    """Give every rank what the others sent it: all of a gather's message, or its row of an exchange."""
    before = [own.clone() for _, _, own in sent]
    for axis, out, _ in sent:
        i = axis.index
        if out.dim() == 1:
            out.copy_(torch.cat(before))
            continue
        sources = [j for j in range(SIZE) if j != i or len(out) == SIZE]
        places = [i if len(out) == SIZE or i < j else i - 1 for j in sources]
        out.copy_(torch.stack([before[j][place] for j, place in zip(sources, places, strict=True)]))


class Seen:
    """A watch that keeps what it saw, by this rank and row."""

    def __init__(self) -> None:
        self.rows: dict[int, torch.Tensor] = {}

    def __call__(self, codec: Codec, run: RowRun, messages: torch.Tensor, frame: Frame) -> None:
        assert len(messages) == len(run.rows[0]) == run.to.stop - run.to.start
        for place, row in zip(range(run.at.start, run.at.stop), run.rows[0], strict=True):
            self.rows[place] = row.clone()


def channel() -> Channel:
    return Channel(Traffic(), Arena(), torch.device("cpu"))


def values(seed: int, *shape: int) -> list[torch.Tensor]:
    """Of every rank."""
    return list(torch.randn(SIZE, *shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("codec", [EXACT, CODED])
def test_a_reduction_sums_every_ranks_row(
    codec: Codec, whole: bool, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, on, seen = values(0, SIZE, 16), channel(), [Seen() for _ in range(SIZE)]
    rows = [x.clone() for x in given]
    apart = [torch.ones(16) for _ in range(SIZE)]

    def hop(axis: Any) -> Any:
        out = None if in_place else (apart[axis.index],)
        mine = Rows([rows[axis.index]], axis.index)
        return hops.reduce(
            Leg(axis, codec), mine, out, on, accumulate=not in_place, whole=whole, watches=[seen[axis.index]]
        )

    on_ranks(monkeypatch, hop)
    for i in range(SIZE):
        wanted = sum(x[i] for x in given) + (0 if in_place else 1)
        found = rows[i][i] if in_place else apart[i]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 if codec is EXACT else 0.1)
        assert set(seen[i].rows) == (
            set() if codec is EXACT else {*range(SIZE)} - ({i} if not whole else set())
        )
        assert all(torch.equal(row, given[i][place]) for place, row in seen[i].rows.items())
    assert not on.arena.used


def test_fused_hops_sum_over_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the second axis has the first one's ranks: a row of a row."""
    given, on, out = values(1, SIZE, SIZE * 8), channel(), [torch.ones(8) for _ in range(SIZE)]
    seen = [Seen() for _ in range(SIZE)]

    def hop(axis: Any) -> Any:
        legs, rows = [Leg(axis, CODED)] * 2, Rows([given[axis.index]], axis.index)
        return hops.reduce_through(
            legs, rows, (out[axis.index],), on, accumulate=True, watches=[seen[axis.index]]
        )

    on_ranks(monkeypatch, hop, 2)
    sums = [sum(x[i] for x in given).view(SIZE, 8) for i in range(SIZE)]
    for i in range(SIZE):
        torch.testing.assert_close(out[i], sum(x[i] for x in sums) + 1, rtol=0, atol=0.3)
        torch.testing.assert_close(
            torch.stack([*seen[i].rows.values()]), sums[i], rtol=0, atol=0.1
        )  # of the second axis
    assert not on.arena.used


@pytest.mark.parametrize("codec", [EXACT, CODED])
def test_all_have_the_same_bits_of_what_is_given_back(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, on = values(2, 1, 16), channel()
    backs, sums = [torch.zeros(SIZE, 16) for _ in range(SIZE)], [torch.zeros(16) for _ in range(SIZE)]
    on_ranks(
        monkeypatch,
        lambda axis: hops.give_back(Leg(axis, codec), (shares[axis.index],), (backs[axis.index],), on),
    )
    on_ranks(
        monkeypatch,
        lambda axis: hops.sum_all(Leg(axis, codec), (shares[axis.index],), (sums[axis.index],), on),
    )
    for back, total in zip(backs, sums, strict=True):
        assert torch.equal(back, backs[0]) and torch.equal(total, sums[0])
    atol = 0.0 if codec is EXACT else 0.02
    torch.testing.assert_close(backs[0], torch.cat(shares), rtol=0, atol=atol)
    torch.testing.assert_close(sums[0], torch.cat(shares).sum(0), rtol=0, atol=atol * SIZE + 1e-6)
