"""Rows go to experts of several nodes and back as to those of one rank: ranks are threads."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.rank_threads import MeshOf, run_threads
from megazero.comm.codec import Blockwise
from megazero.comm.hops import Traffic
from megazero.config import World, make_config
from megazero.config.model.spec import model_spec
from megazero.mesh.grid import make_grid
from megazero.mesh.levels import INTER, INTRA
from megazero.moe import ExpertParallel, TwoLevels, dispatch_to
from megazero.plan.communication import Activation, ExpertRows, expert_rows
from tests.sizes import TINY
from tests.unit.moe.test_moe import drawn

RANKS, H, E = 4, 16, 8
ROW, VALUE = 8 * H, 8  # bytes, in fp64
MODEL = {**TINY, "num_layers": 1, "hidden_size": H, "num_experts": E, "moe_router_pre_softmax": True}
Found = dict[str, Any]


class Case(NamedTuple):
    """node: ranks of one. k: experts of a token, of the first ``used``. tokens: of each rank. ep: ranks that share
    the experts."""

    node: int
    k: int
    tokens: tuple[int, ...] = (5, 7, 4, 6)
    used: int = E
    ep: int = 4


def chosen(rank: int, tokens: int, k: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens + 1)])[:tokens]


def computed(mesh_of: MeshOf, case: Case, codec: Blockwise | None) -> Found:
    """Return what a rank computes of its tokens with experts that multiply by a matrix each, and what it sent."""
    mesh = mesh_of(shards=(1, 1, 1), ranks_per_node=case.node, ep=case.ep)
    traffic = Traffic()
    whole = ExpertParallel.of(mesh, traffic, codec=codec)
    own, count = whole.own(E), case.tokens[mesh.rank]
    matrices = drawn(E, H, H)[own.start : own.stop].requires_grad_()
    x = drawn(count, H, seed=10 + mesh.rank).requires_grad_()
    shares = drawn(count, case.k, seed=20 + mesh.rank).requires_grad_()
    experts, counts = chosen(mesh.rank, count, case.k, case.used), None
    sent = []
    for _ in range(2):  # the second as a recompute
        dispatch = dispatch_to(experts, E, whole, counts)
        counts = dispatch.counts
        rows, values = dispatch.spread(x, shares)
        assert dispatch.ends[-1] == len(rows) == len(values)
        starts = [0, *dispatch.ends.tolist()]
        groups = [rows[a:b] @ matrices[i] for i, (a, b) in enumerate(zip(starts, starts[1:], strict=False))]
        out = dispatch.collect(torch.cat(groups) * values[:, None])
        sent.append(dict(traffic.bytes))
        traffic.bytes.clear()
    gradients = torch.autograd.grad(out, (x, shares, matrices), drawn(count, H, seed=30 + mesh.rank))
    sent.append(dict(traffic.bytes))
    return {"out": out.detach(), "gradients": gradients, "sent": sent, "kind": type(dispatch)}


def rounded(x: Tensor, codec: Blockwise | None) -> Tensor:
    if codec is None or not len(x):
        return x
    out = torch.empty_like(x)
    codec.decode(codec.encode(x), out)
    return out


def expected(case: Case, codec: Blockwise | None) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Return the outputs, and the gradients of tokens, probabilities and matrices. What goes to another node is
    rounded: tokens, and gradients of outputs. Nothing else is."""
    matrices, to_matrices = drawn(E, H, H), torch.zeros(E, H, H, dtype=torch.float64)
    outs, to_x, to_shares = list[Tensor](), list[Tensor](), list[Tensor]()
    for rank, n in enumerate(case.tokens):
        experts, shares = chosen(rank, n, case.k, case.used), drawn(n, case.k, seed=20 + rank)[..., None]
        holders = experts // (E // case.ep) + rank // case.ep * case.ep
        away = (holders // case.node != rank // case.node)[..., None]
        x, grad = drawn(n, H, seed=10 + rank), drawn(n, H, seed=30 + rank)
        x, grad = (torch.where(away, rounded(each, codec)[:, None], each[:, None]) for each in (x, grad))
        own = matrices[experts]
        each = torch.einsum("tkh,tkhi->tki", x, own)
        outs.append((each * shares).sum(1))
        to_shares.append((each * grad).sum(2))
        to_x.append((torch.einsum("tki,tkhi->tkh", grad, own) * shares).sum(1))
        products = torch.einsum("tkh,tki->tkhi", x * shares, grad)
        to_matrices.index_add_(0, experts.flatten(), products.flatten(0, 1))
    return outs, to_x, to_shares, to_matrices


CASES = {
    "two nodes of two": Case(2, 3),
    "one rank of a node": Case(1, 3),
    "two of four nodes": Case(1, 3, ep=2),
    "no rows for a node": Case(2, 2, used=3),
    "no tokens of some ranks": Case(2, 2, (5, 0, 4, 0)),
    "all experts": Case(2, E, (3, 2, 1, 4)),
    "one expert": Case(2, 1, (3, 2, 1, 4)),
}


@pytest.mark.parametrize("codec", [None, Blockwise(8, H)], ids=["exact", "int8"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_of_several_nodes_are_computed_as_on_one_rank(case: Case, codec: Blockwise | None) -> None:
    found = run_threads(RANKS, computed, case, codec)
    outs, to_x, to_shares, to_matrices = expected(case, codec)
    own, share = torch.zeros_like(to_matrices), E // case.ep
    for rank, each in enumerate(found):
        assert each["kind"] is TwoLevels
        wanted = (outs[rank], to_x[rank], to_shares[rank])
        for got, want in zip((each["out"], *each["gradients"]), wanted, strict=False):
            assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
        own[rank % case.ep * share :][:share] += each["gradients"][2]
    assert torch.allclose(own, to_matrices, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bytes_are_those_of_rows_that_leave(case: Case, bits: int | None) -> None:
    """A forward, one that repeats it, and a backward; numbers of rows and of experts are told once.
    The planner counts the same."""
    codec = bits and Blockwise(bits, H)
    found = run_threads(RANKS, computed, case, codec)
    coded = codec.message_numel(H) if codec else ROW
    shared = {"expert_model_parallel_size": case.ep, "moe_dispatch_across_nodes": "int8" if bits else "exact"}
    config = make_config({**MODEL, **shared, "moe_router_topk": case.k}, World(RANKS, case.node))
    (layer,) = model_spec(config.model).layers
    grid, activation = make_grid(RANKS, case.node, ep=case.ep), Activation(1, 1, H, VALUE)
    for rank, each in enumerate(found):
        rows = leaving(case, rank)
        values, told = case.k * VALUE, (case.ep // rows.places - 1) * 4 + rows.away * case.k * 4
        across = [
            rows.away * (coded + values) + rows.came * ROW,
            rows.away * coded + rows.came * (ROW + values),
        ]
        assert [step.get(("ep", INTER), 0) for step in each["sent"]] == [across[0] + told, *across]
        inside = [
            rows.sent * (ROW + VALUE) + rows.received * ROW,
            rows.sent * ROW + rows.received * (ROW + VALUE),
        ]
        told = (rows.places - 1) * (E // case.ep) * 4
        assert [step.get(("ep", INTRA), 0) for step in each["sent"]] == [inside[0] + told, *inside]
        moved = ExpertRows(rows.sent, rows.received, rows.away, rows.came)
        planned = expert_rows(config, layer, grid, activation, moved)
        sent = [{link: step.get(("ep", link), 0) for link in (INTRA, INTER)} for step in each["sent"]]
        assert list(planned) == sent[::2]


class Leaving(NamedTuple):
    """places: ranks of a node that share the experts. away, came: tokens that a rank sends to other nodes, and that
    come from them. sent, received: rows that it sends to other ranks of its node, and that come from them."""

    places: int
    away: int
    came: int
    sent: int
    received: int


def leaving(case: Case, rank: int) -> Leaving:
    first, places = rank // case.ep * case.ep, min(case.node, case.ep)
    group = range(first, first + case.ep)
    holders = {r: chosen(r, case.tokens[r], case.k, case.used) // (E // case.ep) + first for r in group}
    mates = [r for r in group if r % places == rank % places]  # of the same place at other nodes
    near = [r for r in group if r // places == rank // places and r != rank]

    def crossing(source: int, node: int) -> int:
        return int((holders[source] // places == node).any(1).sum())

    def moved(at: int, to: int) -> int:
        return sum(int((holders[r] == to).sum()) for r in group if r % places == at % places)

    return Leaving(
        places,
        sum(crossing(rank, r // places) for r in mates if r != rank),
        sum(crossing(r, rank // places) for r in mates if r != rank),
        sum(moved(rank, r) for r in near),
        sum(moved(r, rank) for r in near),
    )
