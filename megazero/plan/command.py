"""The command ``megazero plan``: it prints what it finds and returns its exit status. It needs no torch."""

from __future__ import annotations

import gc
import json
import random
import shlex
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from megazero.config import make_config, run_command
from megazero.config.model.spec import parameter_count
from megazero.config.options.cluster import Cluster
from megazero.files import write_text
from megazero.plan import compare
from megazero.plan.options import PlanRequest, help_text, read_request, with_stand_ins
from megazero.plan.page import Case, document
from megazero.plan.report import (
    advice,
    details,
    headline,
    layout_flags,
    source_of_rates,
    stage_lines,
    table,
    write_json,
)
from megazero.plan.search import BEST, OUTER_POLICY, Search


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 if a layout fits, 1 if none does, 2 if the command line or a file is wrong."""
    gc.disable()  # a search's many objects stay to its end: looking for cycles took 1/8 of its time
    try:
        return run_command("plan", argv, help_text, lambda: plan(read_request(argv)))
    finally:
        gc.enable()


def plan(request: PlanRequest) -> int:
    """Print what a request asks for, and return the exit status."""
    values, cluster, options = with_stand_ins(request.values), request.cluster, request.options
    plain = compare.without_outer(values)  # what outer steps propose has a place to meet
    cluster.device.peak(make_config({"micro_batch_size": 1, **plain}).precision.params_dtype)
    if options.pays:
        return _pays(request, values)
    if options.page is not None:
        return _page(options.page, values, cluster)
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


def _page(path: str, values: dict[str, Any], cluster: Cluster) -> int:
    """Write the page that says what schemes take on any link."""
    config = make_config({"micro_batch_size": 1, **values})
    shape, batch = f"{parameter_count(config.model) / 1e9:.3g}B", config.batch.global_batch_size
    assert batch is not None
    batches = sorted({max(1, batch // 4), batch, 4 * batch})
    cases = [Case(shape, {**values, "global_batch_size": each}, cluster) for each in batches]
    chance, rate = random.Random(0), cluster.slow_link.gbits_per_s
    asked = {
        "name": "as given",
        "shape": shape,
        "cluster": cluster.name,
        "nodes": cluster.nodes,
        "batch": batch,
    }
    cells = [case.cell(chance) for case in cases]
    write_text(Path(path), document(cases, cells, [{**asked, "rate": rate, "delay": 0}]))
    print(path)
    return 0
