"""The scheme that the planner chooses for a slow link, beside the fastest one in the lab.

    python -m benchmarks.planning.slow_links --results runs/outer/comparison.json --cluster runs/outer/lab.yaml

--results: what ``links/comparison.py --heats outer`` wrote, at any rates and delays. --cluster: what ``megazero
calibrate`` wrote for that model in a lab without a rate; the link is taken from each result. Predictions are for the
fastest layout of each scheme without tensor and pipeline parallelism, measurements are CONTESTANT's. The planner's
rule chooses from both. Writes a section of docs/guide/slow-links.md (--page: another file).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import harness
from benchmarks.links.comparison import shape_of
from benchmarks.links.comparison_report import Result, sent
from benchmarks.links.contestants import HEATS, INTERVAL
from benchmarks.planning.shared_processors import predict
from benchmarks.steps import options_of
from megazero.config.options.cluster import Cluster, load_cluster
from megazero.plan.options import with_stand_ins
from megazero.plan.search import OUTER
from megazero.plan.slow_links import EXACT, QUANTISED, Compared, answer, winner
from tests.netlab.lab import parse_link

# By scheme, which contestant of comparison.py it is. BITS: of the differences of the last.
CONTESTANT = {EXACT: "megazero zero1", QUANTISED: "megazero zeropp", OUTER: "megazero outer INT4"}
BITS = 4
# A message of gloo waits for its answer; --link-delays of the planner is what one message takes.
ROUND_TRIP = 2
TITLE = "Planner against the lab"
TEXT = """\
    python -m benchmarks.links.comparison --heats outer --rates {rates} \\
        --micro-batches {micro_batches} --out runs/outer
    python -m benchmarks.planning.slow_links --results runs/outer/comparison.json --cluster runs/outer/lab.yaml

{nodes} nodes of {ranks_per_node} ranks on one machine of {cores} cores, gloo, torch {torch}; a Llama of {elements}
parameters in bf16, 128 tokens of a rank in a micro-batch. Outer steps meet every {interval} steps, in 4 bits. The
cluster file is `megazero calibrate` of this model on links without a rate. Seconds of a step, and the scheme to take
by the planner's rule, for predicted and for measured ones; {agree} of {number} agree.

{choices}

Seconds of a step of everyone, median (least to most) of turns:

{seconds}

Bytes at the interface of the node that sent most, over all links: of a step on average, and of the step that sent
most where steps differ, over the formulas of benchmarks/links/volume.py (for that: a meeting).

{bytes}
"""


class Choice(NamedTuple):
    """A result beside the planner's prediction, each in seconds by scheme."""

    result: Result
    predicted: dict[str, float]
    measured: dict[str, float]


def values_of(micro_batches: int, cluster: Cluster) -> dict[str, Any]:
    """Return the options of the comparison's training, with its outer steps."""
    shape = shape_of(micro_batches)
    return with_stand_ins(
        {
            **options_of(shape),
            **{"params_dtype": "bf16", "ranks_per_node": cluster.ranks_per_node},
            **{"global_batch_size": cluster.world_size * shape.micro_batch * micro_batches},
            **{"micro_batch_size": shape.micro_batch, "recompute_granularity": "none"},
            **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
            **{"outer_replicas": cluster.nodes, "outer_interval": INTERVAL, "outer_bits": BITS},
            "zero_gradient_transform": "none",  # as CONTESTANT's quantised one
        }
    )


def link(result: Result) -> tuple[float, float]:
    """Return Gb/s, and the planner's milliseconds of delay."""
    bits, delay_ms = parse_link(result["rate"])
    return (bits or math.inf) / 1e9, ROUND_TRIP * delay_ms


def choices(results: Sequence[Result], cluster: Cluster) -> list[Choice]:
    """Return a choice for each result that has a contestant of every scheme and a link with a rate."""
    taken = [r for r in results if set(CONTESTANT.values()) <= set(r["seconds"]) and link(r)[0] < math.inf]
    found = dict[tuple[float, float, int], Compared]()
    for micro_batches in sorted({r["micro_batches"] for r in taken}):
        links = {link(r) for r in taken if r["micro_batches"] == micro_batches}
        rates, delays = (sorted(set(column)) for column in zip(*links, strict=True))
        for row in answer(values_of(micro_batches, cluster), cluster, rates, delays).rows:
            found[row.rate, row.delay, micro_batches] = row
    out = []
    for result in taken:
        row = found[*link(result), result["micro_batches"]]
        predicted = {name: predict(one.layout).seconds for name, one in row.found.items() if one}
        measured = {name: statistics.median(result["seconds"][who]) for name, who in CONTESTANT.items()}
        out.append(Choice(result, predicted, measured))
    return out


def choice_table(found: Sequence[Choice]) -> str:
    head = ["link", "micro-batches"]
    for what in ("predicted", "measured"):
        head += [f"{what}: {EXACT}", QUANTISED, OUTER, "takes"]
    rows = []
    for one in found:
        row = [one.result["rate"], str(one.result["micro_batches"])]
        for seconds in (one.predicted, one.measured):
            row += [f"{seconds[name]:.3f}" if name in seconds else "no room" for name in CONTESTANT]
            row.append(winner(seconds))
        rows.append(row)
    return harness.table(head, rows)


def seconds_table(results: Sequence[Result]) -> str:
    head = ["", *(f"{r['rate']}, {r['micro_batches']}" for r in results)]
    rows = []
    for name in HEATS["outer"]:
        cells = [harness.spread(r["seconds"][name]) if name in r["seconds"] else "-" for r in results]
        rows.append([name, *cells])
    return harness.table(head, rows)


def bytes_table(results: Sequence[Result]) -> str:
    rows = []
    for name in HEATS["outer"]:
        own = [r for r in results if name in r["seconds"]]
        means = [sent(r, name) / r["formula"][name] for r in own]
        most = [r["most"][name] / r["most_formula"][name] for r in own if name in r["most"]]
        rows.append([name, *(harness.spread(each) if each else "-" for each in (means, most))])
    return harness.table(["", "mean / formula", "most / formula"], rows)


def main() -> int:
    options = harness.parser(
        __doc__,
        results=(Path, "a comparison.json"),
        cluster=(str, "a cluster file"),
        page=harness.DOCS / "guide" / "slow-links.md",
    ).parse_args()
    stored = json.loads(options.results.read_text())
    found = choices(stored["results"], load_cluster(options.cluster))
    if not found:
        print(
            f"{options.results} has no result at a rate with {', '.join(CONTESTANT.values())}",
            file=sys.stderr,
        )
        return 1
    results = [one.result for one in found]
    text = TEXT.format(
        **{name: stored[name] for name in ("nodes", "ranks_per_node", "cores", "torch")},
        rates=" ".join(dict.fromkeys(r["rate"] for r in results)),
        micro_batches=" ".join(dict.fromkeys(str(r["micro_batches"]) for r in results)),
        elements=f"{results[0]['elements'] / 1e6:.1f}M",
        interval=INTERVAL,
        agree=sum(winner(one.predicted) == winner(one.measured) for one in found),
        number=len(found),
        choices=choice_table(found),
        seconds=seconds_table(results),
        bytes=bytes_table(results),
    )
    print(text)
    harness.write_section(options.page, TITLE, text)
    return 0


if __name__ == "__main__":
    harness.start(main)
