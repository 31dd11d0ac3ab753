"""The entry point of a rank: signals before torch is loaded, and exit statuses. This module needs no torch."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext, suppress
from typing import NoReturn

from megazero.config import RunConfig
from megazero.log.exit_status import ExitStatus, process_status
from megazero.log.history import record_end
from megazero.mesh.launch import Launch
from megazero.ops.exit_conditions import NotStarted, StopSignals


def run(config: RunConfig, launch: Launch) -> int:
    """Train as configured, and return the exit status. Under --exit-signal-handler signals are handled from here on.

    A signal during the start, while torch is loaded, ends the process at once. So does Ctrl-C without that flag, or
    the second Ctrl-C with it. Neither prints a trace: every rank would print its own.
    """
    with StopSignals() if config.training.exit_signal_handler else nullcontext() as signals:
        try:
            from megazero.train.setup import main  # brings torch

            return process_status(ExitStatus(main(config, launch, signals)))
        except NotStarted as reason:
            _leave(config, launch, reason.exit_status, f"{reason}")
        except KeyboardInterrupt:
            lost = "interrupted: what was not saved is lost (--exit-signal-handler saves at the first Ctrl-C)"
            _leave(config, launch, ExitStatus.INTERRUPTED, lost)


def _leave(config: RunConfig, launch: Launch, status: ExitStatus, why: str) -> NoReturn:
    """End at once: other ranks may be waiting for this one in a collective. The first rank says why."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if launch.rank == 0:
        with suppress(OSError):  # perhaps nobody reads it any more
            print(why, flush=True)
        record_end(config.logging.log_dir, status, why)
    os._exit(process_status(status))
