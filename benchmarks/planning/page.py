"""Write docs/results/published.md: the planner beside published runs, and what it says of some models.

    python -m benchmarks.planning.page           # some minutes on one core; --runs prints every published run
    python -m benchmarks.planning.page --chart   # README's chart alone, of the page's figures and of the lab's

published.yaml has the runs. page.txt has the page's words.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.planning.published import SYSTEMS, Errors, Outcome, Run, by_source, predict, runs
from benchmarks.results import PAGES, RESULTS
from megazero.config.options.cluster import load_cluster
from megazero.plan import compare
from megazero.plan.options import read_request, with_stand_ins
from megazero.plan.search import Search

PAGE, CHART = PAGES / "published.md", PAGES / "first_screen.png"
FAR = 0.35  # of what was measured: an error that the page has to speak of
# What is counted beside large products at their rate, by the options that leave it out.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "the time of each product beside its operations": {"product_us": 0.0},
    "attention slower than products": {"attention_efficiency": None, "attention_half_keys": 0.0},
    "operations that are no products below the memory's rate": {"memory_efficiency": 1.0},
    "computing beside messages": {"contention": 0.0},
}
CLUSTERS = ("h100", "h100-500w", "a100", "a800-amsp", "dgx2-v100-1ib")
LLAMA = "--model-family llama --num-query-groups 8 --seq-length 8192 --vocab-size 128256 --bf16"
LLAMA_8B = f"{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
LLAMA_70B = f"{LLAMA} --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64"
QWEN = (
    "--model-family qwen3_moe --num-layers 48 --hidden-size 2048 --num-attention-heads 32 --num-query-groups 4 "
    "--kv-channels 128 --ffn-hidden-size 6144 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 "
    "--vocab-size 151936 --bf16"
)
H100 = "--cluster h100"
# A model on a cluster, 4 samples of 8,192 tokens for each GPU, without pipelines.
PLANNED = {
    "8B on 4 nodes of 8 H100": f"{LLAMA_8B} --global-batch-size 128 {H100} --nodes 4",
    "70B on 16 nodes of 8 H100": f"{LLAMA_70B} --global-batch-size 512 {H100} --nodes 16",
    "Qwen3-30B-A3B on 16 nodes of 8 H100": f"{QWEN} --seq-length 8192 --global-batch-size 512 {H100} --nodes 16",
}
RATES = (10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0)  # Gb/s of a node
WHOLE = "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 1 --expert-model-parallel-size 1"
LINES = {
    "FSDP2": f"{WHOLE} --zero-preset zero3",
    "HSDP, once a step": f"{WHOLE} --zero-preset hsdp",
    "ZeRO-1 with TP": "--pipeline-model-parallel-size 1 --zero-preset zero1",
    "zeropp": "--pipeline-model-parallel-size 1 --zero-preset zeropp",
}
# Cases of --pays: a model on a cluster, and the rates of its slow link.
PAYS = {
    "8B, 4 nodes of 8 H100": (PLANNED["8B on 4 nodes of 8 H100"], (10, 25, 100, 400, 3200)),
    "70B, 16 nodes of 8 H100": (PLANNED["70B on 16 nodes of 8 H100"], (100,)),
    "Qwen3-30B-A3B, 8 nodes of 8 H100": (
        f"{QWEN} --seq-length 4096 --global-batch-size 512 {H100} --nodes 8",
        (100,),
    ),
    "8B, two DGX Sparks": (f"{LLAMA_8B} --global-batch-size 16 --cluster two-sparks", (10, 200)),
}
# The lab's contestants in the chart, with the heat of comparison.json that has them. Equal kinds have one colour.
MEASURED = {"megazero zeropp": "sharded", "FSDP2": "sharded", "HSDP once": "sharded", "DDP": "replicated"}
COLOURS = {
    **{"FSDP2": "C0", "HSDP, once a step": "C1", "HSDP once": "C1"},
    **{"ZeRO-1 with TP": "C2", "DDP": "C4", "zeropp": "C3", "megazero zeropp": "C3"},
}


def outcomes(which: Iterable[Run]) -> list[Outcome]:
    return [predict(run) for run in which]


def _errors(each: Iterable[Outcome]) -> list[str]:
    errors = Errors.of(each)
    return [str(errors.number), f"{errors.median:.0%}", f"{errors.worst:.0%}", f"{errors.bias:+.0%}"]


def errors_table(found: Sequence[Outcome]) -> str:
    """Return a row for each source: the runs that set rates, and those held out."""
    rows = []
    for name, each in [*by_source(found).items(), ("**all**", found)]:
        sides = ([o for o in each if o.run.held_out == held_out] for held_out in (False, True))
        rows.append([name, *(cell for side in sides for cell in _errors(side))])
    header = ["source"]
    for what in ("set rates", "held out"):
        header += [what, "median error", "worst", "bias"]
    return harness.table(header, rows)


def parts_table(found: Sequence[Outcome], sheets: Sequence[Outcome]) -> str:
    """Return the errors where a part is not counted, or none is."""
    rows = [["all counted", *_errors(found)[1:]]]
    for what, without in PARTS.items():
        changed = (replace(each.run, device={**each.run.device, **without}) for each in found)
        rows.append([f"without {what}", *_errors(outcomes(changed))[1:]])
    rows.append(["the rates of data sheets, and nothing beside them", *_errors(sheets)[1:]])
    return harness.table(["", "median error", "worst", "bias"], rows)


def rates_table() -> str:
    """Return the rates that published runs have set, by cluster file."""
    rows = []
    for name in CLUSTERS:
        cluster = load_cluster(name)
        device, peak = cluster.device, cluster.device.bf16_tflops or cluster.device.fp16_tflops or 0.0
        attention = device.attention_efficiency
        rows.append(
            [
                *(name, f"{peak:g}", f"{device.matmul_efficiency * peak:.0f} ({device.matmul_efficiency:g})"),
                f"{attention * peak:.0f} ({attention:g})" if attention else "as products",
                f"{device.memory_gbytes_per_s * device.memory_efficiency:.0f}",
                *(
                    f"{device.product_us:g}",
                    f"{device.contention:g}",
                    f"{cluster.inter_node.exchange_share:g}",
                ),
            ]
        )
    header = [
        "cluster file",
        "peak TFLOP/s",
        "products",
        "attention, many keys",
        "memory GB/s",
        "µs a product",
    ]
    return harness.table([*header, "contention", "all-to-all across nodes"], rows)


def run_lines(found: Sequence[Outcome]) -> list[str]:
    """Return every run in a line: source, settings, measured, predicted, their ratio, and what it was taken for."""
    out = []
    for each in found:
        run = each.run
        words = f"{run.model} on {run.gpus} GPUs, {run.seq} tokens, micro-batch {run.micro} x {run.accum}"
        words += f", TP {run.tp}, PP {run.pp} x {run.virtual}, {run.shard}, recompute {run.recompute}"
        words += f", {run.cluster}, {run.system}"
        numbers = f"{run.measured:g} {run.unit}\t{each.predicted:.4g}\t{each.ratio:.2f}"
        out.append(f"{run.source}\t{words}\t{numbers}\t{'held out' if run.held_out else 'set rates'}")
    return out


def planned_table(words: str) -> str:
    """Return the seconds of each line's fastest layout at each rate."""
    rows = []
    for name, more in LINES.items():
        request = read_request(shlex.split(f"{words} {more}"))
        values, cells = with_stand_ins(request.values), []
        for rate in RATES:
            best = Search(values, request.cluster.with_slow_link(rate, 0.0), "exact").best(1)
            cells.append(f"{best[0].timing.seconds:.2f}" if best else "does not fit")
        rows.append([name, *cells])
    return harness.table(["seconds of a step at Gb/s", *(f"{rate:g}" for rate in RATES)], rows)


