"""Where megazero was behind, in one table: each row beside its peer, in turn, within the same minutes.

    python benchmarks/behind.py [--rounds 7] [--parts ddp pipeline zeropp 1,1,d] [--against 7cc67f7]

- ddp: presets ddp and zero1 beside torch's DDP; 4 ranks as 2 nodes of 2, no lab.
- pipeline: zero3 under PP 2, with either lifetime of gradients, beside torch's pipelining with FSDP2, which reduces
  once per step; in a lab, at every rate.
- zeropp: preset zeropp at 4 micro-batches beside another commit's.
- 1,1,d: differences of weights and INT4 gradients at 4 micro-batches beside DDP with one all-reduce per step, at
  200 Mb/s; and beside the same step without communication, which is the share of it that is computing.

The programs are those of step_time.py, pipeline_step_time.py and comparison.py. A lab needs namespaces; without them
the parts that need one say so.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import comparison, pipeline_step_time, step_time, step_time_against
from benchmarks.peers import ALONE
from benchmarks.pipeline_page import table
from benchmarks.pipeline_step_time_rank import ACROSS, INSIDE, WHOLE
from tests.netlab.lab import Lab, LabUnavailable

RATES = ("none", "1gbit", "200mbit")
HEADER = ["what", "rate", "s per step", "beside", "s per step", "ratio within rounds", "at most"]


class Row(NamedTuple):
    """own, other: seconds per step of every round. target: the ratio that is asked for, or None."""

    what: str
    rate: str
    own: Sequence[float]
    beside: str
    other: Sequence[float]
    target: float | None = None

    def cells(self) -> list[str]:
        ratios = [a / b for a, b in zip(self.own, self.other, strict=True)]
        times = (step_time_against.ratio(self.own), step_time_against.ratio(self.other))
        target = "" if self.target is None else f"{self.target:.2f}"
        shown = step_time_against.ratio(ratios)
        return [self.what, self.rate, times[0], self.beside, times[1], shown, target]


def ddp(options: argparse.Namespace) -> Iterator[Row]:
    peer = "torch ddp"
    asked = argparse.Namespace(
        rounds=options.rounds, steps=1, micro_batches=1, dtype="fp32", only=["ddp", "zero1", peer]
    )
    seconds, *_ = step_time.launch(4, asked)
    for preset in ("ddp", "zero1"):
        yield Row(preset, "none", seconds[preset], peer, seconds[peer], 1.02)


def pipeline(options: argparse.Namespace) -> Iterator[Row]:
    names = [f"{who}, {order}" for order in (ACROSS, INSIDE) for who in ("zero3", WHOLE, "FSDP2")]
    asked = argparse.Namespace(
        contestants=names, rounds=options.rounds, micro_batches=4, micro_batch=2, sequence=256, layers=8
    )
    asked.timeout = 1200
    with Lab(2) as lab:
        for rate in options.rates:
            lab.shape(rate)
            found = pipeline_step_time.measure(lab, asked)
            for order in (ACROSS, INSIDE):
                other = found[f"FSDP2, {order}"]["seconds"]
                for who in ("zero3", WHOLE):
                    name = f"{who}, {order}"
                    yield Row(name, rate, found[name]["seconds"], "FSDP2", other, 1.05)


def zeropp(options: argparse.Namespace) -> Iterator[Row]:
    asked = argparse.Namespace(
        against=options.against, contestants=["zeropp"], rounds=options.rounds, ranks=4, steps=1
    )
    asked.dtype, asked.micro_batches = "fp32", 4
    rounds = step_time_against.measure(asked)["zeropp"]
    own, other = [r.here.wall for r in rounds], [r.there.wall for r in rounds]
    yield Row("zeropp, 4 micro-batches", "none", own, options.against, other, 0.9)


def one_one_d(options: argparse.Namespace) -> Iterator[Row]:
    own, peer, rate = "megazero 1,1,d delta", "DDP once", "200mbit"
    asked = argparse.Namespace(ranks_per_node=2, verbose=False, rounds=options.rounds, seconds=1)
    asked.most_rounds, asked.turn_seconds = options.rounds, 1
    with Lab(2) as lab:
        lab.shape(rate)
        seconds = comparison.measure(lab, 4, [own, peer, ALONE], asked)["seconds"]
    yield Row(own, rate, seconds[own], peer, seconds[peer])
    yield Row(f"{ALONE}: the share that computes", rate, seconds[ALONE], own, seconds[own])


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "ddp": ddp,
    "pipeline": pipeline,
    "zeropp": zeropp,
    "1,1,d": one_one_d,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="of the pipeline part")
    parser.add_argument("--against", default="7cc67f7", metavar="REF", help="the commit of the zeropp part")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[list[str]] = []
    missing = []
    for part in options.parts:
        try:
            for row in PARTS[part](options):
                rows.append(row.cells())
                print(" | ".join(rows[-1]), flush=True)
        except LabUnavailable as error:
            missing.append(f"{part}: {error}")
    print(f"\nMedian (least to most) of {options.rounds} rounds.\n\n{table(HEADER, rows)}")
    print("\n".join(missing), file=sys.stderr)
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
