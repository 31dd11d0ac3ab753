"""What to run over a slow link: every step exact, every step quantised, or outer steps (--loss-policy outer).

Schemes are compared at rates and delays of the slowest kind of link. What outer steps cost in loss grows from rung to
rung of LADDER, so the planner takes the first on which meetings hardly cost time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

from megazero.config import ConfigError
from megazero.config.options.cluster import Cluster
from megazero.plan.base_layout import BaseLayout, moved
from megazero.plan.layout import Layout
from megazero.plan.report import outer_words
from megazero.plan.search import BEST, OUTER, Found, Search
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import simulate

RATES = (400.0, 100.0, 25.0, 10.0, 1.0, 0.1)  # Gb/s


@dataclass(frozen=True)
class Steps:
    """Outer steps as --outer-bits, --outer-interval and --outer-delay give them."""

    bits: int
    interval: int
    delay: int = 0

    @property
    def has_room(self) -> bool:
        """Whether differences arrive before the next ones leave (config/layout/outer_rules.py)."""
        return self.delay < self.interval


# The least harm first: exact differences and short intervals, then as published. DiLoCo: 500 steps; Streaming DiLoCo:
# 4 bits, and differences that cross while the training goes on.
LADDER = (
    *(Steps(32, 32), Steps(32, 64), Steps(32, 128), Steps(4, 128)),
    *(Steps(4, 128, 1), Steps(4, 128, 5), Steps(4, 256, 5), Steps(4, 500, 5)),
)
MEETINGS = 0.05  # of the time: what meetings may take
WORTH = 1.1  # times as long as the fastest: what a scheme that costs less in loss may take and still win
POOLED = 3  # layouts of a scheme that are taken from each search, to be timed at all rates and delays
EXACT, QUANTISED = "exact", "quantised"  # schemes whose every step crosses
POLICIES = {EXACT: "exact", QUANTISED: "zeropp"}  # of --loss-policy, for layouts without outer steps
SCHEMES = (*POLICIES, OUTER)  # the least cost in loss first
LOSS = (
    "loss: docs/results/loss.md has quantised messages and outer steps at 1.3M parameters; a short run from scratch "
    "loses 2% by meeting every 8 steps and 5% every 32. Published, not measured here: 500 steps cost little from a "
    "warmed-up model (DiLoCo); 4 bits lose nothing (Streaming DiLoCo); 100 steps in INT8 trained 10B parameters "
    "(INTELLECT-1)"
)


class Compared(NamedTuple):
    """The fastest layout of each scheme, None if none fits, at one rate (Gb/s) and delay (ms)."""

    rate: float
    delay: float
    found: Mapping[str, Found | None]

    @property
    def wins(self) -> str:
        """The scheme to take."""
        return winner({name: found.timing.seconds for name, found in self.found.items() if found is not None})


def winner(seconds: Mapping[str, float]) -> str:
    """Return the scheme that costs the least loss among those that hardly take longer than the fastest."""
    return next(name for name in SCHEMES if seconds.get(name, 1e99) <= WORTH * min(seconds.values()))


@dataclass(frozen=True)
class Proposal:
    """best: the fastest layouts with outer steps on the cluster as it is. rows: by delay, the fastest link first."""

    best: list[Found]
    rows: list[Compared]


def replica_counts(values: Mapping[str, Any], cluster: Cluster) -> list[int]:
    """Return the numbers of outer replicas to try in turn: one for each site; else for each node, then fewer.

    Raises ConfigError if there is nothing to divide.
    """
    if values.get("outer_replicas"):
        return [int(values["outer_replicas"])]
    if cluster.inter_site is not None:
        return [cluster.inter_site.sites]
    counts = [k for k in range(cluster.nodes, 1, -1) if cluster.nodes % k == 0]
    if not counts:
        raise ConfigError(
            [f"--loss-policy {OUTER}: outer replicas are groups of nodes, and there is one node"]
        )
    return counts


def answer(
    values: Mapping[str, Any], cluster: Cluster, rates: Sequence[float], delays: Sequence[float]
) -> Proposal:
    """Find what is fastest with outer steps, and compare the schemes. ``best`` is empty if nothing fits."""
    ladder = rungs(values)
    points = [(rate, delay) for delay in delays for rate in sorted(rates, reverse=True)]
    places = {point: cluster.with_slow_link(*point) for point in points}
    ends = [cluster, places[points[0]], places[points[-1]]]
    pools = dict(zip(POLICIES, _pools(without_outer(values), ends, POLICIES.values(), POOLED), strict=True))
    best: list[Found] = []
    # On the last rung residuals of what was rounded and buffers of what crosses take memory that the first has left.
    for count, rung in product(replica_counts(values, cluster), dict.fromkeys((ladder[-1], ladder[0]))):
        steps = {**rung_options(rung), "outer_replicas": count}
        (pools[OUTER],) = _pools({**values, **steps}, ends, (OUTER,), BEST)
        best = on_ladder(pools[OUTER], cluster, ladder)[:BEST]
        if best:
            break
    rows = []
    for (rate, delay), place in places.items():
        moved = {name: [_moved(one, place) for one in pools[name]] for name in POLICIES}
        moved[OUTER] = on_ladder(pools[OUTER], place, ladder)
        fastest = {name: min(pool, key=lambda one: one.key, default=None) for name, pool in moved.items()}
        rows.append(Compared(rate, delay, fastest))
    return Proposal(best, [row for row in rows if any(row.found.values())])


def without_outer(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the schemes whose every step crosses."""
    return {name: value for name, value in values.items() if not name.startswith("outer_")}


