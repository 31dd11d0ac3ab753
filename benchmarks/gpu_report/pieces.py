"""The pieces of the report, and the program that runs one: python -m benchmarks.gpu_report.pieces NAME ..."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Piece:
    """One section of the page. run: 'module.function' of this package. seconds: at most, on a card.

    environment: of its process in a rehearsal.
    """

    name: str
    title: str
    run: str
    seconds: int
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return self.run.partition(".")[0]


# In the order in which they run: what tells most for its time first, should the time of all (--minutes) be short.
# Seconds are what an H100 took, and a third more.
PIECES = (
    Piece("nccl", "Several ranks on one card", "nccl.run", 200),
    Piece("kernels", "Bandwidth of the kernels", "kernels.run", 40, {"TRITON_INTERPRET": "1"}),
    Piece("train-1b", "Training, 1B parameters", "training.run_one", 65),
    Piece("train-experts", "Training, a mixture of experts", "training.run_mixture", 70),
    Piece("train-experts-4", "The mixture with four micro-batches", "training.run_mixture_four", 70),
    Piece("memory", "Peak memory against the formula", "memory.run", 20),
    Piece("race", "The race of hpZ", "race.run", 20),
    Piece("compile-1b", "Compiled layers, 1B parameters", "training.run_one_compiled", 90),
    Piece("attention", "Attention backends", "attention.run", 90),
    Piece("train-3b", "Training, 3B parameters", "training.run_three", 80),
    Piece("compile-3b", "Compiled layers, 3B parameters", "training.run_three_compiled", 120),
)
BY_NAME = {piece.name: piece for piece in PIECES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=BY_NAME)
    parser.add_argument("file", type=Path, help="where its rows are kept")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--rehearsal", action="store_true")
    options = parser.parse_args()
    import torch

    from benchmarks.gpu_report.record import Record
    from benchmarks.gpu_report.setting import Setting

    if options.rehearsal:
        torch.set_num_threads(1)
    setting = Setting(options.rehearsal, options.file.parent, options.seconds)
    module, _, function = BY_NAME[options.name].run.partition(".")
    getattr(importlib.import_module(f"benchmarks.gpu_report.{module}"), function)(
        setting, Record(options.file)
    )


if __name__ == "__main__":
    main()
