"""Two hops, inside the node and across, against one collective over all ranks, on links of a given rate.

    python benchmarks/hierarchy.py [--rates 200mbit 1gbit none] [--elements 1 4] [--json FILE]

Gather and reduction of one unit with identity codecs, by the engine's hops in its order; and whole zero3 steps of the
engine, once with its nodes and once told that all ranks share one node, which makes its layout and its collectives
flat. Within a case the contestants take turns; bytes are what the kernel counted at a node's interface.
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

from tests.netlab.lab import Lab, LabUnavailable, parse_rate

ROOT = Path(__file__).resolve().parents[1]


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One result per rate and case, all in one lab."""
    words = ["--rounds", str(options.rounds), "--repeats", str(options.repeats)]
    words += ["--elements", *map(str, options.elements)]
    results = []
    with Lab(options.nodes) as lab, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        for rate in options.rates:
            lab.shape(rate)
            done = lab.run(
                [str(ROOT / "benchmarks/hierarchy_rank.py"), "--result", str(file), *words],
                ranks_per_node=options.ranks_per_node,
                environ={"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
            )
            if done.returncode:
                raise RuntimeError(f"at {rate}: return codes {done.returncodes}\n" + "\n".join(done.outputs))
            results += [{"rate": rate, **case} for case in json.loads(file.read_text())]
    return results


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(results: list[dict[str, Any]]) -> str:
    """Markdown. A case's first contestant takes two hops; the others' ratios are to it, round by round."""
    text = [
        "| rate | case | contestant | ms (range) | MB sent by a node | flat / two hops (range) |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        first, *_ = result["seconds"]
        for name, took in result["seconds"].items():
            ratios = [t / base for t, base in zip(took, result["seconds"][first], strict=True)]
            ms, sent = spread([t * 1e3 for t in took], 1), statistics.median(result["sent"][name]) / 1e6
            ratio = "" if name == first else spread(ratios, 2)
            text.append(f"| {result['rate']} | {result['case']} | {name} | {ms} | {sent:.2f} | {ratio} |")
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit", "none"])
    parser.add_argument("--elements", type=int, nargs="+", default=[1, 4], help="of the unit, in Mi (2^20)")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant that count")
    parser.add_argument("--repeats", type=int, default=3, help="operations or steps of a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for rate in options.rates:
        parse_rate(rate)
    try:
        results = run(options)
    except LabUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
