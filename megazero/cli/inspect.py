"""The command ``megazero inspect``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass

from megazero.checkpoint.directory import find_checkpoint
from megazero.config import run_with_arguments
from megazero.config.options.fields import option
from megazero.config.secrets import redact

USAGE = """usage: megazero inspect CHECKPOINT [OTHER] [flags below]

Describes a checkpoint and checks the bytes of its files. With OTHER it prints the differences of two checkpoints.
Exit status 0: the files are whole, or the two are equal; 1: a file is damaged, or they differ; 2: nothing was read.
"""


@dataclass(frozen=True)
class InspectOptions:
    """The words of the command."""

    checkpoint: str = option(
        MISSING, "folder that --save named in training, or one of its iter_* folders", place="CHECKPOINT"
    )
    other: str | None = option(None, "second checkpoint, to compare with the first", place="OTHER")
    ckpt_step: int | None = option(None, "iteration of CHECKPOINT to read (default: the newest)", low=0)
    tensors: bool = option(False, "list every tensor")
    check: bool = option(True, "read the files and check their bytes")


def main(argv: Sequence[str]) -> int:
    """Return the exit status: 0 whole or equal, 1 damaged or different, 2 nothing was read."""
    return run_with_arguments("inspect", argv, USAGE, InspectOptions, _inspect)


def _inspect(options: InspectOptions) -> int:
    from megazero.convert.inspection import DAMAGED, describe, differences  # brings torch

    path = find_checkpoint(options.checkpoint, options.ckpt_step)
    if options.other is not None:
        lines = list(differences(path, find_checkpoint(options.other)))
        print(redact("\n".join(lines)) or "no difference")
        return 1 if lines else 0
    lines = list(describe(path, options.tensors, options.check))
    print(redact("\n".join(lines)))
    return 1 if any(line.endswith(DAMAGED) for line in lines) else 0
