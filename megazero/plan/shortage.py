"""What to change if no layout fits: more nodes, or a given choice that costs too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megazero.config.layout.shards import AUTO
from megazero.config.options.cluster import Cluster
from megazero.config.options.fields import show
from megazero.config.run import all_options
from megazero.plan.layout import Layout
from megazero.plan.memory import GIB
from megazero.plan.report import describe
from megazero.plan.search import CHOICES, Search, ShardChoice

MOST_NODES = 64  # times those that there are


def advice(values: Mapping[str, Any], cluster: Cluster, search: Search) -> list[str]:
    """Return lines that explain why nothing fits and what would. ``search`` has been run."""
    smallest = smallest_layout(values, cluster)
    if smallest is None:
        lines = ["no layout is legal; the rules that most of them break:"]
        common = sorted(search.errors.items(), key=lambda item: -item[1])[:5]
        return [*lines, *(f"  - {line}" for line, _ in common)]
    over = smallest.memory.total - smallest.room
    found = [*_released(values, cluster), *_more_nodes(values, cluster)]
    return [
        f"no layout fits in the {smallest.room / GIB:.1f} GiB that a rank has for tensors. The one that needs the "
        f"least ({describe(smallest)}) needs {smallest.memory.total / GIB:.1f}, {over / GIB:.1f} too much.",
        "What would do:",
        *(
            f"  - {line}"
            for line in found or ["nothing of more nodes or other choices: the model is too large"]
        ),
    ]


def smallest_layout(values: Mapping[str, Any], cluster: Cluster) -> Layout | None:
    """Return the layout with the least memory, of those with small micro-batches and the largest shard factors."""
    most: dict[str, Any] = {
        "recompute_granularity": "full",
        "loss_chunk_tokens": AUTO,
        "micro_batch_size": 1,
        "use_tp_pp_dp_mapping": False,
    }
    search = Search({**most, **values}, cluster, "exact")
    best: Layout | None = None
    for base in search.bases():
        shard = (base.d, base.d, base.d)
        for layout, _ in search.layouts(ShardChoice(base, None if search.shards_given else shard)):
            if best is None or layout.memory.total < best.memory.total:
                best = layout
    return best


def _released(values: Mapping[str, Any], cluster: Cluster) -> Iterator[str]:
    """Yield the given choices without which some layout fits."""
    for name in (name for name in CHOICES if values.get(name) is not None):
        rest = {other: value for other, value in values.items() if other != name}
        layout = smallest_layout(rest, cluster)
        if layout is not None and layout.fits:
            chosen = layout.config.get(name)
            said = f"{all_options()[name].flag} {show(values[name])}"
            yield f"without {said}: {describe(layout)}" + (
                f" ({show(chosen)} instead)" if chosen is not None else ""
            )


def _more_nodes(values: Mapping[str, Any], cluster: Cluster) -> Iterator[str]:
    """Yield the least number of nodes, of twice, thrice, ... as many, on which some layout fits."""
    times = 2
    while times <= MOST_NODES:
        layout = smallest_layout(values, cluster.with_nodes(cluster.nodes * times))
        if layout is not None and layout.fits:
            yield f"{cluster.nodes * (times - 1)} more nodes, {cluster.nodes * times} in all: {describe(layout)}"
            return
        times += 1 if times < 4 else times // 2
