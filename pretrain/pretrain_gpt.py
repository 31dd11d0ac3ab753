"""Pretrain a decoder-only language model: torchrun ... pretrain/pretrain_gpt.py FLAGS (see --help)."""

import signal
import sys
import time

from megazero.config import ConfigError, World, parse
from megazero.log.exit_status import ExitStatus
from megazero.log.streams import guard_output
from megazero.mesh.launch import is_first, read_launch, take_local_rank
from megazero.train.program import run


def main() -> int:
    words = sys.argv[1:]
    guard_output()
    try:
        local_rank, flags = take_local_rank(words)
        launch = read_launch(local_rank=local_rank)
    except ValueError as error:
        return _refuse(error, is_first())
    try:
        # Before torch is imported: a mistake is told in a fraction of a second.
        config = parse(flags, World(launch.world_size, launch.local_world_size or 0))
    except ConfigError as error:
        return _refuse(f"{error}\n--help lists every flag", launch.rank == 0)
    return run(config, launch)


def _refuse(said: object, first: bool) -> ExitStatus:
    """Say a mistake that all ranks make on the first one."""
    if first:
        print(said, file=sys.stderr)
    else:
        # Launchers end all ranks with the first that leaves: let the one that speaks be it, and say the same
        # status all the same (srun's is the highest of all ranks').
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1)
    return ExitStatus.MISTAKE


if __name__ == "__main__":
    sys.exit(main())
