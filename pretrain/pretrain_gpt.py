"""Pretrain a decoder-only language model: torchrun ... pretrain/pretrain_gpt.py FLAGS (see --help)."""

import os
import sys
import time
from contextlib import nullcontext

from megazero.config import ConfigError, World, parse
from megazero.mesh.launch import read_launch, take_local_rank
from megazero.train.exit_status import ExitStatus, record_status
from megazero.train.stopping import NotStarted, StopSignals


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
            time.sleep(1)  # torchrun ends all ranks with the first that leaves: let the one that speaks be it
        return ExitStatus.MISTAKE
    # From now on, too: loading takes a while, in which the job may be told to stop.
    with StopSignals() if config.training.exit_signal_handler else nullcontext() as signals:
        try:
            from megazero.train.setup import main as train

            return train(config, launch, signals)
        except NotStarted as told:
            if launch.rank == 0:
                print(told, flush=True)
                record_status(config.logging.log_dir, told.exit_status)
            os._exit(told.exit_status)  # other ranks may be waiting for this one in a collective


if __name__ == "__main__":
    sys.exit(main())
