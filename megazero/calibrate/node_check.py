"""The health check of ranks that do not train, for ``megazero check-nodes``: a run's, and the links between nodes.

Links are measured with calibrate's code. A node is slow if both its neighbours in the list of nodes are reached
slowly: it is as fast as the faster of its two pairs, because next to a slow node a fast one is in a slow pair, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from megazero.calibrate.collectives import measure_wire
from megazero.calibrate.points import CollectivePoint
from megazero.calibrate.timing import Clock
from megazero.config.options.sections import TrainingConfig
from megazero.log.exit_status import ExitStatus
from megazero.mesh.launch import Launch
from megazero.mesh.mesh import discover_ranks_per_node
from megazero.ops.health import Fault, Storage, Unhealthy, check_health
from megazero.train.distributed import start_rank

SLOW = 4.0  # times slower than the median node: that is not chance
LEAST = 3  # nodes, without which none can be called slow
ROUNDS = 3  # of a measurement, of which the best counts
# Bytes of a message: some milliseconds on their links.
CPU_BYTES, CUDA_BYTES = 2**20, 2**26

Rates = Mapping[tuple[int, int], float]  # a pair of ranks -> bytes per second


def check_nodes(
    training: TrainingConfig, launch: Launch, save: Path | None, checkpoint_bytes: int, keep_last: int | None
) -> tuple[str, ...]:
    """Join the other ranks, if there are any, and check. Returns the notes. Raises Unhealthy.

    save: the folder that all nodes share, or None. It needs room for ``keep_last`` checkpoints of
    ``checkpoint_bytes`` bytes.
    """
    device, _ = start_rank(training, launch, timedelta(minutes=training.distributed_init_timeout_minutes))
    storage = Storage(save, checkpoint_bytes, keep_last) if save is not None else None
    nodes, notes = check_health(launch.host, device, storage)
    if not dist.is_initialized():
        return notes
    return (*notes, check_links(nodes, discover_ranks_per_node(launch), device))


def check_links(nodes: Sequence[str], per_node: int, device: torch.device) -> str:
    """Measure gathers inside nodes and across them, and pairs of nodes. Returns the rates in words. Collective.

    nodes: the node of each rank. Raises Unhealthy if a node's links are slow.
    """
    clock, size = Clock(device, ROUNDS), CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    firsts = [nodes.index(name) for name in dict.fromkeys(nodes)]
    said = []
    for where, ranks, apart in (("inside nodes", per_node, 1), ("across nodes", len(firsts), len(firsts))):
        if ranks > 1:
            wire = CollectivePoint("gather", ranks, apart)
            (row,) = measure_wire(wire, [size], per_node, torch.float32, clock)
            said.append(f"gathers {where} {_rate(row['bytes'] / row['seconds'])}")
    pairs = pair_rates(firsts, clock, size)
    if slow_nodes(pairs, nodes):  # a busy machine is slow for a moment
        again = pair_rates(firsts, clock, size)
        pairs = {pair: max(rate, again[pair]) for pair, rate in pairs.items()}
    if slow := slow_nodes(pairs, nodes):
        raise Unhealthy([Fault(node, text, ExitStatus.RANK_LOST) for node, text in slow.items()])
    if pairs:
        usual, least = median(pairs.values()), min(pairs.values())
        said.append(f"pairs of nodes {_rate(usual)} (least {_rate(least)})")
    return f"links: {', '.join(said)}"


def pair_rates(ranks: Sequence[int], clock: Clock, size: int) -> Rates:
    """Measure messages there and back between neighbours, one pair at a time. The ends are neighbours. Collective."""
    message, own = torch.zeros(size, dtype=torch.uint8, device=clock.device), dist.get_rank()

    def there_and_back(low: int, high: int) -> None:
        for source, target in ((low, high), (high, low)):
            if own == source:
                dist.send(message, target)
            elif own == target:
                dist.recv(message, source)

    ring = [*pairwise(ranks), *([(ranks[0], ranks[-1])] if len(ranks) > 2 else [])]
    return {
        pair: 2 * size / min(clock(partial(there_and_back, *pair), slowest=True).seconds) for pair in ring
    }


def slow_nodes(pairs: Rates, nodes: Sequence[str]) -> dict[str, str]:
    """Return the nodes that are ``SLOW`` times slower than the median, each with what was measured."""
    best: dict[str, float] = {}
    for pair, rate in pairs.items():
        for rank in pair:
            best[nodes[rank]] = max(rate, best.get(nodes[rank], 0.0))
    if len(best) < LEAST:
        return {}
    usual = median(best.values())
    return {
        node: f"its links to its neighbours: {_rate(rate)}, where the median of {len(best)} is {_rate(usual)}"
        for node, rate in best.items()
        if rate * SLOW <= usual
    }


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
