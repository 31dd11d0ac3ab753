"""The speed of the groups of a mesh and of pairs of nodes: a slow one is found by comparing it with its kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from megazero.comm.hops import Traffic, start_gather
from megazero.mesh.mesh import Axis, Mesh
from megazero.mesh.waiting import waiting

NODES = "nodes"  # the kind of pairs of neighbouring nodes
SLOW = 4.0  # times slower than the median of its kind: that is not chance
ROUNDS = 3  # of a measurement, of which the best counts
AGAIN, PAUSE = 2, 0.5  # further measurements if a link seems slow, and the seconds before each
LEAST = 3  # groups of a kind, without which none can be called slow
# Bytes of a message of all ranks together: some milliseconds on their links.
CPU_BYTES, CUDA_BYTES = 2**20, 2**26

Ranks = tuple[int, ...]
Rates = dict[str, dict[Ranks, float]]  # kind -> ranks of a group -> bytes per second that reach each


@dataclass(frozen=True)
class Slow:
    """A group, or a node, that is slow. node: the one at fault, or None if that is not known."""

    node: str | None
    text: str


def measure(mesh: Mesh, nodes: Sequence[str], gather: Callable[[Rates], list[Rates]]) -> Rates:
    """Measure every group of the mesh, and pairs of nodes. Returns the same on every rank. Collective.

    nodes: the name of each rank's node. A group that seems slow is measured again: a busy machine is slow for a
    moment.
    """
    firsts = [nodes.index(name) for name in dict.fromkeys(nodes)]
    group = dist.new_group(firsts) if len(firsts) > 1 else None
    best: Rates = {}
    for attempt in range(1 + AGAIN):
        time.sleep(PAUSE if attempt else 0)
        # A group is as fast as the slowest of its ranks.
        _merge(best, _merge({}, *gather(_own_rates(mesh, firsts, group)), keep=min), keep=max)
        if not slow_links(best, nodes):
            break
    if group is not None and mesh.rank in firsts:
        dist.destroy_process_group(group)
    return best


def _merge(into: Rates, *several: Rates, keep: Callable[[float, float], float]) -> Rates:
    for rates in several:
        for kind, groups in rates.items():
            mine = into.setdefault(kind, {})
            for ranks, rate in groups.items():
                mine[ranks] = keep(mine.get(ranks, rate), rate)
    return into


def _own_rates(mesh: Mesh, firsts: Sequence[int], group: dist.ProcessGroup | None) -> Rates:
    """Measure this rank's groups: one gather in each, and messages there and back between neighbours."""
    rates: Rates = {}
    for axis in (*mesh.axes.values(), *([mesh.ends] if mesh.ends else [])):
        if axis.size == 1:
            continue
        if axis.spec.role == "pp":
            rates[axis.name] = _between(mesh, axis.ranks, axis.gather_group)
        else:
            rates[axis.name] = {axis.ranks: gather_rate(mesh.device, axis)}
    if mesh.rank in firsts and len(firsts) > 1:
        rates[NODES] = _between(mesh, firsts, group)
    return rates


@waiting
def gather_rate(device: torch.device, axis: Axis) -> float:
    """Return the bytes per second that this rank sends in a run's gather over an axis. Collective."""
    part = torch.zeros(_message(device) // axis.size, dtype=torch.uint8, device=device)
    whole, traffic = part.new_empty(part.numel() * axis.size), Traffic()
    seconds = _best_seconds(device, lambda: start_gather(axis, whole, part, "gather", traffic).wait())
    return part.numel() * (axis.size - 1) / seconds


@waiting
def _between(mesh: Mesh, line: Sequence[int], group: dist.ProcessGroup | None) -> dict[Ranks, float]:
    """Measure the pairs of neighbours on a line of ranks, no rank in two at a time. The ends are neighbours, too."""
    message = torch.zeros(_message(mesh.device), dtype=torch.uint8, device=mesh.device)
    rates: dict[Ranks, float] = {}

    def there_and_back(low: int, high: int) -> None:
        for source, target in ((low, high), (high, low)):
            if mesh.rank == source:
                dist.send(message, target, group=group)
            elif mesh.rank == target:
                dist.recv(message, source, group=group)

    for low, high in _in_turns(line):
        if mesh.rank in (low, high):
            seconds = _best_seconds(mesh.device, partial(there_and_back, low, high))
            rates[low, high] = 2 * message.numel() / seconds
    return rates


def _in_turns(line: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of neighbours: every other one first, so that they do not wait for each other in a row."""
    pairs = list(pairwise(line))
    yield from (*pairs[::2], *pairs[1::2])
    if len(line) > 2:
        yield line[0], line[-1]


def _best_seconds(device: torch.device, action: Callable[[], object]) -> float:
    """Return the least seconds of ``ROUNDS`` times, after one that connects."""
    seconds = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _message(device: torch.device) -> int:
    return CUDA_BYTES if device.type == "cuda" else CPU_BYTES


def slow_links(rates: Rates, nodes: Sequence[str]) -> list[Slow]:
    """Return the groups and nodes that are ``SLOW`` times slower than the median of their kind.

    A node is as fast as the faster of its two pairs: next to a slow node, a fast one is in a slow pair, too.
    """
    found = []
    for kind, groups in rates.items():
        each = _by_node(groups) if kind == NODES else groups
        usual = median(each.values())
        for ranks, rate in each.items():
            if len(each) < LEAST or rate * SLOW > usual:
                continue
            names = list(dict.fromkeys(nodes[rank] for rank in ranks))
            who = "its links to its neighbours" if kind == NODES else f"ranks {_short(ranks)} ({kind})"
            text = f"{who}: {_rate(rate)}, where the median of {len(each)} is {_rate(usual)}"
            found.append(Slow(names[0] if len(names) == 1 else None, text))
    return found


def _by_node(pairs: Mapping[Ranks, float]) -> dict[Ranks, float]:
    best: dict[Ranks, float] = {}
    for ranks, rate in pairs.items():
        for rank in ranks:
            best[rank,] = max(rate, best.get((rank,), 0.0))
    return best


def in_words(rates: Rates) -> str:
    """Return the rates in words: the median of each kind, and the least where there are several."""
    parts = []
    for kind, groups in rates.items():
        ranks, least = min(groups.items(), key=lambda each: each[1])
        few = f" (least {_rate(least)}, ranks {_short(ranks)})" if len(groups) > 1 else ""
        parts.append(f"{kind} {_rate(median(groups.values()))}{few}")
    return ", ".join(parts)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _short(ranks: Ranks) -> str:
    return ",".join(map(str, ranks if len(ranks) <= 4 else (*ranks[:2], "...", ranks[-1])))
