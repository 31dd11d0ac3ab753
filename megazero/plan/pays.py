"""Whether quantised messages pay on a cluster (--pays): schemes side by side, with what rounding costs in tokens.

Each scheme has its fastest layout. A scheme's worth is how fast it comes to the loss of the best exact one: its speed
over the tokens that it needs. rounding.py has what others published of that; where nobody did, nothing is claimed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megazero.config.layout.shards import PRESETS
from megazero.config.model.spec import parameter_count
from megazero.config.options.cluster import Cluster
from megazero.plan.base_layout import BaseLayout, moved
from megazero.plan.layout import Layout
from megazero.plan.memory import GIB
from megazero.plan.report import describe, layout_flags, tokens_per_second
from megazero.plan.rounding import tokens_needed
from megazero.plan.search import LOSS_POLICIES, PARALLEL, STAGES, ZERO, Found, Search, smallest_layout
from megazero.plan.search import OUTER as SLOW_OUTER
from megazero.plan.simulate import Timing
from megazero.plan.slow_links import POOLED, on_ladder, replica_counts, rung_options, rungs, without_outer

# Presets as others know them: one rank holds whole layers, and every message is exact.
KNOWN = {"DDP": "ddp", "ZeRO-1": "zero1", "FSDP2": "zero3", "HSDP, once a step": "hsdp"}
EXACT, QUANTISED, OUTER = "best exact", "best quantised", "outer steps"
POLICY = "zeropp"  # of --loss-policy: the formats that are tried
SAME = 0.005  # of the time: rows that differ by less are one
WORTH = 1.02  # times as fast to the same loss: what pays; less is within the planner's error
NOT_WHOLE = (*PARALLEL, *STAGES, *ZERO)
LEGEND = (
    "GB/node: what a node sends to others in a step. link: the share of a step in which its link is busy.",
    "even at: the rate of a node's link at which this takes as long as computing.",
    "tokens: how many times the tokens of exact messages bring the same loss; ?: nobody published it.",
    "worth: how many times as fast as the best exact layout it comes to the same loss.",
)


@dataclass(frozen=True)
class Scheme:
    """A scheme with its fastest layout. needed: tokens, over those of exact messages; None: not published."""

    name: str
    found: Found
    needed: float | None

    @property
    def layout(self) -> Layout:
        return self.found.layout

    @property
    def timing(self) -> Timing:
        return self.found.timing

    @property
    def seconds(self) -> float:
        return self.timing.seconds

    @property
    def computing(self) -> float:
        """The seconds of a step without what moves across nodes or waits for it."""
        return sum(self.timing.bill[item] for item in ("compute", "recompute", "tensor"))

    def rate(self, seconds: float) -> float:
        """Return the Gb/s of a node at which the messages across nodes take so many seconds."""
        link = self.layout.base.cluster.inter_node
        return self.layout.bytes_across_nodes * 8e-9 / seconds / link.efficiency

    @property
    def link_share(self) -> float:
        """The share of a step in which a node's link is busy."""
        return min(1.0, self.rate(self.seconds) / self.layout.base.cluster.inter_node.gbits_per_s)

    def worth(self, exact: Scheme) -> float | None:
        """Return how many times as fast as ``exact`` this comes to the same loss; None: not known."""
        return None if self.needed is None else exact.seconds / self.seconds / self.needed


@dataclass(frozen=True)
class Schemes:
    """The schemes at one rate. missing: by name, what those need that do not fit, in GiB."""

    cluster: Cluster
    rows: Sequence[Scheme]
    missing: Mapping[str, float]

    @property
    def link(self) -> str:
        """The rate of the slow link, in words."""
        whose = "node" if self.cluster.inter_site is None else "site"
        return f"{self.cluster.slow_link.gbits_per_s:g} Gb/s a {whose}"

    def row(self, name: str) -> Scheme | None:
        return next((row for row in self.rows if row.name == name), None)


