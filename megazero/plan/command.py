"""The command ``megazero plan``: it prints what it finds and returns its exit status. It needs no torch."""

from __future__ import annotations

import gc
import json
import shlex
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from megazero.config import World, make_config, run_command
from megazero.files import write_text
from megazero.plan import compare
from megazero.plan.base_layout import BaseLayout
from megazero.plan.layout import Layout
from megazero.plan.options import PlanRequest, help_text, read_request, with_stand_ins
from megazero.plan.report import (
    advice,
    details,
    explain,
    headline,
    layout_flags,
    source_of_rates,
    stage_lines,
    table,
    write_json,
)
from megazero.plan.search import BEST, CHOICES, OUTER_POLICY, Found, Search
from megazero.plan.seconds import Collectives
from megazero.plan.simulate import simulate


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if a layout fits, 1 if none does, 2 if the command line or a file is wrong."""
    gc.disable()  # a search's many objects stay to its end: looking for cycles took 1/8 of its time
    try:
        return run_command("plan", argv, help_text, lambda: _plan(read_request(argv)))
    finally:
        gc.enable()


def _plan(request: PlanRequest) -> int:
    values, cluster, options = with_stand_ins(request.values), request.cluster, request.options
    cluster.device.peak(make_config({"micro_batch_size": 1, **values}).precision.params_dtype)
    if options.pays:
        return _pays(request, values)
    search = Search(values, cluster, request.loss_policy)
    outer = request.loss_policy == OUTER_POLICY
    best = compare.outer_layouts(values, cluster, BEST) if outer else search.best()
    if not best:
        print("\n".join(advice(values, cluster, search)), file=sys.stderr)
        return 1
    first = best[0]
    print(headline(first.layout.config, cluster))
    print("\n".join([*table(best), source_of_rates(cluster)]))
    flags = shlex.join(layout_flags(first.layout.config))
    print("\n".join(["", "The first:", *details(first), *stage_lines(first.layout), "flags:", flags]))
    if request.explain is not None:
        print("\n".join(["", *_explained(request, first)]))
    path = Path(options.plan_output) / "plan.json"
    write_json(path, cluster, request.loss_policy, request.values, best)
    print(f"\n{path}: all of it")
    return 0


def _pays(request: PlanRequest, values: dict[str, Any]) -> int:
    """Print whether quantised messages pay, at each delay and rate, and write plan.json."""
    cluster, options = request.cluster, request.options
    found: list[dict[str, Any]] = []
    rates = options.link_rates or (cluster.slow_link.gbits_per_s,)
    for delay, rate in product(options.link_delays or (0.0,), rates):
        each = compare.compare(values, cluster.with_slow_link(rate, delay), delay)
        if each.row(compare.EXACT) is None:
            print("\n".join(advice(values, cluster, Search(values, cluster, "exact"))), file=sys.stderr)
            return 1
        if not found:
            print("\n".join([headline(each.exact.layout.config, cluster), source_of_rates(cluster)]))
        print("\n".join(["", *compare.lines(each)]), flush=True)
        found.append(compare.as_dict(each))
    print("\n".join(["", *compare.LEGEND]))
    path = Path(options.plan_output) / "plan.json"
    write_text(path, json.dumps({"version": 1, "cluster": cluster.name, "pays": found}, indent=1) + "\n")
    print(f"\n{path}: all of it")
    return 0


def _explained(request: PlanRequest, best: Found) -> list[str]:
    """Return the explanation of the layout given after --explain."""
    assert request.explain is not None
    cluster = request.cluster
    world = World(cluster.world_size, cluster.ranks_per_node)
    kept = {name: value for name, value in with_stand_ins(request.values).items() if name not in CHOICES}
    try:
        config = make_config({"micro_batch_size": 1, **kept, **request.explain}, world)
        layout = Layout(BaseLayout(config, world, cluster, Collectives(cluster)), config.zero)
    except ValueError as error:
        faults = [f"  {line}" for line in getattr(error, "errors", [str(error)])]
        return ["the layout is not legal:", *faults]
    return explain(layout, simulate(layout) if layout.fits else None, best)
