"""A run as a program: what is around it from before torch is loaded to the exit status. This needs no torch."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

from megazero.config import RunConfig
from megazero.log.exit_status import ExitStatus
from megazero.log.history import record_end
from megazero.log.streams import log_each_rank
from megazero.mesh.launch import Launch
from megazero.ops.stopping import NotStarted, StopSignals


def run(config: RunConfig, launch: Launch) -> int:
    """Train as configured, and return the exit status. Under --exit-signal-handler signals are handled from here on.

    A signal during the start, in which torch is loaded, ends the process at once.
    """
    if config.logging.log_each_rank:
        try:
            log_each_rank(config.logging.log_dir, launch.rank)
        except ValueError as error:
            print(f"[rank {launch.rank}] {error}", file=sys.stderr, flush=True)
            return ExitStatus.MISTAKE
    with StopSignals() if config.training.exit_signal_handler else nullcontext() as signals:
        try:
            from megazero.train.setup import main

            return main(config, launch, signals)
        except NotStarted as told:
            if launch.rank == 0:
                print(told, flush=True)
                record_end(config.logging.log_dir, told.exit_status, f"{told}")
            os._exit(told.exit_status)  # other ranks may be waiting for this one in a collective