def pays_table() -> str:
    """Return a row for each case of --pays and rate."""
    rows = []
    for name, (words, rates) in PAYS.items():
        request = read_request([*shlex.split(words), "--pays"])
        for rate in rates:
            found = compare.compare(with_stand_ins(request.values), request.cluster.with_slow_link(rate, 0.0))
            known = [row for row in found.rows if row.name in compare.KNOWN]
            cells = [
                name,
                f"{rate:g}",
                *(_best(row) for row in (min(known, key=lambda row: row.seconds), found.exact)),
            ]
            quantised, outer = found.row(compare.QUANTISED), found.row(compare.OUTER)
            cells += [_best(quantised), f"{quantised.needed:.2f}" if quantised and quantised.needed else "?"]
            worth = quantised and quantised.worth(found.exact)
            rows.append([*cells, f"{worth:.2f}" if worth else "?", _best(outer), found.to_use.name])
    header = [
        "model",
        "Gb/s",
        "best known preset, s",
        "best exact, s",
        "best quantised, s",
        "tokens",
        "worth",
    ]
    return harness.table([*header, "outer steps, s", "use"], rows)


def _best(row: compare.Scheme | None) -> str:
    return "does not fit" if row is None else f"{row.seconds:.2f}"


def chart() -> None:
    """Chart the page's first model over the rate, beside the lab's small model as measured."""
    from matplotlib.figure import Figure

    title, figure = next(iter(PLANNED)), Figure(figsize=(8.4, 2.8), dpi=80, layout="constrained")
    left, right = figure.subplots(1, 2)
    part = PAGE.read_text("utf-8").split(f"### {title}\n")[1].split("\n#")[0]
    _, _, *rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("|")]
    for name, *cells in rows:
        left.plot(RATES, [*map(float, cells)], marker="o", markersize=3, label=name, color=COLOURS[name])
    left.set(xscale="log", yscale="log", xlabel="Gb/s of a node", ylabel="seconds of a step")
    left.set_yticks([5, 10, 20, 40], ["5", "10", "20", "40"])
    left.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    left.set_title(f"planned: {title}", size=9)
    results = [
        r for r in json.loads((RESULTS / "comparison.json").read_text())["results"] if r["micro_batches"] == 1
    ]
    rates = list(dict.fromkeys(each["rate"] for each in results))
    for name, heat in MEASURED.items():
        own = [each["seconds"] for each in results if each["heat"] == heat]
        seconds = [statistics.median(each[name]) for each in own if name in each]
        if len(seconds) == len(rates):
            right.plot(range(len(rates)), seconds, marker="o", markersize=3, label=name, color=COLOURS[name])
    words = {"mbit": " Mb/s", "gbit": " Gb/s", "none": "no limit"}
    right.set_xticks(range(len(rates)), [re.sub("|".join(words), lambda at: words[at[0]], r) for r in rates])
    right.set(ylim=(0, None), xlabel="link between the nodes")
    right.set_title("measured: 8.4M on 2 nodes of 2 CPU ranks", size=9)
    for panel in (left, right):
        panel.legend(fontsize=6)
        for axis in (panel.xaxis, panel.yaxis):
            axis.label.set_size(8)
        panel.tick_params(labelsize=7)
        panel.minorticks_off()
    figure.savefig(CHART)


