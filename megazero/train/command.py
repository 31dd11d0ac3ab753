"""The command ``megazero train``: it trains on the ranks of a launcher, or starts ranks on this machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from megazero.config import ConfigError, World, begun, parse
from megazero.config.read.beginning import read_beginning
from megazero.config.read.data_files import refuse_missing_data
from megazero.config.read.folders import make_folders
from megazero.log.exit_status import ExitStatus, end_folder, record_status, report_to_torchrun, status_of
from megazero.mesh.launch import is_first, take_launch
from megazero.mesh.starter import start_again
from megazero.train.entry_point import run


def main(argv: Sequence[str]) -> int:
    """Return the exit status (log/exit_status.py). Mistakes are told in a fraction of a second, before torch."""
    try:
        launch, ranks, flags = take_launch(argv)
    except ValueError as error:
        return _refuse(error, is_first())
    try:
        world = World(ranks, ranks) if ranks else World(launch.world_size, launch.local_world_size or 0)
        config, beginning = parse(flags, world), None
        if launch.rank == 0:  # it reads the folders of --load and --save, and tells the others
            beginning = read_beginning(config.values())
            config = begun(config, world, beginning)
            refuse_missing_data(config)
            make_folders(config)
    except (ConfigError, OSError) as error:
        return _refuse(error, launch.rank == 0, "\n--help lists every flag")
    except SystemExit as ended:  # --help is printed
        return int(ended.code or 0)
    if ranks is not None:
        good = (ExitStatus.FINISHED, ExitStatus.STOPPED)
        return start_again(argv, flags, ranks, device=config.training.device, good=good)
    return run(config, launch, beginning)


def _refuse(error: ValueError | OSError, first: bool, hint: str = "") -> ExitStatus:
    """Say what keeps all ranks from starting, a mistake or the storage, on one of them. Returns its exit status.

    Ranks come at different times, and the first may be late.
    """
    status, said = status_of(error), f"{error}{hint if isinstance(error, ConfigError) else ''}"

    def tell() -> None:
        print(said, file=sys.stderr, flush=True)
        report_to_torchrun(said)

    # Launchers end all ranks with the first that leaves: let the one that speaks be it. A rank that is ended has
    # nothing to add (torchrun describes each that failed); else all say the same status.
    folder = end_folder(None)
    if folder is not None or first:
        record_status(folder, status, tell)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitStatus.FINISHED))
        time.sleep(1)
    return status
