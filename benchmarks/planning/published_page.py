"""Write docs/results/published.md: the planner beside training runs that others published.

    python -m benchmarks.planning.published_page        # half a minute on one core

published.yaml has the runs. The page has every run with its prediction, errors by source, and what each of the
counted parts is worth.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.planning.published import (
    SYSTEMS,
    Errors,
    Outcome,
    Run,
    by_source,
    left_out,
    predict,
    runs,
)
from benchmarks.results import PAGES
from megazero.config.options.cluster import load_cluster

PAGE = PAGES / "published.md"
FAR = 0.35  # of what was measured: an error that the page has to speak of
# What is counted beside large products at their rate, by the options that leave it out.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "the time of each product beside its operations": {"product_us": 0.0},
    "attention slower than products": {"attention_efficiency": None, "attention_half_keys": 0.0},
    "operations that are no products below the memory's rate": {"memory_efficiency": 1.0},
    "computing beside messages": {"contention": 0.0},
}
CLUSTERS = ("h100", "h100-500w", "a100", "a800-amsp", "dgx2-v100-1ib")


def outcomes(which: Iterable[Run]) -> list[Outcome]:
    return [predict(run) for run in which]


def errors_table(found: Sequence[Outcome], sheets: Sequence[Outcome]) -> str:
    """Return a row for each source: the runs that set rates, those held out, and all by data sheets."""
    rows = []
    groups = [(name, each, by_source(sheets)[name]) for name, each in by_source(found).items()]
    for name, each, sheet in [*groups, ("**all**", found, sheets)]:
        cells = [name]
        for held_out in (False, True):
            cells += _errors(o for o in each if o.run.held_out == held_out)
        rows.append([*cells, *_errors(sheet)[1:]])
    header = ["source"]
    for what in ("set rates", "held out"):
        header += [what, "median error", "worst", "bias"]
    return harness.table([*header, "by data sheets: median error", "worst", "bias"], rows)


def _errors(each: Iterable[Outcome]) -> list[str]:
    errors = Errors.of(each)
    return [str(errors.number), f"{errors.median:.0%}", f"{errors.worst:.0%}", f"{errors.bias:+.0%}"]


def runs_table(found: Sequence[Outcome]) -> str:
    """Return a row for each run of a source."""
    rows = []
    for each in found:
        run = each.run
        words = [f"micro-batch {run.micro}" + (f" x {run.accum}" if run.accum > 1 else "")]
        words += [f"TP {run.tp}"] * (run.tp > 1) + [f"PP {run.pp} x {run.virtual}"] * (run.pp > 1)
        words += [f"P,G,OS {run.shard}" if "," in run.shard else run.shard]
        words += [f"recompute {run.recompute}"] * (run.recompute != "none") + ["compiled"] * run.compile
        words += [run.cluster] * run.source.startswith("ZeRO++")
        words += [run.system] * (run.system.startswith("deepspeed") or "4bit" in run.system)
        rows.append(
            [run.model, str(run.gpus), str(run.seq), ", ".join(words), f"{run.measured:g}", f"{each.predicted:.4g}",
             f"{each.ratio:.2f}", "held out" if run.held_out else "set"]
        )  # fmt: skip
    unit = found[0].run.unit
    return harness.table(
        ["model", "GPUs", "tokens", "settings", f"{unit} measured", "predicted", "ratio", "rates"], rows
    )


def parts_table(found: Sequence[Outcome]) -> str:
    """Return what the bias becomes if a part is not counted."""
    rows = [["all counted", *_bias(found)]]
    for what, without in PARTS.items():
        changed = (replace(each.run, device={**each.run.device, **without}) for each in found)
        rows.append([f"without {what}", *_bias(outcomes(changed))])
    return harness.table(["", "median error", "worst", "bias"], rows)


def _bias(found: Sequence[Outcome]) -> list[str]:
    return _errors(found)[1:]


def rates_table() -> str:
    """Return the rates that published runs have set, by cluster file."""
    rows = []
    for name in CLUSTERS:
        cluster = load_cluster(name)
        device, peak = cluster.device, cluster.device.bf16_tflops or cluster.device.fp16_tflops or 0.0
        attention = device.attention_efficiency
        rows.append(
            [name, f"{peak:g}", f"{device.matmul_efficiency * peak:.0f} ({device.matmul_efficiency:g})",
             f"{attention * peak:.0f} ({attention:g})" if attention else "as products",
             f"{device.memory_gbytes_per_s * device.memory_efficiency:.0f}", f"{device.product_us:g}",
             f"{device.contention:g}", f"{cluster.inter_node.exchange_share:g}"]
        )  # fmt: skip
    return harness.table(
        ["cluster file", "peak TFLOP/s", "products", "attention, many keys", "memory GB/s", "µs a product",
         "contention", "all-to-all across nodes"],
        rows,
    )  # fmt: skip


def far_off(found: Sequence[Outcome]) -> str:
    far = [
        f"{o.run.source}, {o.run.model} on {o.run.gpus} GPUs ({o.ratio:.2f})"
        for o in found
        if abs(o.ratio - 1) > FAR
    ]
    return "; ".join(far) or "none"


def page(found: Sequence[Outcome]) -> str:
    """Return the text of the page."""
    sheets = outcomes(replace(each.run, sheet=True, device={}) for each in found)
    held = [each for each in found if each.run.held_out]
    errors, before = Errors.of(held), Errors.of(sheets)
    text = (
        Path(__file__)
        .with_suffix(".txt")
        .read_text(encoding="utf-8")
        .format(
            number=len(found),
            sources=len(by_source(found)),
            held=errors.number,
            median=f"{errors.median:.0%}",
            bias=f"{errors.bias:+.0%}",
            far=far_off(found),
            many=sum(abs(o.ratio - 1) > FAR for o in sheets),
            before=f"{before.median:.0%}",
            medians=f"{statistics.median(Errors.of(each).median for each in by_source(held).values()):.0%}",
            errors=errors_table(found, sheets),
            rates=rates_table(),
            parts=parts_table(found),
            systems="; ".join(sorted(SYSTEMS)),
        )
    )
    assumed = {source: (url, words) for source, url, words in left_out()}
    for source, each in by_source(found).items():
        url, words = assumed[source]
        where = f"[source]({url})" if url.startswith("http") else f"[{url}](gpu.md)"
        text += f"\n### {source}\n\n{where}. Assumed: {words}.\n\n{runs_table(each)}\n"
    return text


def main() -> None:
    harness.parser(__doc__).parse_args()
    found = outcomes(runs())
    PAGE.write_text(page(found), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    harness.start(main)
