"""Ranks that share one card, in processes of their own, over NCCL.

NCCL refuses communicators whose ranks share a device of one host. Here each rank says that it is a host of its own
(NCCL_HOSTID), and data go through sockets: what is shown is that collectives and their order are right, not how fast
they are. Without a card the ranks take gloo.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from megazero.mesh.launch import prepare_cuda

SHARED_CARD = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
GRACE = 2.0  # seconds for the other ranks when one has failed
Work = Callable[[], Any]


def together(
    world: int,
    work: Sequence[Work],
    device: torch.device,
    seconds: float,
    tell: Callable[[Any], object] = lambda found: None,
) -> list[list[Any]]:
    """Return by rank what each of ``work``, which can be pickled, has returned; ``tell`` rank 0's when it is there.

    Raises RuntimeError with the trace of the first rank that failed, or when ``seconds`` are over.
    """
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_rank, args=(r, world, store, work, device, seconds, queue))
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            answers = _collect(queue, world, seconds, tell)
        finally:
            for process in ranks:
                process.join(timeout=GRACE)
                process.kill()
                process.join()
    failed = [f"rank {rank}: {answer}" for rank, answer in answers.items() if isinstance(answer, str)]
    if failed:
        raise RuntimeError(failed[0])
    if len(answers) < world:
        raise RuntimeError(f"{world - len(answers)} of {world} ranks did not answer in {seconds:.0f} s")
    return [answers[rank] for rank in range(world)]  # type: ignore[misc]


def _collect(
    queue: Any, world: int, seconds: float, tell: Callable[[Any], object]
) -> dict[int, list[Any] | str]:
    """Return by rank what it found, or its trace. Ranks that did not answer in time are left out."""
    answers: dict[int, list[Any] | str] = {}
    end = time.monotonic() + seconds
    while len(answers) < world and (left := end - time.monotonic()) > 0:
        try:
            rank, answer = queue.get(timeout=left)
        except Empty:
            break
        if rank is None:
            tell(answer)
            continue
        answers[rank] = answer
        if isinstance(answer, str):
            end = min(end, time.monotonic() + GRACE)
    return answers


def _rank(
    rank: int,
    world: int,
    store: str,
    work: Sequence[Work],
    device: torch.device,
    seconds: float,
    queue: Any,
) -> None:
    if world > 1:
        os.environ.update(SHARED_CARD, NCCL_HOSTID=f"host{rank}")
    prepare_cuda(world)
    torch.set_num_threads(1)
    found: list[Any] = []
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=seconds),
        )
        for each in work:
            found.append(each())
            if rank == 0:
                queue.put((None, found[-1]))
        queue.put((rank, found))
        dist.barrier()
    except Exception as error:  # noqa: BLE001 - told to the parent
        queue.put((rank, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
