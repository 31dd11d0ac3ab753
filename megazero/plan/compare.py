"""Compares what may cross a slow link: known presets, the best exact and quantised layouts, and outer steps.

Each scheme has its fastest layout. With --pays, a scheme's worth is how fast it comes to the loss of the best exact
one: its speed over the tokens that it needs. rounding.py has what others published of that; where nobody did, nothing
is claimed. --loss-policy outer proposes the layouts of outer steps alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megazero.config import ConfigError
from megazero.config.layout.outer import EXACT_BITS, LOCAL, local_replicas
from megazero.config.model.spec import parameter_count
from megazero.config.options.cluster import Cluster
from megazero.config.options.fields import section_of
from megazero.config.options.sections import TOPK, OuterConfig
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.memory import GIB
from megazero.plan.options import with_stand_ins
from megazero.plan.report import describe, layout_flags, tokens_per_second
from megazero.plan.rounding import tokens_needed
from megazero.plan.search import (
    LEVELS,
    LOSS_POLICIES,
    OUTER_POLICY,
    PARALLEL,
    STAGES,
    ZERO,
    Found,
    Search,
    smallest_layout,
)
from megazero.plan.simulate import simulate

# Presets as others know them: one rank holds whole layers, and every message is exact.
KNOWN = {"DDP": "ddp", "ZeRO-1": "zero1", "FSDP2": "zero3", "HSDP, once a step": "hsdp"}
EXACT, QUANTISED, OUTER = "best exact", "best quantised", "outer steps"  # the least cost in loss first
POLICY = "zeropp"  # of --loss-policy: the formats that are tried
WORTH = 1.02  # times as fast to the same loss: what pays; less is within the planner's error
# --outer-bits and --outer-interval, the least harm first: exact differences and short intervals, then as published
# (DiLoCo: 500 steps; Streaming DiLoCo: 4 bits).
LADDER = ((32, 32), (32, 64), (32, 128), (4, 128), (4, 256), (4, 500))
MEETINGS = 0.05  # of the time: what meetings may take
POOLED = 3  # layouts with outer steps that are timed on every rung
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
    def seconds(self) -> float:
        return self.found.timing.seconds

    @property
    def computing(self) -> float:
        """The seconds of a step without what moves across nodes or waits for it."""
        return sum(self.found.timing.bill[item] for item in ("compute", "recompute", "tensor"))

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
    """The schemes on one cluster. missing: by name, what those need that do not fit, in GiB. delay_ms: of the slow
    link, beside its own."""

    cluster: Cluster
    rows: Sequence[Scheme]
    missing: Mapping[str, float]
    delay_ms: float = 0.0

    @property
    def link(self) -> str:
        """The slow link, in words."""
        delay = f" and {self.delay_ms:g} ms" if self.delay_ms else ""
        return f"{self.cluster.slow_link.gbits_per_s:g} Gb/s a {self.cluster.slow_part}{delay}"

    def row(self, name: str) -> Scheme | None:
        return next((row for row in self.rows if row.name == name), None)

    @property
    def exact(self) -> Scheme:
        """The best exact layout, if one fits."""
        row = self.row(EXACT)
        assert row is not None
        return row

    @property
    def to_use(self) -> Scheme:
        """The quantised scheme if it pays, else a known preset if it is hardly slower than the best exact layout."""
        quantised = self.row(QUANTISED)
        if quantised is not None and (quantised.worth(self.exact) or 0.0) > WORTH:
            return quantised
        named = [row for row in self.rows if row.name in KNOWN and row.seconds <= WORTH * self.exact.seconds]
        return min(named, key=lambda row: row.layout.memory.total, default=self.exact)


def compare(values: Mapping[str, Any], cluster: Cluster, delay_ms: float = 0.0) -> Schemes:
    """Return every scheme's fastest layout, known presets among them. There are no rows if nothing fits.

    Options of outer steps are of their scheme alone. delay_ms: what the cluster's slow link has more than its own.
    """
    rows: list[Scheme] = []
    missing: dict[str, float] = {}
    plain = without_outer(values)
    for name, preset in KNOWN.items():
        asked = with_preset(plain, preset)
        if best := Search(asked, cluster, "exact").best(1):
            rows.append(Scheme(name, best[0], 1.0))
        elif (smallest := smallest_layout(asked, cluster)) is not None:
            missing[name] = smallest.memory.total / GIB
    bases = list(Search(plain, cluster, "exact").drafts())
    rows += [Scheme(EXACT, one, 1.0) for one in Search(plain, cluster, "exact").best(1, bases)]
    if cluster.nodes > 1:
        rows += _quantised(plain, cluster, bases)
        outer = outer_layouts(values, cluster, POOLED)[:1]
        rows += [Scheme(OUTER, one, None) for one in outer]
        if not outer and (counts := replica_counts(values, cluster)):
            asked = with_outer(values, *rungs(values)[0], counts[-1])
            smallest = smallest_layout(asked, cluster.part(counts[-1]))
            missing |= {} if smallest is None else {OUTER: smallest.memory.total / GIB}
    return Schemes(cluster, rows, missing, delay_ms)


def with_preset(values: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """Return the options of a preset's layouts in which a rank holds whole layers."""
    free = {n: v for n, v in values.items() if n not in (*PARALLEL, *STAGES, *ZERO)}
    whole = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, LEVELS: ()}
    return {**free, **whole, "zero_preset": preset}


