"""The entry point of a rank: signals before torch is loaded, and exit statuses. This module needs no torch."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext, suppress
from typing import NoReturn

from megazero.config import RunConfig
from megazero.config.read.beginning import Beginning
from megazero.config.secrets import secret_options
from megazero.log.exit_status import ExitStatus, end_folder, process_status, record_status
from megazero.log.history import record_end
from megazero.mesh.launch import Launch
from megazero.ops.exit_conditions import NotStarted, StopSignals
from megazero.ops.lease import Lease


def run(config: RunConfig, launch: Launch, beginning: Beginning | None = None) -> int:
    """Train as configured, and return the exit status. Under --exit-signal-handler signals are handled from here on.

    beginning: on the first rank, what it has read of the folders of --load and --save.

    A signal during the start, while torch is loaded, ends the process at once. So does Ctrl-C without that flag, or
    the second Ctrl-C with it. Neither prints a trace: every rank would print its own.

    If an option holds a secret, only the user may read what the run writes: LOG_DIR/config.yaml and the manifests of
    checkpoints have every option as it was given, and copies of checkpoints, too.
    """
    if secret_options(config.values()):
        os.umask(0o077)
    lease = Lease.of(config, launch)
    with StopSignals() if config.training.exit_signal_handler else nullcontext() as signals:
        try:
            from megazero.train.setup import main  # brings torch

            return process_status(ExitStatus(main(config, launch, signals, lease, beginning)))
        except NotStarted as reason:
            _leave(config, launch, lease, reason.exit_status, f"{reason}")
        except KeyboardInterrupt:
            lost = "interrupted: what was not saved is lost (--exit-signal-handler saves at the first Ctrl-C)"
            _leave(config, launch, lease, ExitStatus.INTERRUPTED, lost)
        except Exception:  # main() reports its own: torch cannot be loaded on this node, say
            record_status(end_folder(None), ExitStatus.UNEXPECTED)
            raise


def _leave(config: RunConfig, launch: Launch, lease: Lease, status: ExitStatus, why: str) -> NoReturn:
    """End at once: other ranks may be waiting for this one in a collective. The first rank says why."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if launch.rank == 0:
        if status != ExitStatus.IN_USE:  # which was said when the folder was found in use
            with suppress(OSError):  # perhaps nobody reads it any more
                print(why, flush=True)
        log_dir = config.logging.log_dir
        ours = lease.taker(log_dir) is None
        record_end(log_dir if ours else None, status, why, {"lease": lease.holder.owner})
        lease.release()
    os._exit(process_status(status))
