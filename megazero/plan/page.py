"""The page "does it pay?": one HTML file that says, without a server, what schemes cost on any link.

A simulated step adds and compares: in the seconds of a bit and of a delay on the slow link it is convex and piecewise
linear, but for what computing loses beside messages. So a layout is kept as the tangent planes of its step, and the
page takes the largest; of a scheme's layouts, each the fastest on some link, the one with the least seconds. What
this misses is measured at random links against fresh searches, and printed (Errors).
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from megazero.charts import page, table
from megazero.config import make_config
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import parameter_count
from megazero.config.options.cluster import Cluster
from megazero.plan import compare
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.memory import GIB
from megazero.plan.report import describe, source_of_rates
from megazero.plan.rounding import tokens_needed
from megazero.plan.search import Found, Search
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import simulate

BODY, SCRIPT = (Path(__file__).with_name(f"page.{kind}").read_text("utf-8") for kind in ("html", "js"))
PRESETS = {**compare.KNOWN, "zeropp": "zeropp"}
SCHEMES = (*compare.KNOWN, compare.EXACT, "zeropp", compare.OUTER)
MEETINGS = (4, 128)  # bits and interval of the outer steps that are shown
Link = tuple[float, float]  # Gb/s and ms of the slow link
SLOWEST, FASTEST, LONGEST = 0.5, 800.0, 100.0  # Gb/s and ms that a page answers for
# Where a scheme's layouts are the fastest; where their planes are compared with simulations.
SEARCHED: tuple[Link, ...] = ((1, 5), (6, 2), (30, 0), (300, 0), (100, 60))
RATES, DELAYS = (SLOWEST, 3, 15, 60, 250, FASTEST), (0, 5, LONGEST)
CLOSE, MOST = 0.003, 12  # a layout's planes: how near they are to be, and how many there may be
STEP = 1e-4  # of a tangent's differences, relative


class Plane(NamedTuple):
    """Seconds of a step: ``seconds`` + ``gigabits`` / (Gb/s) + ``delays`` * ms / 1000."""

    seconds: float
    gigabits: float
    delays: float

    def at(self, link: Link) -> float:
        return self.seconds + self.gigabits / link[0] + self.delays * link[1] / 1e3


def height(planes: Sequence[Plane], link: Link) -> float:
    return max((plane.at(link) for plane in planes), default=0.0)


def tangents(seconds: Callable[[Link], float]) -> list[Plane]:
    """Return planes under a convex function of the link, to CLOSE where RATES and DELAYS cross."""
    known = {link: seconds(link) for link in product(RATES, DELAYS)}
    planes = list[Plane]()
    while len(planes) < MOST:
        off = {link: 1 - height(planes, link) / value for link, value in known.items()}
        worst = max(off, key=off.__getitem__)
        if off[worst] < CLOSE:
            break
        planes.append(tangent(seconds, worst))
    return planes


def tangent(seconds: Callable[[Link], float], link: Link) -> Plane:
    (rate, delay), here = link, seconds(link)
    gigabits = (seconds((rate / (1 + STEP), delay)) - here) * rate / STEP
    longer = STEP * (1 + delay)
    delays = (seconds((rate, delay + longer)) - here) / longer
    return Plane(here - gigabits / rate - delays * delay, gigabits, delays * 1e3)


# -- one model, batch and cluster ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model with its batch, in the options of a plan, on a cluster whose slow link may be any. shape: its name."""

    shape: str
    values: Mapping[str, Any]
    cluster: Cluster

    def fastest(self, scheme: str, link: Link) -> Found | None:
        """Return what a plan finds for a scheme on a link; None: nothing fits, or it is not legal."""
        cluster, plain = self.cluster.with_slow_link(*link), compare.without_outer(self.values)
        if scheme == compare.OUTER:
            asked = compare.with_outer(
                self.values, *MEETINGS, compare.replica_counts(self.values, cluster)[0]
            )
            found = compare.outer_layouts(asked, cluster, 1)
        elif scheme == compare.EXACT:
            found = Search(plain, cluster, "exact").best(1)
        else:
            found = Search(compare.with_preset(plain, PRESETS[scheme]), cluster, "exact").best(1)
        return found[0] if found else None

    def seconds(self, layout: Layout, link: Link) -> float:
        """Return the simulated seconds of a layout's step on another link."""
        base, collectives = layout.base, Collectives(self.cluster.with_slow_link(*link))
        moved = BaseLayout(base.config, base.world, collectives.cluster, collectives, base.partition)
        return simulate(Layout(moved, layout.given.zero)).seconds

    def scheme(self, name: str, link: Link) -> tuple[dict[str, Any] | None, float | None]:
        """Return a scheme's layouts as the page has them, None if none fits, and how far they are off on a link."""
        asked = self.fastest(name, link)
        if asked is None:  # memory does not depend on links
            return None, None
        found = [one for each in SEARCHED if (one := self.fastest(name, each)) is not None]
        kept = {describe(one.layout): self._drawn(one.layout) for one in found}
        least = min(height(each["planes"], link) for each in kept.values())
        kept.setdefault(describe(asked.layout), self._drawn(asked.layout))  # it is known now
        wire, numel = asked.layout.wire, parameter_count(asked.layout.config.model)
        tokens = None if name == compare.OUTER else tokens_needed(wire, numel)
        return {"tokens": tokens, "layouts": [*kept.values()]}, least / asked.timing.seconds - 1

    def _drawn(self, layout: Layout) -> dict[str, Any]:
        return {
            "planes": tangents(lambda link: self.seconds(layout, link)),
            "gb": layout.bytes_across_nodes / 1e9,
            "gib": layout.memory.total / GIB,
            "words": describe(layout),
        }

    def cell(self, chance: random.Random) -> dict[str, Any]:
        """Return what the page knows of this case; errors: by scheme, on a random link."""
        link = SLOWEST * (FASTEST / SLOWEST) ** chance.random(), 0.1 * (10 * LONGEST) ** chance.random()
        schemes, errors = dict[str, Any](), dict[str, float]()
        for name in SCHEMES:
            schemes[name], off = self.scheme(name, link)
            if off is not None:
                errors[name] = off
        where = {"shape": self.shape, "cluster": self.cluster.name, "nodes": self.cluster.nodes}
        return {**where, "batch": self.values["global_batch_size"], "schemes": schemes, "errors": errors}


