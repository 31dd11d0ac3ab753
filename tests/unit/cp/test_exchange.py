"""Which heads and tokens a context-parallel rank has, without ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from megazero.comm import peers as peers_module
from megazero.comm.codec import Blockwise
from megazero.comm.hops import Traffic
from megazero.comm.peers import Peers, Pending
from megazero.comm.timing import Waits
from megazero.cp import ContextParallel, gather, summed, swap
from megazero.cp.exchange import _dealt
from megazero.mesh.grid import make_grid, own_spans
from megazero.mesh.levels import INTER, INTRA
from megazero.models.dropout import sharded_key
from megazero.tp import TensorParallel
from tests.messages import refused

RANKS = [ContextParallel(Peers(None, rank, 4, others={INTRA: 1, INTER: 2})) for rank in range(4)]


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
    whole = torch.arange(12)
    assert [rank.own(whole).tolist() for rank in RANKS] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert torch.equal(ContextParallel().own(whole), whole)


def test_groups_have_two_chunks_each_and_their_ranks_a_part_of_these() -> None:
    """Of 2 groups of 3 ranks and 24 tokens: the first has 0 .. 5 and 18 .. 23."""
    groups = [[0, 1, 2, 3, 4, 5, 18, 19, 20, 21, 22, 23], list(range(6, 18))]
    for group, tokens in enumerate(groups):
        for rank in range(3):
            cp = ContextParallel(Peers(None, rank, 3), (Peers(), Peers(None, group, 2)))
            assert cp.own(torch.arange(24)).tolist() == tokens[4 * rank : 4 * rank + 4]
            assert cp.own_queries(torch.arange(24)).tolist() == tokens
            assert (cp.rank, cp.size) == (3 * group + rank, 6)
    spans = [own_spans(48, rank, 1, 4) for rank in range(4)]  # as much causal work for each
    assert len({sum(at + 1 for span in each for at in span) for each in spans}) == 1


def test_groups_are_counted_across_nodes_first() -> None:
    inside, across = Peers(None, 1, 2), Peers(None, 2, 3)
    assert ContextParallel(keys=(inside, across)).group == 5


@pytest.mark.parametrize("shape", [(2, 5, 2, 3, 8), (2, 16, 1, 2, 64)], ids=["padded", "whole blocks"])
def test_of_gathered_keys_others_are_rounded_and_own_are_not(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """Of three ranks, without ranks: a gather finds what each of them encodes."""
    generator = torch.Generator().manual_seed(1)
    held = [torch.randn(shape, generator=generator).index_fill_(-1, torch.tensor(3), 20.0) for _ in range(3)]
    codec, seen = Blockwise(8, hadamard=128), []
    sent: list[torch.Tensor] = []

    def found(_: Peers, messages: torch.Tensor) -> torch.Tensor:
        sent.append(messages)
        whole = [pad(each.flatten(1), (0, -each[0].numel() % 128)) for each in held]
        return torch.stack([codec.encode(each) for each in whole])

    monkeypatch.setattr(Peers, "_gathered", found)
    three = Peers(None, 1, 3)
    arrived = three.gather(held[1], codec, [lambda *a: seen.append(a)])
    assert torch.equal(arrived[1], held[1]) and torch.equal(sent[0], found(three, sent[0])[1])
    for got, wanted in zip(arrived[::2], held[::2], strict=True):
        error = (got - wanted).flatten(1)
        rows = pad(wanted.flatten(1), (0, -wanted[0].numel() % 128))
        bound = codec.error_bound(rows).repeat_interleave(128, 1)[:, : error.shape[1]]
        assert 0 < error.norm() < 0.02 * wanted.norm() and (error.abs() <= bound).all()
    ((told, own, decoded, peers),) = seen
    assert told is codec and peers is three
    assert torch.equal(own[:, : held[1][0].numel()], held[1].flatten(1)) and torch.equal(decoded[1], own)


class Room:
    """Two ranks that are threads: what one of them sends the other finds."""

    def __init__(self) -> None:
        self.barrier, self.sent = threading.Barrier(2, timeout=60), dict[int, torch.Tensor]()

    def _met(self, rank: int, own: torch.Tensor) -> list[torch.Tensor]:
        self.sent[rank] = own.clone()
        self.barrier.wait()
        every = [self.sent[0], self.sent[1]]
        self.barrier.wait()
        return every

    def gather(self, out: torch.Tensor, own: torch.Tensor, *, group: int, async_op: bool) -> SimpleNamespace:
        out.copy_(torch.cat(self._met(group, own)))
        return SimpleNamespace(wait=lambda: None)

    def all_to_all(
        self, out: torch.Tensor, rows: torch.Tensor, *, group: int, async_op: bool
    ) -> SimpleNamespace:
        out.copy_(torch.stack([each[group] for each in self._met(group, rows)]))
        return SimpleNamespace(wait=lambda: None)


def test_heads_of_other_widths_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks swap four queries, and one value of another width, of which each gets a copy."""
    monkeypatch.setattr(peers_module.dist, "all_to_all_single", Room().all_to_all)
    held = [(torch.randn(3, 2, 4, 8), torch.randn(3, 2, 1, 5)) for _ in range(2)]
    queries, values = (torch.cat(each) for each in zip(*held, strict=True))
    peers = (Peers(rank, rank, 2, kind="cp") for rank in range(2))  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as threads:
        swapped = list(threads.map(lambda each: swap(held[each.rank], ContextParallel(each)), peers))
    for rank, (q, v) in enumerate(swapped):
        assert torch.equal(q, queries[:, :, 2 * rank : 2 * rank + 2]) and torch.equal(v, values)


