"""step_time.py --against REF: this working tree's steps and another commit's take turns within the same minutes.

Each tree trains with its own pretrain_gpt.py on its own ranks (tree_ranks.py). Ranks pause after a turn's last
update, so that one tree's sleep while the other's step. A step is everything that the trainer does in it.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from benchmarks import harness
from benchmarks.commit_trees import TreeRanks, two_trees

MODEL = """
    --model-family llama --num-layers 8 --hidden-size 256 --ffn-hidden-size 688 --num-attention-heads 4
    --seq-length 256 --vocab-size 4096 --lr 1e-4 --weight-decay 0.1 --clip-grad 1.0
    --train-iters 10000 --mock-data --eval-iters 0
"""
PRESETS = ("zero3", "hpz", "zeropp", "zero1", "ddp")
PIPELINE = "pp 2"
CONTESTANTS = (*PRESETS, PIPELINE)


class Turn(NamedTuple):
    """Seconds per step: by the clock, of the slowest rank; and of CPU time, of all ranks together."""

    wall: float
    cpu: float


class Round(NamedTuple):
    """A turn of the other commit's tree and of this one, one right after the other."""

    there: Turn
    here: Turn


def flags_of(name: str, options: Namespace) -> list[str]:
    """Return a contestant's command line: 512 tokens a rank and step, in 2 nodes."""
    ranks = options.ranks
    if name == PIPELINE:
        own = f"zero1 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size {2 * ranks}"
    else:
        own = f"{name} --micro-batch-size 2 --global-batch-size {2 * options.micro_batches * ranks}"
    words = f"{MODEL} --zero-preset {own} --{options.dtype} --ranks-per-node {max(1, ranks // 2)}"
    return words.split()


def measure(options: Namespace) -> dict[str, list[Round]]:
    """Measure the contestants one after the other; return their rounds, without the first, which warms up."""
    out: dict[str, list[Round]] = {}
    with two_trees(options.against) as trees:
        for name in options.contestants:
            with ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                both = [stack.enter_context(TreeRanks(tree)) for tree in trees]
                for number, ranks in enumerate(both):
                    flags = [*flags_of(name, options), "--log-dir", f"{folder}/{number}"]
                    job = {"ranks": options.ranks, "flags": flags, "steps": options.steps}
                    ranks.ask({**job, "log": f"{folder}/{number}"})
                rounds = []
                for number in range(options.rounds + 1):  # who is first changes
                    turns = {i: Turn(*both[i].ask("turn")) for i in ((0, 1) if number % 2 else (1, 0))}
                    rounds.append(Round(turns[0], turns[1]))
                out[name] = rounds[1:]
    return out


def report(ref: str, times: Mapping[str, Sequence[Round]]) -> list[str]:
    """Return lines of both trees' median seconds per step, and the ratio of this tree's to the other's within rounds.

    CPU time, of all ranks, is steadier than the clock where other programs take the cores.
    """
    head = "ratio within rounds, median (least to most)"
    lines = [f"{'contestant':10}  {ref:>12}  {'this tree':>12}  {head}  of CPU time"]
    for name, rounds in times.items():
        there = statistics.median(each.there.wall for each in rounds)
        here = statistics.median(each.here.wall for each in rounds)
        clock = harness.spread([each.here.wall / each.there.wall for each in rounds])
        cpu = harness.spread([each.here.cpu / each.there.cpu for each in rounds])
        lines.append(f"{name:10}  {there:10.3f} s  {here:10.3f} s  {clock:{len(head)}}  {cpu}")
    return lines