def sizes(model: ModelConfig) -> dict[str, int]:
    """Return the sizes of a model that the page scales others by."""
    return {
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_attention_heads,
        "groups": model.num_query_groups or model.num_attention_heads,
        "channels": model.kv_channels,
        "ffn": model.expert_width if model.num_experts else model.ffn_hidden_size,
        "experts": model.num_experts or 1,
        "active": model.moe_router_topk if model.num_experts else 1,
        "vocabulary": model.vocab_size or 0,
        "length": model.seq_length,
    }


# -- the document -------------------------------------------------------------------------------------


def document(
    cases: Sequence[Case], cells: Sequence[Mapping[str, Any]], named: Sequence[Mapping[str, Any]]
) -> str:
    """Return the page. named: questions that it offers by name, of which it leaves out those without a cell."""
    planned = [{name: cell[name] for name in ("shape", "cluster", "nodes", "batch")} for cell in cells]
    data = {
        "shapes": {c.shape: sizes(make_config({"micro_batch_size": 1, **c.values}).model) for c in cases},
        "clusters": {c.cluster.name: _facts(c.cluster) for c in cases},
        "schemes": SCHEMES,
        "limits": (SLOWEST, FASTEST, LONGEST),
        "exact": compare.EXACT,
        "worth": compare.WORTH,
        "named": [each for each in named if any(where.items() <= each.items() for where in planned)],
        "cells": cells,
    }
    words = json.dumps(_rounded(data), separators=(",", ":")).replace("<", "\\u003c")
    return page("Does it pay?", BODY.replace("ERRORS", _errors(cells)), f"const DATA = {words};\n{SCRIPT}")


def _facts(cluster: Cluster) -> dict[str, Any]:
    link = cluster.slow_link
    return {
        "ranks": cluster.ranks_per_node,
        "part": cluster.slow_part,
        "rate": link.gbits_per_s,
        "reached": link.efficiency,
        "room": cluster.device.room / GIB,
        "source": source_of_rates(cluster),
    }


def _rounded(value: Any) -> Any:
    """Return JSON values with five digits of each number."""
    return json.loads(json.dumps(value), parse_float=lambda digits: float(f"{float(digits):.5g}"))


def _errors(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of how far the page's seconds are from a plan's."""
    rows = []
    for name in SCHEMES:
        found = [abs(cell["errors"][name]) for cell in cells if name in cell["errors"]]
        if found:
            rows.append([name, f"{len(found)}", f"{statistics.median(found):.2%}", f"{max(found):.2%}"])
    return table(["scheme", "questions", "median", "worst"], rows)
