#!/usr/bin/env python
"""Try nodes without a run: srun python tools/check_nodes.py --save FOLDER, or one node alone, as in a prolog.

It does what --health-check does at the start of a run: devices, memory, clocks, the links of all ranks, and whether
every node sees the folder. It prints what is wrong with which node, and --exclude= with the nodes to leave out; the
exit status is 0 if all is well.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from megazero.config.options.sections import TrainingConfig
from megazero.config.run import all_options
from megazero.log.exit_status import ExitStatus, status_of
from megazero.log.safe_stream import guard_streams
from megazero.mesh.launch import Launch, read_launch

WAIT = "distributed_init_timeout_minutes"


def main() -> int:
    """Check, say it, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", type=Path, help="folder that all nodes are to share")
    parser.add_argument(
        "--checkpoint-bytes", type=int, default=0, help="of one checkpoint that has to fit there"
    )
    parser.add_argument("--keep-last", type=int, help="how many of them the run keeps")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that ranks are waited for")
    options = parser.parse_args()
    launch = read_launch()
    try:
        notes = check(options, launch)
    except ValueError as error:
        import torch.distributed as dist

        if not dist.is_initialized():  # this rank alone may know: the others wait for it
            print(f"{launch.host}, rank {launch.rank}: {error}", file=sys.stderr, flush=True)
        elif launch.rank == 0:  # the same on all ranks
            print(error, file=sys.stderr, flush=True)
        time.sleep(1)  # srun ends all ranks with the first that leaves
        return status_of(error)
    except RuntimeError as error:  # of a collective: this rank alone knows
        text = f"{error}".replace(all_options()[WAIT].flag, "--timeout")  # the flag that sets it here
        print(f"{launch.host}, rank {launch.rank}: {text}", file=sys.stderr, flush=True)
        return ExitStatus.RANK_LOST
    if launch.rank == 0:
        print("\n".join(notes), flush=True)
    return ExitStatus.FINISHED


def check(options: argparse.Namespace, launch: Launch) -> tuple[str, ...]:
    """Join the other ranks, if there are any, and check. Returns what there is to say. Raises Unhealthy."""
    import torch.distributed as dist

    from megazero.mesh.mesh import create_mesh, discover_ranks_per_node
    from megazero.ops.health import HealthCheck, Storage
    from megazero.train.distributed import start_rank

    timeout = timedelta(seconds=options.timeout)
    training = TrainingConfig(device=options.device, **{WAIT: options.timeout / 60})
    device, _ = start_rank(training, launch, timeout)
    health = HealthCheck(launch.host)
    health.check_ranks(device)
    if options.save is not None:
        health.check_storage(Storage(options.save, options.checkpoint_bytes, options.keep_last))
    if dist.is_initialized():
        ranks, world = discover_ranks_per_node(launch), launch.world_size
        health.check_groups(
            create_mesh(shards=(world, world, world), ranks_per_node=ranks, device=device, timeout=timeout)
        )
    return health.notes()


if __name__ == "__main__":
    guard_streams()
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the others may have left: their connections are not waited for
