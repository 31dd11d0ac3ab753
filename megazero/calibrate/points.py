"""The points that a calibration measures, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megazero.config.nearest import common_divisors

SMALLEST = 4096  # bytes of a message; below, latency is all there is
STEP, STRIDE = 4, 64  # from one size to the next, and where few are measured


class CollectivePoint(NamedTuple):
    """A collective over ``ranks`` that lie on ``nodes`` nodes, as the planner asks for it."""

    operation: str
    ranks: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.operation} {self.ranks}x{self.nodes}"


class Modules(NamedTuple):
    """A model's modules for one micro-batch on ``tp`` ranks."""

    tp: int
    micro_batch: int

    def __str__(self) -> str:
        return f"modules tp {self.tp} micro-batch {self.micro_batch}"


def wires(nodes: int, per_node: int, widest: bool = False) -> Iterator[CollectivePoint]:
    """Yield the collectives that a step can have: over axes inside a node, and over one rank of each node.

    widest: those of whole nodes, and of all nodes, alone.
    """
    few = -1 if widest else 0
    inside = [size for size in common_divisors(per_node) if size > 1][few:]
    across = [size for size in common_divisors(nodes) if size > 1][few:]
    for operation in ("gather", "exchange"):
        yield from (CollectivePoint(operation, size, 1) for size in inside)
        yield from (CollectivePoint(operation, size, size) for size in across)
    yield from (CollectivePoint("sum", size, 1) for size in inside)
    yield from (
        CollectivePoint("message", 2, where)
        for where, there in ((1, per_node % 2 == 0), (2, nodes > 1))
        if there
    )


def modules(per_node: int, micro_batches: Sequence[int]) -> Iterator[Modules]:
    """Yield the sizes at which the modules are measured."""
    for tp in common_divisors(per_node):
        yield from (Modules(tp, size) for size in micro_batches)


def sizes(largest: int, step: int = STEP) -> list[int]:
    """Return the bytes of the messages of a series."""
    out = [SMALLEST]
    while out[-1] * step <= largest:
        out.append(out[-1] * step)
    return out
