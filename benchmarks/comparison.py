"""megazero, FSDP2, HSDP, DDP and DeepSpeed on nodes joined by a link of a given rate.

    python benchmarks/comparison.py --rates 200mbit 1gbit none --micro-batches 1 4 8 --out docs

Everyone trains the same Llama (8 layers, hidden 256, ffn 688, vocabulary 4096, sequence 128, micro-batch 1) with bf16
parameters and an fp32 master. Within one run of a lab the contestants take turns; bytes are what the kernel counted
at the interface of a node around a contestant's steps, everything included. Writes comparison.json, comparison.md and
comparison.png into --out; a run replaces its rates and micro-batches there and leaves the others, so parts can be run
one by one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.comparison_report import chart, page
from benchmarks.peers import CONTESTANTS, absent
from tests.netlab.lab import Lab, LabUnavailable, parse_rate

ROOT = Path(__file__).resolve().parents[1]


def measure(lab: Lab, micro_batches: int, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """What comparison_rank.py finds at the lab's rate."""
    words = ["--micro-batches", str(micro_batches), "--contestants", *names]
    for option in ("rounds", "most_rounds", "seconds", "turn_seconds"):
        words += ["--" + option.replace("_", "-"), str(getattr(options, option))]
    environ = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [str(ROOT / "benchmarks/comparison_rank.py"), "--result", str(file), *words]
        done = lab.run(command, ranks_per_node=options.ranks_per_node, environ=environ, echo=options.verbose)
        if done.returncode:
            raise RuntimeError(f"at {lab.rate}: return codes {done.returncodes}\n" + "\n".join(done.outputs))
        return {"rate": lab.rate, "micro_batches": micro_batches, **json.loads(file.read_text())}


def merge(stored: dict[str, Any], facts: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """``stored`` with one more result, which replaces the one of its rate and micro-batches.

    Raises ValueError if ``stored`` is of other facts (another lab): they would not be one comparison.
    """
    differ = [key for key in facts if key in stored and stored[key] != facts[key]]
    if differ:
        key = differ[0]
        raise ValueError(
            f"the stored results have {key} {stored[key]!r}, this run has {facts[key]!r}: give another --out"
        )
    new = (result["rate"], result["micro_batches"])
    kept = [r for r in stored.get("results", ()) if (r["rate"], r["micro_batches"]) != new]

    def slow_first(one: dict[str, Any]) -> tuple[float, int]:
        return parse_rate(one["rate"]) or math.inf, one["micro_batches"]

    return {**facts, "results": sorted([*kept, result], key=slow_first)}


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit", "none"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="least turns of each contestant that count")
    parser.add_argument("--most-rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=90, help="per rate and micro-batches, if --rounds fit into it"
    )
    parser.add_argument(
        "--turn-seconds", type=float, default=1, help="a turn has as many steps, at least one"
    )
    parser.add_argument("--verbose", action="store_true", help="show what the ranks print")
    options = parser.parse_args()
    for rate in options.rates:
        parse_rate(rate)
    if not 1 <= options.rounds <= options.most_rounds:
        parser.error(
            f"--rounds {options.rounds}: at least 1, and at most --most-rounds {options.most_rounds}"
        )
    return options


def main() -> int:
    options = parse_options()
    missing = {name: reason for name in options.contestants if (reason := absent(name))}
    for name, reason in missing.items():
        print(f"{name} does not take part: {reason}")
    names = [name for name in options.contestants if name not in missing]
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "comparison.json"
    facts = {
        "nodes": options.nodes,
        "ranks_per_node": options.ranks_per_node,
        "cores": os.cpu_count(),
        "torch": installed("torch"),
        "deepspeed": installed("deepspeed"),
    }
    stored = json.loads(file.read_text()) if file.exists() else {}
    try:
        with Lab(options.nodes) as lab:
            for rate in options.rates:
                lab.shape(rate)
                for micro_batches in options.micro_batches:
                    began = time.monotonic()
                    stored = merge(stored, facts, measure(lab, micro_batches, names, options))
                    file.write_text(json.dumps(stored, indent=1) + "\n")
                    print(f"{rate}, {micro_batches}: {time.monotonic() - began:.0f} s", flush=True)
    except (LabUnavailable, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    file.with_suffix(".md").write_text(page(stored))
    chart(stored["results"], file.with_suffix(".png"))
    print(page(stored))
    return 0


if __name__ == "__main__":
    sys.exit(main())
