"""The command ``megazero train``: it trains on the ranks of a launcher, or starts ranks on this machine.

Signals are handled before torch is loaded, which this module does not need.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NoReturn

from megazero.comm.rooms.point import Point
from megazero.config import ConfigError, RunConfig, World, begun, parse
from megazero.config.layout.outer import LOCAL, local_replicas
from megazero.config.options.data_inputs import SPLITS
from megazero.config.options.data_sources import data_kind
from megazero.config.read.beginning import Beginning, read_beginning
from megazero.config.read.folders import make_folders
from megazero.log.exit_status import (
    ExitStatus,
    end_folder,
    process_status,
    record_status,
    report_to_torchrun,
    status_of,
)
from megazero.log.history import record_end
from megazero.mesh.launch import Launch, is_first, take_launch
from megazero.mesh.starter import own_command, start_again, start_all
from megazero.ops.exit_conditions import NotStarted, StopSignals
from megazero.ops.lease import Lease


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
            if ranks is None and local_replicas(config.outer):
                raise ConfigError(
                    [f"--outer-meet {LOCAL}:R starts replicas on this machine: give --nproc-per-node N"]
                )
            _refuse_missing_data(config)
            make_folders(config)
    except (ConfigError, OSError) as error:
        return _refuse(error, launch.rank == 0, "\n--help lists every flag")
    except SystemExit as ended:  # --help is printed
        return int(ended.code or 0)
    if ranks is not None:
        good = (ExitStatus.FINISHED, ExitStatus.STOPPED)
        if replicas := local_replicas(config.outer):
            return _start_replicas(config, argv, flags, replicas, ranks, good)
        return start_again(argv, flags, ranks, device=config.training.device, good=good)
    return run(config, launch, beginning)


def _start_replicas(
    config: RunConfig,
    argv: Sequence[str],
    flags: Sequence[str],
    count: int,
    ranks: int,
    good: Collection[int],
) -> int:
    """Start so many replicas of this run on this machine, each a launch with folders of its own, and where they
    meet."""
    options = config.checkpoint
    with Point(0, b"") as point:
        commands = []
        for number in range(count):
            name = f"replica{number}"
            own = {"outer_meet": f"127.0.0.1:{point.port}", "outer_name": name}
            own |= {"outer_least": f"{config.outer.outer_least or count}"}
            own |= {"log_dir": f"{Path(config.logging.log_dir) / name}"}
            own |= {"save": f"{Path(options.save) / name}"} if options.save else {}
            if options.load and (options.load == options.save or (Path(options.load) / name).is_dir()):
                own |= {"load": f"{Path(options.load) / name}"}
            words = [word for key, value in own.items() for word in (f"--{key.replace('_', '-')}", value)]
            shared, start = _without(flags, own), ["--nproc-per-node", f"{ranks}"]
            commands.append(([*own_command(argv), *shared, *words, *start], os.environ))
        return start_all(commands, good=good)


def _without(flags: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the flags but for those of these names, which have one value each."""
    kept, words = list[str](), iter(flags)
    for word in words:
        flag, equals, _ = word.partition("=")
        if not flag.startswith("--") or flag[2:].replace("-", "_") not in names:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def _refuse_missing_data(config: RunConfig) -> None:
    """Raise ConfigError with a line for each data set of the run that is not there, before anything is written."""
    splits = SPLITS if config.training.eval_iters else SPLITS[:1]
    if missing := list(data_kind(config.data).missing(config.data, splits)):
        raise ConfigError(missing)


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


def run(config: RunConfig, launch: Launch, beginning: Beginning | None = None) -> int:
    """Train as configured, and return the exit status. Under --exit-signal-handler signals are handled from here on.

    beginning: on the first rank, what it has read of the folders of --load and --save.

    A signal during the start, while torch is loaded, ends the process at once. So does Ctrl-C without that flag, or
    the second Ctrl-C with it. Neither prints a trace: every rank would print its own.
    """
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
