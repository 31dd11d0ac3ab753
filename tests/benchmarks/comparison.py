"""megazero, FSDP2, HSDP, DDP and DeepSpeed on nodes joined by a link of a given rate.

    python tests/benchmarks/comparison.py --rates 200mbit 1gbit none --micro-batches 1 4 8 --out docs/comparison

Everyone trains the same Llama (8 layers, hidden 256, ffn 688, vocabulary 4096, sequence 128, micro-batch 1) with
bf16 parameters and an fp32 master. Within one run of a lab the contestants take turns; bytes are what the kernel
counted at the interface of a node around a contestant's steps, everything included. The loss after equally many
steps shows that they train alike. Writes comparison.json, .md
and .png into --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.peers import CONTESTANTS, absent
from tests.netlab.lab import Lab, LabUnavailable, parse_rate

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "FSDP2"


def run(options: argparse.Namespace, names: list[str]) -> list[dict[str, Any]]:
    """One result per rate and number of micro-batches, all in one lab."""
    words = ["--rounds", str(options.rounds), "--steps", str(options.steps), "--contestants", *names]
    words += ["--micro-batches", *map(str, options.micro_batches)]
    environ = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    results = []
    with Lab(options.nodes) as lab, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        for rate in options.rates:
            lab.shape(rate)
            command = [str(ROOT / "tests/benchmarks/comparison_rank.py"), "--result", str(file), *words]
            done = lab.run(
                command, ranks_per_node=options.ranks_per_node, environ=environ, echo=options.verbose
            )
            if done.returncode:
                raise RuntimeError(f"at {rate}: return codes {done.returncodes}\n" + "\n".join(done.outputs))
            results += [{"rate": rate, **each} for each in json.loads(file.read_text())]
            print(table(results[-len(options.micro_batches) :]), flush=True)
    return results


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Per contestant: bytes per step of the node that sent most over 2N, seconds per step of each round, speed over
    the baseline's in the same round (empty without it), and the training loss after all rounds."""
    seconds = result["seconds"]
    base = seconds.get(BASELINE)
    out = []
    for name, took in seconds.items():
        share = statistics.mean(max(turn) for turn in result["sent"][name]) / (2 * result["elements"])
        speeds = [b / t for b, t in zip(base, took, strict=True)] if base else []
        loss = result["loss"][name]
        out.append({"name": name, "share": share, "seconds": took, "speeds": speeds, "loss": loss})
    return out


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: one table per rate and number of micro-batches, fastest first."""
    text = []
    for result in results:
        text += ["", f"### {result['rate']}, {result['micro_batches']} micro-batch(es)", ""]
        text += [
            f"| | bytes per step / 2N | s per step (range) | speed / {BASELINE} (range) |",
            "|---|---|---|---|",
        ]
        for row in sorted(rows(result), key=lambda row: statistics.median(row["seconds"])):
            t, v = row["seconds"], row["speeds"]
            speed = f"{statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})" if v else "-"
            step = f"{statistics.median(t):.3f} ({min(t):.3f} to {max(t):.3f})"
            text.append(f"| {row['name']} | {row['share']:.2f} | {step} | {speed} | {row['loss']:.4f} |")
    return "\n".join(text).lstrip("\n")


def chart(results: list[dict[str, Any]], file: Path) -> None:
    """Bars of seconds per step with the bytes beside them; a row of panels per rate, a column per micro-batches."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(r["rate"] for r in results))
    counts = list(dict.fromkeys(r["micro_batches"] for r in results))
    bars = len(results[0]["seconds"])
    figure = Figure(figsize=(5.5 * len(counts), (1 + 0.28 * bars) * len(rates)), layout="constrained")
    panels = figure.subplots(len(rates), len(counts), squeeze=False)
    for result in results:
        panel = panels[rates.index(result["rate"])][counts.index(result["micro_batches"])]
        ordered = sorted(rows(result), key=lambda row: -statistics.median(row["seconds"]))
        middle = [statistics.median(row["seconds"]) for row in ordered]
        spread = [
            [m - min(row["seconds"]) for m, row in zip(middle, ordered, strict=True)],
            [max(row["seconds"]) - m for m, row in zip(middle, ordered, strict=True)],
        ]
        colors = ["tab:orange" if row["name"].startswith("megazero") else "tab:gray" for row in ordered]
        panel.barh([row["name"] for row in ordered], middle, xerr=spread, color=colors, ecolor="black")
        for y, row in enumerate(ordered):
            panel.annotate(
                f"{row['share']:.2f} x 2N",
                (max(row["seconds"]), y),
                (4, 0),
                textcoords="offset points",
                va="center",
                size=8,
            )
        panel.margins(x=0.2)
        panel.set_title(f"{result['rate']}, {result['micro_batches']} micro-batch(es)")
        panel.set_xlabel("s per step; bytes sent per step by a node")
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit", "none"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant that count")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--verbose", action="store_true", help="show what the ranks print")
    options = parser.parse_args()
    for rate in options.rates:
        parse_rate(rate)
    reasons = {name: absent(name) for name in options.contestants}
    missing = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in missing.items():
        print(f"{name} does not take part: {reason}")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        results = run(options, [name for name in options.contestants if name not in missing])
    except LabUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    facts = {"nodes": options.nodes, "ranks_per_node": options.ranks_per_node, "steps": options.steps}
    file = options.out / "comparison"
    file.with_suffix(".json").write_text(
        json.dumps({**facts, "missing": missing, "results": results}, indent=1)
    )
    file.with_suffix(".md").write_text(table(results) + "\n")
    chart(results, file.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
