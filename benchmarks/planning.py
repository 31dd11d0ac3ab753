"""Write docs/planning.md and its chart: how to plan, a model from question to script, and what papers measured.

    python benchmarks/planning.py        # about two minutes on one core, most of it the searches

``tests/unit/test_plan_page.py`` keeps the tables that need no search current.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed, too

from benchmarks.planning_papers import (
    AMSP_CHOICE,
    BLOOM,
    LLAMAS,
    amsp_rows,
    amsp_values,
    bloom_layout,
    table_4,
    whole_attention_mfu,
    with_stand_ins,
    zeropp_rows,
)
from megazero.plan.cluster import load_cluster
from megazero.plan.command import main as plan
from megazero.plan.memory import GIB
from megazero.plan.report import describe, layout_flags, model_flops_utilisation
from megazero.plan.search import Found, Search
from megazero.plan.simulate import simulate

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODEL = (
    "--model-family llama --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--num-query-groups 8 --seq-length 4096 --vocab-size 32000 --bf16 --global-batch-size 1024"
)
QUESTION = f"{MODEL} --cluster a100-100g"
OTHER = "--zero-preset zero3 --recompute-granularity full"


def search_best(values: dict[str, object], cluster: str, policy: str, number: int) -> list[Found]:
    found = load_cluster(cluster)
    everything = with_stand_ins({**values, "ranks_per_node": found.ranks_per_node})
    return Search(everything, found, policy).best(number)


def zeropp_table() -> list[str]:
    lines = [
        "| model | tokens | 1 IB: paper | predicted | residual | 8 IB: paper | predicted | residual |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one, eight in zip(zeropp_rows(1), zeropp_rows(8), strict=True):
        cells = [f"{r.paper:.2f} | {r.predicted:.2f} | {r.residual:+.0%}" for r in (one, eight)]
        lines.append(f"| {one.model} | {one.tokens} | {' | '.join(cells)} |")
    return lines


def memory_table() -> list[str]:
    lines = [
        "| model | tokens | system | paper | predicted GiB of 30.5 | with full recompute |",
        "|---|---|---|---|---|---|",
    ]
    for model, tokens, system, runs, sizes in table_4():
        said = "runs" if runs else "out of memory"
        ours = "runs" if sizes["none"] <= 30.5 else "out of memory"
        lines.append(
            f"| {model} | {tokens} | {system} | {said} | {sizes['none']:.1f}: {ours} | {sizes['full']:.1f} |"
        )
    return lines


def amsp_table() -> list[str]:
    lines = [
        "| model | system | P,G,OS | paper | predicted as run | residual | this engine |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in LLAMAS:
        for row in amsp_rows(model):
            paper = "-" if row.paper is None else f"{row.paper:.0%}"
            residual = "-" if row.paper is None else f"{row.as_run / row.paper - 1:+.0%}"
            here = f"{row.here:.0%}" if row.fits else "does not fit"
            shard = ",".join(map(str, row.shard))
            lines.append(
                f"| {model} | {row.system} | {shard} | {paper} | {row.as_run:.0%} | {residual} | {here} |"
            )
    return lines


def bloom_table() -> list[str]:
    layout = bloom_layout()
    timing = simulate(layout)
    return [
        f"{describe(layout)}: {layout.memory.total / GIB:.1f} of {layout.room / GIB:.1f} GiB on the fullest rank, "
        f"{timing.seconds:.1f} s a step, MFU {model_flops_utilisation(layout, timing.seconds):.1%}.",
    ]


def choices_table() -> list[str]:
    """Return the sharding that the planner chooses on AMSP's cluster, where all else is as there."""
    lines = ["| model | AMSP's choice | here, exact messages | MFU | GiB |", "|---|---|---|---|---|"]
    for model in LLAMAS:
        fixed = {
            **amsp_values(model),
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "use_tp_pp_dp_mapping": False,
        }
        (best,) = search_best(fixed, "a800-amsp", "exact", 1)
        layout = best.layout
        lines.append(
            f"| {model} | {','.join(map(str, AMSP_CHOICE[model]))} | {','.join(map(str, layout.shards.factors))} | "
            f"{whole_attention_mfu(layout, best.timing.seconds):.0%} | {layout.memory.total / GIB:.1f} |"
        )
    return lines


def transcript(policy: str, chart: Path | None = None) -> tuple[str, list[str]]:
    """Return what the command prints for the 70B question, and the flags of its first layout."""
    with tempfile.TemporaryDirectory() as folder:
        out = io.StringIO()
        words = [
            *shlex.split(QUESTION),
            "--loss-policy",
            policy,
            "--plan-output",
            folder,
            "--explain",
            *OTHER.split(),
        ]
        with contextlib.redirect_stdout(out):
            assert plan(words) == 0
        flags = json.loads((Path(folder) / "plan.json").read_text())["layouts"][0]["flags"]
        if chart is not None:
            chart.write_bytes((Path(folder) / "plan.png").read_bytes())
        return out.getvalue().partition(f"\n{folder}")[0].strip(), flags


def _rather(found: Found) -> str:
    layout, seconds = found.layout, found.timing.seconds
    return (
        f"{describe(layout)}: {layout.memory.total / GIB:.1f} GiB, {seconds:.1f} s, MFU "
        f"{model_flops_utilisation(layout, seconds):.1%}\n(`{shlex.join(layout_flags(layout.config))}`)"
    )


def _section(title: str) -> str:
    """Return a section of the page as it is: plan_memory.py and plan_step_time.py write theirs."""
    page = (DOCS / "planning.md").read_text(encoding="utf-8")
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0].strip("\n")


def main() -> None:
    exact, _ = transcript("exact")
    quantised, flags = transcript("zeropp", DOCS / "planning.png")
    rather = search_best(BLOOM, "a100", "exact", 1)[0]
    parts = {
        "QUESTION": QUESTION,
        "OTHER": OTHER,
        "EXACT": exact,
        "ZEROPP": quantised,
        "MODEL": MODEL,
        "FLAGS": shlex.join(flags),
        "TABLE2": "\n".join(zeropp_table()),
        "TABLE4": "\n".join(memory_table()),
        "AMSP": "\n".join(amsp_table()),
        "CHOICES": "\n".join(choices_table()),
        "BLOOM": "\n".join(bloom_table()),
        "RATHER": _rather(rather),
        "MEMORY": _section("Memory against measurement"),
        "STEPS": _section("Step time against measurement"),
    }
    text = (Path(__file__).parent / "planning_page.txt").read_text(encoding="utf-8")
    for name, value in parts.items():
        text = text.replace("{" + name + "}", value)
    (DOCS / "planning.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