def compare(values: Mapping[str, Any], places: Sequence[Cluster]) -> Iterator[Schemes]:
    """Yield every scheme's fastest layout on each of these clusters, which differ in the slow link alone.

    There are no rows if nothing fits. Options of outer steps are those of that scheme alone.
    """
    bases: list[BaseLayout] = []
    plain = without_outer(values)
    for place in places:
        bases = list(moved(bases, place) if bases else Search(plain, place, "exact").drafts())
        rows, missing = _known(plain, place)
        rows += [Scheme(EXACT, one, 1.0) for one in Search(plain, place, "exact").best(1, bases)]
        if place.nodes > 1:
            rows += _quantised(plain, place, bases)
            outer = _outer(values, place)
            rows += [Scheme(OUTER, one, None) for one in outer]
            missing |= {} if outer else _least_outer(values, place)
        yield Schemes(place, rows, missing)


def _known(values: Mapping[str, Any], cluster: Cluster) -> tuple[list[Scheme], dict[str, float]]:
    """Return the known presets that fit, and the GiB that the others need."""
    rows: list[Scheme] = []
    missing: dict[str, float] = {}
    free = {name: value for name, value in values.items() if name not in NOT_WHOLE}
    whole = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    for name, preset in KNOWN.items():
        asked = {**free, **whole, "zero_preset": preset}
        if best := Search(asked, cluster, "exact").best(1):
            rows.append(Scheme(name, best[0], 1.0))
        elif (smallest := smallest_layout(asked, cluster)) is not None:
            missing[name] = smallest.memory.total / GIB
    return rows, missing


def _quantised(values: Mapping[str, Any], cluster: Cluster, bases: Sequence[BaseLayout]) -> list[Scheme]:
    """Return the scheme whose messages are quantised and that comes to a loss first.

    All formats are in one search, by seconds times tokens: those that are slow at best are not looked at further.
    """
    if not bases:
        return []
    search, parameters = Search(values, cluster, POLICY), parameter_count(bases[0].config.model)
    search.policy = tuple(choice for choice in LOSS_POLICIES[POLICY] if choice.values)
    search.weight = lambda layout: tokens_needed(layout.wire, parameters) or 1.0
    return [
        Scheme(QUANTISED, one, tokens_needed(one.layout.wire, parameters)) for one in search.best(1, bases)
    ]


def _outer(values: Mapping[str, Any], cluster: Cluster) -> list[Found]:
    """Return the fastest layout with outer steps, on the first rung whose meetings are cheap."""
    steps = rungs(values)
    for count in replica_counts(values, cluster):
        asked = {**values, **rung_options(steps[-1]), "outer_replicas": count}
        if pool := Search(asked, cluster, SLOW_OUTER).best(POOLED):
            return on_ladder(pool, cluster, steps)[:1]
    return []


def _least_outer(values: Mapping[str, Any], cluster: Cluster) -> dict[str, float]:
    """Return the GiB that outer steps need at least, with as few replicas as there can be, if they are legal."""
    count = replica_counts(values, cluster)[-1]
    asked = {**values, **rung_options(rungs(values)[0]), "outer_replicas": count}
    smallest = smallest_layout(asked, cluster)
    return {} if smallest is None else {OUTER: smallest.memory.total / GIB}


def joined(rows: Sequence[Scheme]) -> list[Scheme]:
    """Return the rows without those of known presets that take as long: of these the one with the least memory."""
    kept: list[Scheme] = []
    for row in rows:
        alike = [
            other
            for other in kept
            if row.name in KNOWN
            and other.needed == row.needed
            and abs(other.seconds / row.seconds - 1) < SAME
        ]
        if not alike:
            kept.append(row)
            continue
        least = min((alike[0], row), key=lambda each: each.layout.memory.total)
        kept[kept.index(alike[0])] = replace(least, name=f"{alike[0].name} = {row.name}")
    return kept


