"""Pretrain a decoder-only language model: torchrun ... pretrain/pretrain_gpt.py FLAGS (see --help)."""

import signal
import sys
import time

from megazero.config import ConfigError, World, parse
from megazero.mesh.launch import read_launch, take_local_rank
from megazero.train.exit_status import ExitStatus
from megazero.train.program import run


def main() -> int:
    try:
        local_rank, flags = take_local_rank(sys.argv[1:])
        launch = read_launch(local_rank=local_rank)
    except ValueError as error:
        print(error, file=sys.stderr)
        return ExitStatus.MISTAKE
    try:
        # Before torch is imported: a mistake is told in a fraction of a second.
        config = parse(flags, World(launch.world_size, launch.local_world_size or 0))
    except ConfigError as error:
        if launch.rank == 0:
            print(f"{error}\n--help lists every flag", file=sys.stderr)
        else:
            # Launchers end all ranks with the first that leaves: let the one that speaks be it, and say the same
            # status all the same (srun's is the highest of all ranks').
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1)
        return ExitStatus.MISTAKE
    return run(config, launch)


if __name__ == "__main__":
    sys.exit(main())
