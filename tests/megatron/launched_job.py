"""A training script under a launcher: trains a case of the harness, and leaves what each rank has to say.

    torchrun ... [-m megatron_core_patch FLAGS] launched_job.py --case NAME --folder DIR [--enable JSON] [--starts N]
        [--breaks]

It knows nothing of the patch, unless ``--enable`` gives it words to turn it on with. It trains ``--starts`` times in
its process, each time with new process groups and a new model, as Megatron-LM's --inprocess-restart does. With
``--breaks`` all starts but the last end in their second step, with its gradients under way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import megatron_core_patch
from tests.megatron.cases import CASES
from tests.megatron.training import sent, train


class Broken(Exception):
    """What a rank ends with in the middle of a step."""


@contextmanager
def broken() -> Iterator[None]:
    """Let every second step end behind its backward, before anything waits for its gradients."""
    original, calls = distributed.finalize_model_grads, itertools.count(1)

    def finalize(*args: Any, **kwargs: Any) -> None:
        if next(calls) % 2 == 0:
            raise Broken
        original(*args, **kwargs)

    with mock.patch.object(distributed, "finalize_model_grads", finalize):
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--enable", type=json.loads)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--breaks", action="store_true")
    options = parser.parse_args()
    if options.enable is not None:
        megatron_core_patch.enable(**options.enable)
    store, rank, size = next(dist.rendezvous("env://"))
    for start in range(options.starts):
        own = dist.PrefixStore(str(start), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
        megatron_core_patch.counters().bytes.clear()
        breaks = options.breaks and start < options.starts - 1
        with broken() if breaks else nullcontext(), suppress(Broken):
            run = train(replace(CASES[options.case], bf16=True))  # the harness itself turns nothing on
            run = replace(run, sent=sent({}))
        if not breaks:
            dist.barrier()
        dist.destroy_process_group()
    (options.folder / str(rank)).write_bytes(pickle.dumps((sys.argv, run)))


if __name__ == "__main__":
    main()