def lines(found: Schemes, price: float | None) -> Iterator[str]:
    """Yield the table and the sentence. price: dollars of a GPU for an hour."""
    exact = found.row(EXACT)
    assert exact is not None
    yield f"{found.link}:"
    head = f"{'scheme':32} {'step s':>8} {'GiB':>6} {'GB/node':>8} {'link':>5} {'even at Gb/s':>13}"
    yield f"{head} {'tokens':>7} {'worth':>6}" + ("  $ a day more" if price else "")
    for row in joined(found.rows):
        worth = row.worth(exact)
        cells = [
            f"{row.name:32} {row.seconds:8.3f} {row.layout.memory.total / GIB:6.1f}",
            f"{row.layout.bytes_across_nodes / 1e9:8.1f} {row.link_share:5.0%} {row.rate(row.computing):13.1f}",
            f"{'?' if row.needed is None else f'{row.needed:.2f}':>7} {'?' if worth is None else f'{worth:.2f}':>6}",
        ]
        if price and worth is not None:
            cells.append(f"{_day(found.cluster, price) * (worth - 1):+13,.0f}")
        yield " ".join(cells)
    for name, least in found.missing.items():
        yield f"{name:32} does not fit: {least:.1f} GiB at least"
    yield f"{EXACT}: {describe(exact.layout)}"
    for name in (QUANTISED, OUTER):
        if (other := found.row(name)) is not None:
            yield f"{name}: {describe(other.layout)}; {other.found.formats}"
    if price:
        yield f"All GPUs cost {_day(found.cluster, price):,.0f} $ a day; a worth of 1.10 is a tenth of it."
    yield sentence(found)
    use = to_use(found)
    yield f"flags of {use.name}: {shlex.join(layout_flags(use.layout.config))}"


def _day(cluster: Cluster, price: float) -> float:
    return price * 24 * cluster.world_size


def to_use(found: Schemes) -> Scheme:
    """Return the quantised scheme if it pays, else a known preset if it is hardly slower than the best exact one."""
    exact, quantised = found.row(EXACT), found.row(QUANTISED)
    assert exact is not None
    if quantised is not None and (quantised.worth(exact) or 0.0) > WORTH:
        return quantised
    named = [row for row in found.rows if row.name in KNOWN and row.seconds <= WORTH * exact.seconds]
    return min(named, key=lambda row: row.layout.memory.total, default=exact)


def _in_words(use: Scheme) -> str:
    """Return the flag of a preset if the layout is one, else its words."""
    if use.name in KNOWN:
        return f"--zero-preset {KNOWN[use.name]}"
    layout, grid, d, h = use.layout, use.layout.base, use.layout.base.d, use.layout.base.h
    sizes = {"1": 1, "h": h, "d": d}
    one_rank = grid.tp == grid.pp == 1
    preset = PRESETS["zeropp"]
    if (
        use.name == QUANTISED
        and one_rank
        and layout.shards.factors == tuple(sizes[each] for each in (preset.p, preset.g, preset.os))
    ):
        return "--zero-preset zeropp"
    return f"the {use.name} layout"


def sentence(found: Schemes) -> str:
    """Return whether it pays, in a sentence."""
    exact, quantised, use = found.row(EXACT), found.row(QUANTISED), _in_words(to_use(found))
    assert exact is not None
    if quantised is None:
        return f"Nothing crosses nodes: use {use}."
    saved = 1 - quantised.seconds / exact.seconds
    begin = f"At {found.link} quantised hops save {max(saved, 0.0):.0%} of a step"
    if quantised.needed is None:
        return f"{begin}; nobody published what they cost at size: compare losses before you use them."
    worth = quantised.worth(exact) or 0.0
    verdict = f"{worth - 1:.0%} faster to the same loss" if worth > WORTH else "they do not pay"
    return f"{begin} and cost {quantised.needed - 1:.0%} of tokens: {verdict}; use {use}."


def as_dict(found: Schemes) -> dict[str, Any]:
    """Return the table as plain JSON values."""
    exact = found.row(EXACT)
    assert exact is not None
    return {
        "gbits_per_s": found.cluster.slow_link.gbits_per_s,
        "schemes": [
            {
                "name": row.name,
                "seconds": row.seconds,
                "tokens_per_second": tokens_per_second(row.layout, row.seconds),
                "memory_total": row.layout.memory.total,
                "bytes_across_nodes": row.layout.bytes_across_nodes,
                "link_share": row.link_share,
                "even_gbits_per_s": row.rate(row.computing),
                "tokens_needed": row.needed,
                "worth": row.worth(exact),
            }
            for row in found.rows
        ],
        "missing": dict(found.missing),
        "verdict": sentence(found),
    }
