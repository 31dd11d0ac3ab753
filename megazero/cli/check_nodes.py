"""The command ``megazero check-nodes``: started on every rank, or on one node alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from megazero.config import run_with_arguments
from megazero.config.options.fields import option
from megazero.config.options.sections import TrainingConfig
from megazero.config.run import all_options
from megazero.log.exit_status import ExitStatus, status_of
from megazero.mesh.launch import Launch, read_launch

USAGE = """usage: srun megazero check-nodes --save FOLDER [flags below]
       megazero check-nodes [flags below]

Checks nodes as --health-check does at the start of a run: devices, memory, and whether every node sees the folder.
Without a launcher it checks this node, as in a prolog. Prints the faults of each node, and --exclude= with the nodes
to leave out. Exit status 0: all is well.
"""


@dataclass(frozen=True)
class CheckOptions:
    """The flags of the command."""

    save: str | None = option(None, "folder that all nodes share")
    checkpoint_bytes: int = option(0, "bytes of a checkpoint, for which the folder must have room", low=0)
    keep_last: int | None = option(None, "number of checkpoints that the run keeps", low=1)
    device: str = option("auto", "device to check", choices=("auto", "cpu", "cuda"))
    timeout: float = option(60.0, "seconds to wait for the other ranks", above=0)


def main(argv: Sequence[str]) -> int:
    """Return the exit status of a wrong command line; else leave with the status of the check."""
    return run_with_arguments(
        "check-nodes", argv, USAGE, CheckOptions, lambda options: _leave(report(options, read_launch()))
    )


def _leave(status: ExitStatus) -> NoReturn:
    """End at once: the others may have left, and their connections are not waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def report(options: CheckOptions, launch: Launch) -> ExitStatus:
    """Check, print what was found, and return the exit status."""
    import torch.distributed as dist

    from megazero.ops.health import Storage, check_health  # brings torch
    from megazero.train.distributed import start_rank  # brings torch

    training = TrainingConfig(device=options.device, distributed_init_timeout_minutes=options.timeout / 60)
    save = Storage(Path(options.save), options.checkpoint_bytes, options.keep_last) if options.save else None
    try:
        device, _ = start_rank(training, launch, timedelta(seconds=options.timeout))
        notes = check_health(launch.host, device, save)
    except ValueError as error:
        if not dist.is_initialized():  # this rank alone may know: the others wait for it
            print(f"{launch.host}, rank {launch.rank}: {error}", file=sys.stderr, flush=True)
        elif launch.rank == 0:  # the same on all ranks
            print(error, file=sys.stderr, flush=True)
        time.sleep(1)  # srun ends all ranks with the first that leaves
        return status_of(error)
    except RuntimeError as error:  # of a collective: this rank alone knows
        text = f"{error}".replace(all_options()["distributed_init_timeout_minutes"].flag, "--timeout")
        print(f"{launch.host}, rank {launch.rank}: {text}", file=sys.stderr, flush=True)
        return ExitStatus.RANK_LOST
    if launch.rank == 0:
        print("\n".join(notes), flush=True)
    return ExitStatus.FINISHED
