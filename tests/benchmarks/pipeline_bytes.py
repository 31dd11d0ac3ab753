"""Bytes between nodes of a pipelined step, for both orders of the mesh.

    python tests/benchmarks/pipeline_bytes.py [--rate none] [--micro-batches 2 4 8]

2 nodes (tests/netlab) of 2 or 4 ranks. Counted by megazero, counted by the kernel at a node's interface, and from
formulas. Writes its section of docs/pipeline.md (--out: another folder).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megazero.models import Decoder
from tests.benchmarks.pipeline_bytes_rank import CASES, HIDDEN, NODES, SEQUENCE, VOCABULARY
from tests.benchmarks.pipeline_page import BYTES, PAGE, ROOT, setting, table, write_section
from tests.netlab.lab import Lab, LabUnavailable, parse_rate

HEADER = [
    *("pipelines", "ranks of a node", "TP x PP x DP", "model state", "micro-batches"),
    *("refresh + reduce", "over 2N", "activations", "scalars", "of formula", "interface / counters"),
]
TEXT = """    python tests/benchmarks/pipeline_bytes.py

kB that a node sends to the other in one step (the node that sends most), 2 pipeline stages, 4 layers of hidden
{hidden} (ffn 688, vocabulary {vocabulary}), micro-batches of {sequence} tokens, bf16.

- *inside*: each pipeline lies inside a node and data parallelism crosses nodes (`--use-tp-pp-dp-mapping`). Weight differences
  and gradient sums cross once per step.
- *across*: the default order, with stages on different nodes. Activations and their gradients cross with every micro-batch:
  `micro-batches x tokens x hidden x 2` bytes each way per pipeline, whatever TP. Tied embeddings add one exchange of their
  sums.
- *over 2N*: relative to the whole model in bf16, {elements:.1f}M parameters. *of formula*: counters without scalars over
  `pipeline_bytes_rank.formula`.

zeropp needs two data-parallel ranks per node. With one, its factors are those of zero1, so zero1 with its formats represents
it. {setting}.

{table}
"""


def measure(names: list[str], micro_batches: list[int], rate: str | None = None) -> dict[str, Any]:
    """What pipeline_bytes_rank.run returns, by case. The cases of one number of ranks share their processes.

    Raises LabUnavailable, and RuntimeError with the ranks' output.
    """
    found: dict[str, Any] = {}
    for ranks in sorted({CASES[name].ranks_per_node for name in names}):
        with Lab(NODES, rate) as lab, tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            words = ["--cases", *(name for name in names if CASES[name].ranks_per_node == ranks)]
            words += ["--micro-batches", *map(str, micro_batches), "--result", str(file)]
            done = lab.run(
                [str(ROOT / "tests/benchmarks/pipeline_bytes_rank.py"), *words],
                ranks_per_node=ranks,
                environ={"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
                timeout=600,
            )
            if done.returncode:
                raise RuntimeError(f"{words}: return codes {done.returncodes}\n" + "\n".join(done.outputs))
            found.update(json.loads(file.read_text()))
    return {name: found[name] for name in names}


def elements() -> int:
    """Of the whole model."""
    decoder = Decoder(CASES["across"].config(1).model, device="meta")
    return sum(p.numel() for p in decoder.parameters())


def rows(name: str, results: list[dict[str, Any]]) -> list[list[str]]:
    case, out = CASES[name], []
    dp = NODES * case.ranks_per_node // (2 * case.tp)
    layout = [
        "inside" if case.inside else "across",
        str(case.ranks_per_node),
        f"{case.tp} x 2 x {dp}",
        case.words,
    ]
    for result in results:
        totals = [sum(kinds.values()) for kinds in result["counted"]]
        most = totals.index(max(totals))
        counted, formula = result["counted"][most], result["formula"][most]
        state, scalars = counted.get("refresh", 0) + counted.get("reduce", 0), counted.get("scalar", 0)
        figures = [f"{state / 1e3:.2f}", f"{state / (2 * elements()):.3f}"]
        figures += [f"{n / 1e3:.2f}" for n in (counted.get("pp", 0), scalars)]
        share = (totals[most] - scalars) / sum(formula.values())
        framing = f"{result['sent'][most] / totals[most]:.4f}"
        out.append([*layout, str(result["micro_batches"]), *figures, f"{share:.6f}", framing])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="none", help="of the links; bytes do not depend on it")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, default=PAGE.parent)
    options = parser.parse_args()
    parse_rate(options.rate)
    try:
        found = measure(options.cases, options.micro_batches, options.rate)
    except LabUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    every = [row for name, results in found.items() for row in rows(name, results)]
    sizes = {"sequence": SEQUENCE, "hidden": HIDDEN, "vocabulary": VOCABULARY, "elements": elements() / 1e6}
    text = TEXT.format(**sizes, setting=setting(), table=table(HEADER, every))
    print(text)
    write_section(BYTES, text, options.out / "pipeline.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
