"""Matrices dealt to ranks: who has what to do, and that every message arrives where it is expected."""

from __future__ import annotations

import random
from itertools import product

import pytest

from megazero.mesh.dealing import Cut, Dealing, Place, Route

GRIDS = [  # sizes of the data-parallel axes, which of them cross nodes, tensor-parallel ranks
    ((), (), 1),
    ((), (), 2),
    ((4,), (False,), 1),
    ((2,), (True,), 2),
    ((2, 2), (False, True), 1),
    ((2, 3), (False, True), 2),
    ((2, 1, 3), (False, False, True), 2),
]


def some_matrices(sizes: tuple[int, ...], tp: int, count: int = 11) -> list[Cut]:
    """Matrices of a few shapes, cut at any element. A rank may hold nothing of one."""
    generator, places = random.Random(len(sizes) + tp), list(product(*map(range, sizes)))
    found = []
    for index in range(count):
        rows, columns = generator.choice([(8, 8), (16, 8), (8, 24)])
        shared = tp > 1 and index % 3 > 0
        numel = rows * columns // (tp if shared else 1)
        ends = [0, *sorted(generator.choices(range(numel + 1), k=len(places) - 1)), numel]
        held = {place: (ends[i], ends[i + 1]) for i, place in enumerate(places) if ends[i] < ends[i + 1]}
        found.append(Cut(rows, columns, held, shared))
    return found


def moved(routes: dict[Place, Route], sizes: tuple[int, ...]) -> dict[Place, list]:
    """What each rank has after the hops of one round, element by element, if every message holds what its sender has.

    An element is (matrix, source, number)."""
    data = {
        place: [(p.matrix, p.source, n) for p in route.own for n in range(p.low, p.high)]
        for place, route in routes.items()
    }
    for axis, size in enumerate(sizes):
        received: dict[Place, list] = {}
        for place, route in routes.items():
            received[place] = []
            for index in range(size):
                sender = (*place[:axis], index, *place[axis + 1 :])
                sent = routes[sender].hops[axis].sent
                start = sum(sent[: place[axis]])
                part = data[sender][start : start + sent[place[axis]]]
                assert len(part) == route.hops[axis].received[index]
                received[place] += part
        data = received
        if axis + 1 < len(sizes):
            data = {
                place: [x for start, n in routes[place].hops[axis].spans for x in values[start : start + n]]
                for place, values in received.items()
            }
    return data


@pytest.mark.parametrize("sizes,crosses,tp", GRIDS, ids=str)
def test_every_piece_arrives_at_its_owner(sizes, crosses, tp):
    matrices = some_matrices(sizes, tp)
    dealing = Dealing(matrices, sizes, crosses, tp, limit=100)
    routes = {place: dealing.routes(place) for place in dealing.places}
    got = dict.fromkeys(range(len(matrices)), 0)
    for number in range(len(dealing.rounds)):
        found = moved({place: every[number] for place, every in routes.items()}, dealing.sizes)
        for place, values in found.items():
            arrived = routes[place][number].arrived
            assert values == [(p.matrix, p.source, n) for p in arrived for n in range(p.low, p.high)]
            assert all(piece.owner == place for piece in arrived)
            for piece in arrived:
                got[piece.matrix] += piece.numel
    for item, matrix in enumerate(matrices):
        alike = 1 if matrix.shared else tp  # tensor-parallel ranks with one of their own each
        assert got[item] == matrix.rows * matrix.columns * alike


@pytest.mark.parametrize("sizes,crosses,tp", GRIDS, ids=str)
def test_the_busiest_rank_has_little_more_than_its_share(sizes, crosses, tp):
    matrices = some_matrices(sizes, tp, count=40)
    dealing = Dealing(matrices, sizes, crosses, tp, limit=1)
    costs = [0.0] * len(dealing.places)  # what each rank has to do
    for matrix, owners in zip(dealing.matrices, dealing.owners, strict=True):
        for number in owners:
            costs[number] += matrix.cost
    least = max(sum(costs) / len(costs), max(m.cost for m in matrices))
    assert max(costs) <= 4 / 3 * least


def test_rounds_give_every_rank_so_many_elements_at_a_time():
    matrices = [Cut(8, 8, {(0,): (0, 32), (1,): (32, 64)})] * 12
    rounds = Dealing(matrices, (2,), (False,), 1, limit=100).rounds
    assert [len(items) for items in rounds] == [4, 4, 4]  # two of 64 elements for each of two ranks
    assert sorted(item for items in rounds for item in items) == list(range(12))


def test_of_equal_ranks_the_one_whose_node_has_most_of_it_is_the_owner():
    """What has crossed to a node once need not cross again: two nodes of two ranks, the second axis crosses."""
    held = {(0, 1): (0, 40), (1, 1): (40, 60), (1, 0): (60, 64)}
    dealing = Dealing([Cut(8, 8, held)], (2, 2), (False, True), 1, limit=1)
    assert [dealing.places[number] for number in dealing.owners[0]] == [(0, 1)]
    assert sum(route.hops[1].sent[0] for route in dealing.routes((0, 1))) == 0
