"""Deals matrices to ranks by the cost of their update, and plans the messages of it. Pure arithmetic: no torch.

It lies in mesh, not in zero/matrix_updates.py, which imports torch: the planner reads costs and cuts, too.

An optimizer that steps whole matrices finds them cut over ranks. Each matrix gets one owner: the pieces go there, and
the pieces of its update come back the same way (zero/by_matrix.py).

Glossary
--------
place
    A rank's indices on the axes that cut the matrices, in the order in which messages take them.
piece
    A run of a matrix that one rank holds: flat elements [low, high) of that rank's own tensor.
round
    Matrices that move together, in one exchange per axis and direction. While one round is computed, others move.
route
    What one rank does in a round. A hop is one exchange over an axis: every piece goes to the rank that has its
    owner's index there, so after the last hop it is at its owner. The way back takes the hops in reverse.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

Place = tuple[int, ...]
Span = tuple[int, int]  # start and length in a buffer, in elements
# Of an owner's share of a round. A round of several matrices of 512 x 512 has one message where each alone would wait
# for the link's latency; one matrix of 2048 x 2048 or more is a round by itself, so others move meanwhile.
ROUND_NUMEL = 1 << 22


@dataclass(frozen=True)
class Cut:
    """A matrix that is cut over the ranks of the axes.

    rows, columns: of what is orthogonalised. held: the run [low, high) that the ranks of a place on the data-parallel
    axes hold of their own tensors; who holds nothing is left out. shared: the tensor-parallel ranks hold parts of it;
    otherwise each of them has such a matrix of its own.
    """

    rows: int
    columns: int
    held: Mapping[Place, Span]
    shared: bool = False

    @property
    def cost(self) -> int:
        """Return the multiply-adds of one Newton-Schulz iteration: X X', the square of it, and their sum times X."""
        short, long = sorted((self.rows, self.columns))
        return short * short * (2 * long + short)


@dataclass(frozen=True)
class MatrixPiece:
    """A run of a matrix, given by its number, on its way from ``source`` to ``owner``."""

    matrix: int
    source: Place
    owner: Place
    low: int
    high: int

    @property
    def numel(self) -> int:
        return self.high - self.low


@dataclass(frozen=True)
class RouteHop:
    """An exchange over one axis. sent, received: elements to and from each index on it.

    spans: where, in the buffer received, the parts of the next hop's message lie, in its order.
    """

    axis: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Route:
    """What one rank does in a round. own: its pieces in the order in which they are sent; arrived: those it gets."""

    own: tuple[MatrixPiece, ...]
    hops: tuple[RouteHop, ...]
    arrived: tuple[MatrixPiece, ...]


