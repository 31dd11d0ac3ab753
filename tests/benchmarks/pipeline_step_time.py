"""Two pipeline stages under data parallelism of 2, against torch's pipelining with FSDP2, on links of a given rate.

    python tests/benchmarks/pipeline_step_time.py [--rates none 1gbit 200mbit] [--rounds 7]

2 nodes of 2 ranks (tests/netlab). Everyone trains the same decoder, cut at the same layer, on the same micro-batches
with 1F1B, in fp32, with fused AdamW and clipping by the global norm. Contestants take turns; ratios are within a
round. Writes its section of docs/pipeline.md (--out: another folder).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.pipeline_page import PAGE, ROOT, STEP_TIME, setting, table, write_section
from tests.benchmarks.pipeline_step_time_rank import NAMES, QUANTISED, WHOLE
from tests.netlab.lab import Lab, LabUnavailable, parse_rate

# Each with the peer whose communication it has: gathers once or with every use, reductions once or with every
# micro-batch. Only the peer's default form keeps gradients whole while parameters are dropped.
PAIRS = {
    "zero1": "FSDP2 kept",
    "zero2": "FSDP2 kept",
    "zero3": "FSDP2",
    WHOLE: "FSDP2",
    QUANTISED: "FSDP2 kept",
}
TEXT = """    python tests/benchmarks/pipeline_step_time.py

2 stages x 2 data-parallel ranks on 2 nodes of 2 ranks, 1F1B, {micro_batches} micro-batches of {micro_batch} x
{sequence} tokens per data-parallel rank, {layers} layers of hidden 256 (ffn 688, vocabulary 4096), fp32, fused AdamW,
clipping.

torch runs `Schedule1F1B` of `torch.distributed.pipelining` with static shapes and `fully_shard` on every layer and the stage.
It keeps gradients whole and reduces them once per step, as zero1 does. *kept*: `reshard_after_forward=False`, which gathers
parameters once per step instead of at every use. zero2 and zero3 shard gradients and reduce with every micro-batch.
*whole gradients*: `--zero-gradients-lifetime step`, which keeps them whole until one reduction per step. *zeropp's formats*:
zero1 with 4-bit weight differences and INT4 gradients across nodes, which equals zeropp at one data-parallel rank per node.

Bytes: of the node that sent most. Ratios: of medians (least to most round by round); {rounds} rounds, contestants in turn;
{setting}. All losses of a step agree within {agree:.1e}, except with quantised messages.

{table}
"""


def measure(lab: Lab, options: argparse.Namespace) -> dict[str, Any]:
    words = ["--contestants", *options.contestants]
    for option in ("rounds", "micro_batches", "micro_batch", "sequence", "layers"):
        words += ["--" + option.replace("_", "-"), str(getattr(options, option))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [str(ROOT / "tests/benchmarks/pipeline_step_time_rank.py"), "--result", str(file), *words]
        environ = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        done = lab.run(command, ranks_per_node=2, environ=environ, timeout=options.timeout)
        if done.returncode:
            raise RuntimeError(f"at {lab.rate}: return codes {done.returncodes}\n" + "\n".join(done.outputs))
        return json.loads(file.read_text())


def disagreement(results: dict[str, Any]) -> float:
    """The largest relative difference of two contestants' losses in one step, where messages are exact."""
    exact = (result["losses"] for name, result in results.items() if not name.startswith(QUANTISED))
    columns = zip(*exact, strict=True)
    return max((max(column) - min(column)) / min(column) for column in columns)


def rows(rate: str, results: dict[str, Any]) -> list[list[str]]:
    out = []
    for name, result in results.items():
        who, order = name.rsplit(", ", 1)
        seconds, other = result["seconds"], results.get(f"{PAIRS.get(who)}, {order}")
        ratio = ""
        if other:
            rounds = [a / b for a, b in zip(seconds, other["seconds"], strict=True)]
            whole = statistics.median(seconds) / statistics.median(other["seconds"])
            ratio = f"{whole:.2f} ({min(rounds):.2f} to {max(rounds):.2f}) of {PAIRS[who]}"
        ms = f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
        out.append([rate, order, who, ms, f"{statistics.median(result['sent']) / 1e6:.2f}", ratio])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit", "200mbit"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--contestants", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--timeout", type=float, default=1200, help="seconds per rate")
    parser.add_argument("--out", type=Path, default=PAGE.parent)
    options = parser.parse_args()
    for rate in options.rates:
        parse_rate(rate)
    every, agree = [], -math.inf
    try:
        with Lab(2) as lab:
            for rate in options.rates:
                lab.shape(rate)
                results = measure(lab, options)
                agree = max(agree, disagreement(results))
                every += rows(rate, results)
    except LabUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    header = ["rate", "order", "contestant", "s per step", "MB sent by a node", "ratio"]
    shape = {
        key: getattr(options, key) for key in ("micro_batches", "micro_batch", "sequence", "layers", "rounds")
    }
    text = TEXT.format(**shape, setting=setting(), agree=agree, table=table(header, every))
    print(text)
    write_section(STEP_TIME, text, options.out / "pipeline.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