def page(found: Sequence[Outcome]) -> str:
    """Return the text of the page."""
    sheets = outcomes(replace(each.run, sheet=True, device={}) for each in found)
    held = [each for each in found if each.run.held_out]
    errors = Errors.of(held)
    away = (each for each in found if abs(each.ratio - 1) > FAR)
    far = [f"{o.run.source}, {o.run.model} on {o.run.gpus} GPUs ({o.ratio:.2f})" for o in away]
    return (
        Path(__file__)
        .with_suffix(".txt")
        .read_text(encoding="utf-8")
        .format(
            number=len(found),
            sources=len(by_source(found)),
            held=errors.number,
            median=f"{errors.median:.0%}",
            bias=f"{errors.bias:+.0%}",
            medians=f"{statistics.median(Errors.of(each).median for each in by_source(held).values()):.0%}",
            far="; ".join(far),
            errors=errors_table(found),
            rates=rates_table(),
            parts=parts_table(found, sheets),
            systems="; ".join(sorted(SYSTEMS)),
            planned="\n\n".join(f"### {name}\n\n{planned_table(words)}" for name, words in PLANNED.items()),
            pays=pays_table(),
        )
    )


def main() -> None:
    options = harness.parser(__doc__, runs=(False, "print them"), chart=(False, "draw it alone")).parse_args()
    if options.chart:
        chart()
        return
    found = outcomes(runs())
    if options.runs:
        print("\n".join(run_lines(found)))
        return
    PAGE.write_text(page(found), encoding="utf-8")
    chart()


if __name__ == "__main__":
    harness.start(main)
