"""A training script under a launcher: trains a case of the harness twice, and leaves what each rank has to say.

    torchrun ... -m megatron_core_patch FLAGS launched_job.py CASE FOLDER

It knows nothing of the patch. The first start ends in its second step, with its gradients under way. The second has
new process groups and a new model in the same process, as with Megatron-LM's --inprocess-restart.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import megatron_core_patch
from tests.megatron.case import Run
from tests.megatron.cases import CASES
from tests.megatron.training import sent, train

STARTS = itertools.count()


class Broken(Exception):
    """What a rank ends with in the middle of a step."""


def start(store: dist.Store, name: str) -> Run:
    """Train in new process groups; the harness itself turns nothing on."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = dist.PrefixStore(f"{next(STARTS)}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
    megatron_core_patch.counters().bytes.clear()
    try:
        run = replace(train(replace(CASES[name], bf16=True)), sent=sent({}))
        dist.barrier()
        return run
    finally:
        dist.destroy_process_group()


def main(name: str, folder: str) -> None:
    store, *_ = next(dist.rendezvous("env://"))
    original, calls = distributed.finalize_model_grads, itertools.count()

    def break_in_second_step(*args: Any, **kwargs: Any) -> None:
        """End behind a backward, before anything waits for its gradients."""
        if next(calls):
            raise Broken
        original(*args, **kwargs)

    broken = mock.patch.object(distributed, "finalize_model_grads", break_in_second_step)
    with broken, suppress(Broken):
        start(store, name)
    run = start(store, name)
    Path(folder, os.environ["RANK"]).write_bytes(pickle.dumps((sys.argv, run)))


if __name__ == "__main__":
    main(*sys.argv[1:])
