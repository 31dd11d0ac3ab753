"""Write docs/guide/planning.md and its chart: how to plan, a model from question to script, and what papers measured.

    python -m benchmarks.planning.page        # about two minutes on one core, most of it the searches

``tests/unit/plan/test_page.py`` keeps the tables that need no search current.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import tempfile
from pathlib import Path

from benchmarks import harness
from benchmarks.planning.papers import BLOOM, bloom_layout, table_4
from megazero.config.options.cluster import load_cluster
from megazero.plan.command import main as plan
from megazero.plan.memory import GIB
from megazero.plan.options import with_stand_ins
from megazero.plan.report import describe, layout_flags, model_flops_utilisation
from megazero.plan.search import Found, Search
from megazero.plan.simulate import simulate

PAGE = harness.DOCS / "guide" / "planning.md"
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


def memory_table() -> str:
    rows = []
    for model, tokens, system, runs, sizes in table_4():
        paper, ours = ("runs" if fits else "out of memory" for fits in (runs, sizes["none"] <= 30.5))
        rows.append(
            [model, str(tokens), system, paper, f"{sizes['none']:.1f}: {ours}", f"{sizes['full']:.1f}"]
        )
    header = ["model", "tokens", "system", "paper", "predicted GiB of 30.5", "with full recompute"]
    return harness.table(header, rows)


def bloom_table() -> str:
    layout = bloom_layout()
    timing = simulate(layout)
    return (
        f"{describe(layout)}: {layout.memory.total / GIB:.1f} of {layout.room / GIB:.1f} GiB on the fullest rank, "
        f"{timing.seconds:.1f} s a step, MFU {model_flops_utilisation(layout, timing.seconds):.1%}."
    )


def transcript(policy: str, chart: Path | None = None) -> tuple[str, list[str]]:
    """Return what the command prints for the 70B question, and the flags of its first layout."""
    with tempfile.TemporaryDirectory() as folder:
        out = io.StringIO()
        words = shlex.split(f"{QUESTION} --loss-policy {policy} --plan-output {folder} --explain {OTHER}")
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


def main() -> None:
    harness.parser(__doc__).parse_args()
    exact, _ = transcript("exact")
    quantised, flags = transcript("zeropp", PAGE.with_suffix(".png"))
    rather = search_best(BLOOM, "a100", "exact", 1)[0]
    parts = {
        "QUESTION": QUESTION,
        "OTHER": OTHER,
        "EXACT": exact,
        "ZEROPP": quantised,
        "MODEL": MODEL,
        "FLAGS": shlex.join(flags),
        "TABLE4": memory_table(),
        "BLOOM": bloom_table(),
        "RATHER": _rather(rather),
        "MEMORY": harness.section(PAGE, "Memory against measurement"),
        "STEPS": harness.section(PAGE, "Step time against measurement"),
    }
    text = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for name, value in parts.items():
        text = text.replace("{" + name + "}", value)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    harness.start(main)