def _quantised(values: Mapping[str, Any], cluster: Cluster, bases: Sequence[BaseLayout]) -> list[Scheme]:
    """Return the scheme whose messages are quantised and that comes to a loss first: by seconds times tokens."""
    if not bases:
        return []
    search, parameters = Search(values, cluster, POLICY), parameter_count(bases[0].config.model)
    search.policy = tuple(choice for choice in LOSS_POLICIES[POLICY] if choice.values)
    search.weight = lambda layout: tokens_needed(layout.wire, parameters) or 1.0
    best = search.best(1, bases)
    return [Scheme(QUANTISED, one, tokens_needed(one.layout.wire, parameters)) for one in best]


# -- outer steps ----------------------------------------------------------------------------------


def without_outer(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the schemes whose every step crosses."""
    return {name: value for name, value in values.items() if not name.startswith("outer_")}


def with_outer(values: Mapping[str, Any], bits: int, interval: int, replicas: int) -> dict[str, Any]:
    """Return the options of one of so many replicas, which share the global batch."""
    own = {
        "global_batch_size": int(values["global_batch_size"]) // replicas,
        "outer_meet": f"{LOCAL}:{replicas}",
    }
    return with_stand_ins({**values, **own, "outer_bits": bits, "outer_interval": interval})


def replica_counts(values: Mapping[str, Any], cluster: Cluster) -> list[int]:
    """Return the numbers of replicas to try in turn: one for each rack or site; else for each node, then fewer.

    Raises ConfigError if there is nothing to divide.
    """
    batch = int(values["global_batch_size"])
    if given := local_replicas(section_of(OuterConfig, values)):
        return [given]
    if cluster.above:
        return [cluster.world_size // cluster.levels[-2].size]
    counts = [k for k in range(cluster.nodes, 1, -1) if cluster.nodes % k == 0 and batch % k == 0]
    if not counts:
        raise ConfigError(
            [
                f"--loss-policy {OUTER_POLICY}: replicas are groups of nodes that share the batch, and "
                f"{cluster.nodes} and {batch} have no common divisor"
            ]
        )
    return counts


def rungs(values: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the bits and intervals of LADDER with what is given instead of theirs; of topk bits say nothing."""
    bits, interval = values.get("outer_bits"), values.get("outer_interval")
    bits = EXACT_BITS if values.get("outer_format") == TOPK else bits
    return [*dict.fromkeys((bits or each, interval or steps) for each, steps in LADDER)]


def outer_layouts(values: Mapping[str, Any], cluster: Cluster, number: int) -> list[Found]:
    """Return the fastest layouts with outer steps, on the first rung on which the fastest meets cheaply.

    If it does on none, this is the last rung on which one fits.
    """
    ladder = rungs(values)
    for count in replica_counts(values, cluster):
        # On the last rung residuals of what was rounded take memory that the first has left.
        for bits, interval in dict.fromkeys((ladder[-1], ladder[0])):
            asked = with_outer(values, bits, interval, count)
            if pool := Search(asked, cluster.part(count), OUTER_POLICY).best(number):
                return _on_ladder(pool, ladder)
    return []


def _on_ladder(pool: Sequence[Found], ladder: Sequence[tuple[int, int]]) -> list[Found]:
    stepped: list[Found] = []
    for bits, interval in ladder:
        there = (_with_steps(one, bits, interval) for one in pool)
        if fitting := [one for one in there if one.layout.fits]:
            stepped = sorted(fitting, key=lambda one: one.key)
            if stepped[0].timing.bill["outer"] <= MEETINGS * stepped[0].timing.seconds:
                break
    return stepped


def _with_steps(found: Found, bits: int, interval: int) -> Found:
    """Return a layout with other outer steps."""
    base = found.layout.base
    outer = replace(base.config.outer, outer_bits=bits, outer_interval=interval)
    config = replace(base.config, outer=outer)
    base = BaseLayout(config, base.world, base.cluster, base.collectives, base.partition)
    layout = Layout(base, found.layout.given.zero)
    return Found(layout, simulate(layout), found.formats)


# -- words ----------------------------------------------------------------------------------------


def lines(found: Schemes) -> Iterator[str]:
    """Yield the table of --pays and its sentence."""
    yield f"{found.link}:"
    head = f"{'scheme':32} {'step s':>8} {'GiB':>6} {'GB/node':>8} {'link':>5} {'even at Gb/s':>13}"
    yield f"{head} {'tokens':>7} {'worth':>6}"
    for row in found.rows:
        worth = row.worth(found.exact)
        yield (
            f"{row.name:32} {row.seconds:8.3f} {row.layout.memory.total / GIB:6.1f} "
            f"{row.layout.bytes_across_nodes / 1e9:8.1f} {row.link_share:5.0%} {row.rate(row.computing):13.1f} "
            f"{'?' if row.needed is None else f'{row.needed:.2f}':>7} {'?' if worth is None else f'{worth:.2f}':>6}"
        )
    for name, least in found.missing.items():
        yield f"{name:32} does not fit: {least:.1f} GiB at least"
    yield f"{EXACT}: {describe(found.exact.layout)}"
    for name in (QUANTISED, OUTER):
        if (other := found.row(name)) is not None:
            yield f"{name}: {describe(other.layout)}; {other.found.formats}"
    yield sentence(found)
    yield f"flags of {found.to_use.name}: {shlex.join(layout_flags(found.to_use.layout.config))}"


def sentence(found: Schemes) -> str:
    """Return whether it pays, in a sentence."""
    exact, quantised, name = found.exact, found.row(QUANTISED), found.to_use.name
    use = f"--zero-preset {KNOWN[name]}" if name in KNOWN else f"the {name} layout"
    if quantised is None:
        return f"Nothing crosses nodes: use {use}."
    saved = max(0.0, 1 - quantised.seconds / exact.seconds)
    begin = f"At {found.link} quantised hops save {saved:.0%} of a step"
    if quantised.needed is None:
        return f"{begin}; nobody published what they cost at size: compare losses before you use them."
    worth = quantised.worth(exact) or 0.0
    verdict = f"{worth - 1:.0%} faster to the same loss" if worth > WORTH else "they do not pay"
    return f"{begin} and cost {quantised.needed - 1:.0%} of tokens: {verdict}; use {use}."


def as_dict(found: Schemes) -> dict[str, Any]:
    """Return the table of --pays as plain JSON values."""
    return {
        "gbits_per_s": found.cluster.slow_link.gbits_per_s,
        "delay_ms": found.delay_ms,
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
                "worth": row.worth(found.exact),
            }
            for row in found.rows
        ],
        "missing": dict(found.missing),
        "verdict": sentence(found),
    }