def rungs(values: Mapping[str, Any]) -> list[Steps]:
    """Return the rungs with what is given instead of theirs, as far as the delay has room in an interval."""
    options = {field.name: values.get("outer_" + field.name) for field in fields(Steps)}
    given = {name: value for name, value in options.items() if value is not None}
    found = [*dict.fromkeys(replace(rung, **given) for rung in LADDER)]
    least = replace(found[0], interval=max(found[0].interval, found[0].delay + 1))
    return [rung for rung in found if rung.has_room] or [least]


def rung_options(steps: Steps) -> dict[str, Any]:
    """Return the options of a rung."""
    return {"outer_" + name: value for name, value in asdict(steps).items()}


def _pools(
    values: Mapping[str, Any], places: Iterable[Cluster], policies: Collection[str], number: int
) -> list[list[Found]]:
    """Return for each policy the layouts that are among the fastest in one of these places."""
    pools: list[dict[Any, Found]] = [{} for _ in policies]
    bases: list[BaseLayout] = []
    for place in places:
        bases = list(moved(bases, place) if bases else Search(values, place, "exact").drafts())
        for pool, policy in zip(pools, policies, strict=True):
            best = Search(values, place, policy).best(number, bases)
            pool.update({(one.layout.base.config, one.layout.given.zero): one for one in best})
            number = POOLED
    return [list(pool.values()) for pool in pools]


def _moved(found: Found, place: Cluster, **outer: Any) -> Found:
    """Return a layout in another place, with other options of outer steps."""
    of = found.layout
    config = replace(of.base.config, outer=replace(of.base.config.outer, **outer))
    base = BaseLayout(config, of.base.world, place, Collectives(place), of.base.partition)
    layout = Layout(base, of.given.zero)
    return Found(layout, simulate(layout), found.formats)


def on_ladder(found: Sequence[Found], place: Cluster, ladder: Sequence[Steps]) -> list[Found]:
    """Return the layouts that fit, the fastest first, on the first rung on which that one meets cheaply.

    If it does on none, this is the last rung on which one fits.
    """
    stepped: list[Found] = []
    for rung in ladder:
        moved = (_moved(one, place, **rung_options(rung)) for one in found)
        if fitting := [one for one in moved if one.layout.fits]:
            stepped = sorted(fitting, key=lambda one: one.key)
            if stepped[0].timing.bill["outer"] <= MEETINGS * stepped[0].timing.seconds:
                break
    return stepped


def lines(found: Proposal, cluster: Cluster) -> Iterator[str]:
    """Yield the comparison, line by line."""
    sites = "sites" if cluster.inter_site else "nodes"
    yield f"Schemes by the link between {sites}: seconds of a step, of the layouts that are fastest here or at an end"
    yield f"{'Gb/s':>8} {'delay ms':>9} {'exact':>9} {'quantised':>10} {'outer':>9}  wins"
    for row in found.rows:
        cells = [f"{one.timing.seconds:.3f}" if one else "no room" for one in row.found.values()]
        outer = row.found[OUTER]
        said = f" ({_steps(outer)})" if row.wins == OUTER and outer else ""
        yield f"{row.rate:>8g} {row.delay:>9g} {cells[0]:>9} {cells[1]:>10} {cells[2]:>9}  {row.wins}{said}"
    for delay in dict.fromkeys(row.delay for row in found.rows):
        wins = [(row.rate, row.wins) for row in found.rows if row.delay == delay]
        least = {scheme: min(rate for rate, one in wins if one == scheme) for _, scheme in wins}
        words = ", ".join(f"{scheme} from {rate:g} Gb/s" for scheme, rate in least.items())
        yield f"with {delay:g} ms more delay: {words}"
    yield f"A scheme wins if it takes at most {WORTH - 1:.0%} longer than the fastest and costs the least in loss."
    yield LOSS


def _steps(found: Found) -> str:
    outer = found.layout.states.outer
    assert outer is not None
    return outer_words(found.layout.config, outer.replicas)


def as_dicts(found: Proposal) -> list[dict[str, Any]]:
    """Return the rows as plain JSON values: seconds by scheme, None if nothing fits."""
    return [
        {
            "gbits_per_s": row.rate,
            "delay_ms": row.delay,
            "seconds": {name: one and one.timing.seconds for name, one in row.found.items()},
            "wins": row.wins,
        }
        for row in found.rows
    ]