def deal(
    costs: Sequence[float],
    choices: Sequence[Sequence[tuple[int, ...]]],
    nearness: Callable[[int, tuple[int, ...]], tuple[int, ...]],
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Give each item to the ranks with the least to do, the costliest item first.

    choices: for each item who may take it; the ranks of one tuple do it alike, each for itself. nearness: of an item
    and a choice; of choices with as little to do the one with the most is taken. Returns the items in the order in
    which they were dealt, and who has each. (Longest processing time first: the busiest rank has at most 4/3 of the
    least possible, Graham 1969.)
    """
    load: defaultdict[int, float] = defaultdict(float)
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    owners: list[tuple[int, ...]] = [()] * len(costs)
    for item in order:
        loads = [max(load[rank] for rank in choice) for choice in choices[item]]
        least = min(loads)
        free = (choice for choice, at in zip(choices[item], loads, strict=True) if at == least)
        owners[item] = max(free, key=partial(nearness, item))  # of equals the first
        for rank in owners[item]:
            load[rank] += costs[item]
    return order, owners


class Dealing:
    """The matrices of one pipeline stage, dealt to the ranks that share the optimizer states.

    sizes: of the data-parallel axes that cut the states. crosses: which of them cross nodes. tp: how many
    tensor-parallel ranks hold parts of one matrix; their axis is the last of a place if there are several. limit: the
    elements of a round for one owner.
    """

    def __init__(
        self, matrices: Sequence[Cut], sizes: Sequence[int], crosses: Sequence[bool], tp: int, limit: int
    ) -> None:
        self.matrices, self.tp = matrices, tp
        self.sizes = (*sizes, tp) if tp > 1 else tuple(sizes)
        self.crosses = (*crosses, False) if tp > 1 else tuple(crosses)
        self.places: list[Place] = list(product(*map(range, self.sizes)))
        near = [self._near(matrix) for matrix in matrices]
        nodes = [self._node(place) for place in self.places]

        def nearness(item: int, choice: tuple[int, ...]) -> tuple[int, int]:
            by_node, by_place = near[item]
            return by_node[nodes[choice[0]]], by_place[self.places[choice[0]][: len(sizes)]]

        self.order, self.owners = deal([m.cost for m in matrices], self._choices(), nearness)
        self.rounds = self._rounds(limit)

    def _choices(self) -> list[list[tuple[int, ...]]]:
        """Return who may take each matrix, by numbers of places: one rank, or one of each tensor-parallel index."""
        single: list[tuple[int, ...]] = [(number,) for number in range(len(self.places))]
        alike = [tuple(range(at, at + self.tp)) for at in range(0, len(self.places), self.tp)]
        return [single if matrix.shared or self.tp == 1 else alike for matrix in self.matrices]

    def _node(self, place: Place) -> Place:
        """Return what places of one node have in common."""
        return tuple(index for index, far in zip(place, self.crosses, strict=False) if far)

    def _near(self, matrix: Cut) -> tuple[Counter[Place], Counter[Place]]:
        """Return how many elements of a matrix are held on each node, and at each place of the data-parallel axes."""
        by_place = Counter({place: high - low for place, (low, high) in matrix.held.items()})
        by_node: Counter[Place] = Counter()
        for place, numel in by_place.items():
            by_node[self._node(place)] += numel
        return by_node, by_place

    def _rounds(self, limit: int) -> list[list[int]]:
        """Return the matrices of each round. A rank takes its own as they were dealt, ``limit`` elements each."""
        filled: defaultdict[tuple[int, ...], tuple[int, int]] = defaultdict(lambda: (0, 0))
        rounds: list[list[int]] = []
        for item in self.order:
            number, taken = filled[self.owners[item]]
            if taken >= limit:
                number, taken = number + 1, 0
            filled[self.owners[item]] = number, taken + self.matrices[item].rows * self.matrices[item].columns
            rounds += [[]] if number == len(rounds) else []
            rounds[number].append(item)
        return rounds

    def pieces(self, items: Iterable[int]) -> list[MatrixPiece]:
        """Return all ranks' pieces of these matrices."""
        out = []
        for item in items:
            owners = [self.places[number] for number in self.owners[item]]
            for place, (low, high) in self.matrices[item].held.items():
                sources = [(*place, t) for t in range(self.tp)] if self.tp > 1 else [place]
                for t, source in enumerate(sources):
                    out.append(MatrixPiece(item, source, owners[t if len(owners) > 1 else 0], low, high))
        return out

    def routes(self, place: Place) -> list[Route]:
        """Return what the rank at ``place`` does in each round."""
        return [route(self.pieces(items), place, self.sizes) for items in self.rounds]


def route(pieces: Sequence[MatrixPiece], place: Place, sizes: Sequence[int]) -> Route:
    """Return what the rank at ``place`` sends and receives. ``pieces`` are those of all ranks, in one order."""
    held = [i for i, piece in enumerate(pieces) if piece.source == place]
    own, hops = held, list[RouteHop]()
    for axis, size in enumerate(sizes):
        message = sorted(held, key=lambda i: (pieces[i].owner[axis], i))
        if hops:
            hops[-1] = RouteHop(
                hops[-1].axis, hops[-1].sent, hops[-1].received, _spans(pieces, held, message)
            )
        else:
            own = message
        here, rest = place[: axis + 1], place[axis + 1 :]
        held = [
            i for i, p in enumerate(pieces) if p.owner[: axis + 1] == here and p.source[axis + 1 :] == rest
        ]
        held.sort(key=lambda i: (pieces[i].source[axis], i))
        sent, received = [0] * size, [0] * size
        for i in message:
            sent[pieces[i].owner[axis]] += pieces[i].numel
        for i in held:
            received[pieces[i].source[axis]] += pieces[i].numel
        hops.append(RouteHop(axis, tuple(sent), tuple(received)))
    return Route(tuple(pieces[i] for i in own), tuple(hops), tuple(pieces[i] for i in held))


def _spans(pieces: Sequence[MatrixPiece], held: Sequence[int], message: Sequence[int]) -> tuple[Span, ...]:
    """Return where the pieces of ``message`` lie in a buffer that has them in the order of ``held``."""
    at, start = 0, dict[int, int]()
    for i in held:
        start[i], at = at, at + pieces[i].numel
    spans: list[Span] = []
    for i in message:
        if spans and sum(spans[-1]) == start[i]:
            spans[-1] = (spans[-1][0], spans[-1][1] + pieces[i].numel)
        else:
            spans.append((start[i], pieces[i].numel))
    return tuple(spans)
