"""step_time.py --against REF: this working tree's steps beside another commit's, in turn, within the same minutes.

Two trees cannot be imported into one process: each has its own ranks, and those of one sleep while the other's step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

from benchmarks.commit_trees import Tree, two_trees

CONTESTANTS = ("zero3", "hpz", "zeropp", "zero1", "ddp", "pp 2")
RANK = "import sys; from benchmarks.step_time_rank import main; main(*sys.argv[1:])"


class Turn(NamedTuple):
    """Seconds per step: by the clock, of the slowest rank; and of CPU time, of all ranks together."""

    wall: float
    cpu: float


class Round(NamedTuple):
    """A turn of the other commit's tree and of this one, one right after the other."""

    there: Turn
    here: Turn


class TreeRanks:
    """The ranks of one tree; a context manager."""

    def __init__(self, tree: Tree, options: Namespace, folder: str) -> None:
        self.tree = tree
        keys = ("ranks", "contestants", "steps", "dtype", "micro_batches")
        text = json.dumps({key: getattr(options, key) for key in keys})
        self.processes = [
            tree.start(
                *(RANK, str(rank), os.path.join(folder, "store"), text),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(options.ranks)
        ]

    def turn(self, name: str) -> Turn:
        """A contestant's steps, all ranks together."""
        try:
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(f"{name}\n")
                process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answers = [self._answer(process) for process in self.processes]
        return Turn(max(wall for wall, _ in answers), sum(cpu for _, cpu in answers))

    def _answer(self, process: subprocess.Popen) -> tuple[float, float]:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if not words:
            raise self._ended()
        return float(words[0]), float(words[1])

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"{self.tree.name}: a rank has ended; what it said is above")

    def __enter__(self) -> TreeRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            if kind is not None:
                process.kill()
            else:
                process.stdin.close()  # the end of its turns
        for process in self.processes:
            process.wait()


def measure(options: Namespace) -> dict[str, list[Round]]:
    """Rounds of every contestant. The first round warms up and is left out."""
    out: dict[str, list[Round]] = {name: [] for name in options.contestants}
    with (
        two_trees(options.against) as trees,
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as two,
        TreeRanks(trees[0], options, one) as there,
        TreeRanks(trees[1], options, two) as here,
    ):
        for number in range(options.rounds + 1):
            for name, rounds in out.items():
                if number % 2:  # who is first changes
                    other, own = there.turn(name), here.turn(name)
                else:
                    own, other = here.turn(name), there.turn(name)
                if number:
                    rounds.append(Round(other, own))
    return out


def report(ref: str, times: Mapping[str, Sequence[Round]]) -> list[str]:
    """Lines: median seconds per step of both trees, and the ratio of this tree's to the other's within rounds.

    CPU time, of all ranks, is steadier than the clock where other programs take the cores.
    """
    head = "ratio within rounds, median (least to most)"
    lines = [f"{'contestant':10}  {ref:>12}  {'this tree':>12}  {head}  of CPU time"]
    for name, rounds in times.items():
        there = statistics.median(each.there.wall for each in rounds)
        here = statistics.median(each.here.wall for each in rounds)
        clock = ratio([each.here.wall / each.there.wall for each in rounds])
        cpu = ratio([each.here.cpu / each.there.cpu for each in rounds])
        lines.append(f"{name:10}  {there:10.3f} s  {here:10.3f} s  {clock:{len(head)}}  {cpu}")
    return lines


def ratio(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