@pytest.mark.parametrize("width", [64, 192])
def test_gradients_of_rounded_keys_are_those_of_exact_ones(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of one rank. The bytes are those of the messages there, and of exact gradients back.

    width: of values.
    """
    room, shapes = Room(), [(8, 1, 2, 64), (8, 1, 2, width)]
    monkeypatch.setattr(peers_module, "all_gather_flat", room.gather)
    monkeypatch.setattr(peers_module.dist, "all_to_all_single", room.all_to_all)

    def run(rank: int, codec: Blockwise | None) -> tuple[list[torch.Tensor], int]:
        traffic, generator = Traffic(), torch.Generator().manual_seed(rank)
        peers = Peers(rank, rank, 2, others={INTER: 1}, kind="cp", traffic=traffic)  # type: ignore[arg-type]
        cp = ContextParallel(keys=(Peers(), peers), codec=codec)
        k, v = (torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)
        gathered = gather((k, v), cp)
        sum((torch.randn(x.shape, generator=generator) * x).sum() for x in gathered).backward()
        assert k.grad is not None and v.grad is not None
        return [*gathered, k.grad, v.grad], traffic.bytes["cp", INTER]

    with ThreadPoolExecutor(2) as threads:
        exact, coded = (
            list(threads.map(run, (0, 1), (codec, codec))) for codec in (None, Blockwise(8, hadamard=128))
        )
    n = 8 * 2 * (64 + width)
    for (want, sent), (got, fewer) in zip(exact, coded, strict=True):
        assert all(map(torch.equal, got[2:], want[2:]))
        for one, other in zip(got[:2], want[:2], strict=True):
            assert 0 < (one - other).norm() < 0.01 * other.norm()
        assert (sent, fewer) == (2 * n * 4, n + 2 * n // 128 + n * 4)


def test_counts_are_added_up_over_all_ranks_that_share_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of groups of 2 ranks, 3 on each of 5 nodes, without ranks: a gather finds the same of each."""
    monkeypatch.setattr(Peers, "gather", lambda peers, own: own.expand(peers.size, *own.shape))
    cp = ContextParallel(Peers(None, 0, 2), (Peers(None, 0, 3), Peers(None, 0, 5)))
    assert summed(torch.tensor([1, 2]), cp).tolist() == [30, 60]


def test_gradients_of_gathered_keys_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 + 1 is 256 in bf16."""

    def swapped(peers: Peers, rows: torch.Tensor) -> Pending:
        return Pending(SimpleNamespace(wait=lambda: None), Waits(), "", rows, lambda: rows)

    monkeypatch.setattr(Peers, "start_swap", swapped)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert Peers(None, 0, 3).start_scatter(rows, ordered=True).wait().tolist() == [[258]]


def test_dropout_has_a_key_for_each_part_and_the_old_one_without() -> None:
    tp = TensorParallel(None, 1, 2)
    keys = [sharded_key((7, 0, 1), tp, cp, sharded=True) for cp in RANKS]
    assert len(set(keys)) == 4
    assert sharded_key((7, 0, 1), tp, ContextParallel(), sharded=True) == (7, 0, 1, 1)


def test_bytes_count_where_they_go() -> None:
    """Of 4 ranks on nodes of 2, one lies on the same node and two on the other."""
    traffic = Traffic()
    Peers(None, 0, 4, others={INTRA: 1, INTER: 2}, kind="cp", traffic=traffic).count(10)
    assert traffic.bytes == {("cp", INTRA): 10, ("cp", INTER): 20}


def test_neighbours_share_samples_inside_a_node_first() -> None:
    grid = make_grid(16, 4, tp=2, cp=2)
    assert [grid.cp_axes[0].ranks(rank) for rank in (0, 1, 4)] == [(0, 2), (1, 3), (4, 6)]
    assert (grid.cp_axes[0].link, grid.others(grid.cp_axes[0])) == (INTRA, {INTRA: 1, INTER: 0})
    assert grid.batch_ranks == 4
    assert [axis.size for axis in grid.cp_axes] == [2, 1, 1]
    wide = make_grid(16, 4, tp=2, cp=4)
    heads = wide.cp_axes[0]
    assert (heads.ranks(0), heads.link, wide.others(heads)) == ((0, 2, 4, 6), INTER, {INTRA: 1, INTER: 2})
    both = make_grid(16, 8, tp=2, cp=8, cp_keys=4)  # 2 groups on each of 2 nodes
    assert [axis.ranks(2) for axis in both.cp_axes] == [(0, 2), (2, 6), (2, 10)]
    assert [axis.link for axis in both.cp_axes] == [INTRA, INTRA, INTER]
    assert both.others(both.cp_axes[0]) == {INTRA: 1, INTER: 0}
    with refused("--context-parallel-size 3", "8"):
        make_grid(16, 4, tp=2, cp=3)
    with refused("sizes 4 2", "nearest: 2 4"):
        make_grid(16, 4, tp=2, cp=8, cp_keys=2)
