"""The command ``megazero inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass

from megazero.checkpoint.directory import find_checkpoint
from megazero.config import run_with_arguments
from megazero.config.options.fields import option

USAGE = """usage: megazero inspect CHECKPOINT [flags below]

Describes a checkpoint and checks the bytes of its files. Exit status 0: the files are whole; 1: a file is damaged; 2:
nothing was read.
"""


@dataclass(frozen=True)
class InspectOptions:
    """The words of the command."""

    checkpoint: str = option(
        MISSING, "folder that --save named in training, or one of its iter_* folders", place="CHECKPOINT"
    )
    ckpt_step: int | None = option(None, "iteration to read (default: the newest)", low=0)
    tensors: bool = option(False, "list every tensor")
    check: bool = option(True, "read the files and check their bytes")


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 whole, 1 damaged, 2 nothing was read."""
    return run_with_arguments("inspect", argv, USAGE, InspectOptions, _inspect)


def _inspect(options: InspectOptions) -> int:
    from megazero.convert.inspection import DAMAGED, describe  # brings torch

    path = find_checkpoint(options.checkpoint, options.ckpt_step)
    lines = list(describe(path, options.tensors, options.check))
    print("\n".join(lines))
    return 1 if any(line.endswith(DAMAGED) for line in lines) else 0
