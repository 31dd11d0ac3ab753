"""Step time of megatron-core on slow links: as it is, in two exact hops, and with quantised messages.

    python benchmarks/megatron_step_time.py [--rate 200mbit] [--rounds 5] [--micro-batches 1 4]

2 nodes of 2 ranks (tests/netlab), DP 4: megatron-core's GPTModel, DistributedDataParallel and DistributedOptimizer in
bf16 on CPUs (tests/megatron). Contestants take turns; each builds its model anew and warms up with 2 steps. Prints
s per step, bytes into a node per step, and ratios to the exact hops round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.megatron_step_time_rank import CONTESTANTS
from benchmarks.pipeline_page import ROOT, table
from tests.netlab.lab import Lab, LabUnavailable

BASE = "exact hops"


def measure(lab: Lab, options: argparse.Namespace) -> dict[str, Any]:
    words = [f"--rounds={options.rounds}", f"--steps={options.steps}"]
    words += [
        "--micro-batches",
        *map(str, options.micro_batches),
        *(["--overlap"] if options.overlap else []),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [str(ROOT / "benchmarks/megatron_step_time_rank.py"), f"--result={file}", *words]
        environ = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        done = lab.run(command, ranks_per_node=2, environ=environ, timeout=options.timeout)
        if done.returncode:
            raise RuntimeError(f"return codes {done.returncodes}\n" + "\n".join(done.outputs))
        return json.loads(file.read_text())


def rows(result: dict[str, Any], micro_batches: int) -> list[list[str]]:
    """One row a contestant. A result has its seconds and bytes per step by round."""
    found = {name: result["by_case"][f"{name} {micro_batches}"] for name in CONTESTANTS}
    out = []
    for name, each in found.items():
        seconds, base = each["seconds"], found[BASE]["seconds"]
        ratios = [a / b for a, b in zip(seconds, base, strict=True)]
        into = statistics.median(each["received"]) / result["parameters"]
        whole = statistics.median(seconds) / statistics.median(base)
        out.append(
            [
                str(micro_batches),
                name,
                f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
                f"{into:.2f} N",
                f"{whole:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            ]
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a contestant's turn")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--overlap", action="store_true", help="gradients and parameters, as Megatron overlaps"
    )
    parser.add_argument("--timeout", type=float, default=1200)
    options = parser.parse_args()
    try:
        with Lab(2, options.rate) as lab:
            result = measure(lab, options)
    except LabUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    header = ["micro-batches", "messages", "s per step", "into a node", f"of {BASE}"]
    print(
        f"N = {result['parameters'] / 1e6:.1f}M parameters, {options.rate}, {options.rounds} rounds, "
        f"overlap {'on' if options.overlap else 'off'}"
    )
    print(table(header, [row for count in options.micro_batches for row in rows(result, count)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
