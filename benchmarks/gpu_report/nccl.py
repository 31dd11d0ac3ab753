"""Collectives and the engine over NCCL with several ranks on one card where NCCL allows it, else with one rank.

NCCL refuses communicators whose ranks share a device unless a version of it can be told otherwise; both are tried.
The rehearsal runs the same on gloo.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_report.record import Record, one_line
from benchmarks.gpu_report.setting import Setting, elapsed
from benchmarks.harness import step_seconds
from benchmarks.links.contestants import DELTA, policy_of
from benchmarks.steps import Shape, ours
from megazero.mesh.launch import prepare_cuda
from megazero.mesh.mesh import all_gather_flat

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # versions that know it let ranks share a device
PRESETS = ("ddp", "zero3", "zero1")  # the last with zeropp's messages, which a node of one rank can have
TIMEOUT = 20.0  # seconds, of a world
GRACE = 2.0  # for the other ranks when one has failed
Rows = list[dict[str, Any]]


def run(setting: Setting, record: Record) -> None:
    tries = [("2 ranks", 2, {})]
    if not setting.rehearsal:
        tries += [(f"2 ranks, {SHARING}=1", 2, {SHARING: "1"}), ("1 rank", 1, {})]
    for name, world, environment in tries:
        rows: Rows = []
        with record.attempt(world=name, what="the communicators are made") as row:
            setting.need(10)
            rows = together(world, environment, setting)
            row["found"] = "yes"
        for found in rows:
            record.row(world=name, **found)
        if rows:
            return


def together(world: int, environment: dict[str, str], setting: Setting) -> Rows:
    """Return what rank 0 found. Raises RuntimeError with the error of the first rank that failed."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_rank, args=(r, world, store, setting, environment, queue))
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            answers = _collect(queue, world, min(setting.pick(TIMEOUT, 4 * TIMEOUT), max(1.0, setting.left)))
        finally:
            for process in ranks:
                process.join(timeout=GRACE)
                process.kill()
                process.join()
    failed = [answer for answer in answers.values() if isinstance(answer, str)]
    if failed:
        # What NCCL says of the cause, rather than of a peer's end.
        raise RuntimeError(next((text for text in failed if "uplicate" in text), failed[0]))
    if len(answers) < world:
        raise RuntimeError(f"{world - len(answers)} of {world} ranks did not answer within {TIMEOUT:.0f} s")
    return answers[0]


def _collect(queue: Any, world: int, seconds: float) -> dict[int, Rows | str]:
    """Return by rank what it found, or the text of its error. Ranks that did not answer in time are left out."""
    answers: dict[int, Rows | str] = {}
    end = time.monotonic() + seconds
    while len(answers) < world and (left := end - time.monotonic()) > 0:
        try:
            rank, answer = queue.get(timeout=left)
        except Empty:
            break
        answers[rank] = answer
        if isinstance(answer, str):
            end = min(end, time.monotonic() + GRACE)
    return answers


def _rank(
    rank: int, world: int, store: str, setting: Setting, environment: dict[str, str], queue: Any
) -> None:
    os.environ.update(environment)
    prepare_cuda(world)
    torch.set_num_threads(1)
    try:
        if setting.device.type == "cuda":
            torch.cuda.set_device(setting.device)
        dist.init_process_group(
            "gloo" if setting.rehearsal else "cpu:gloo,cuda:nccl",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT),
        )
        queue.put((rank, [*_collectives(world, setting), *_engines(world, setting)]))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - told to the parent
        queue.put((rank, one_line(error, 600)))


def _collectives(world: int, setting: Setting) -> Rows:
    n = setting.pick(1 << 26, 1 << 10) // world * world
    whole = torch.zeros(n, device=setting.device, dtype=torch.bfloat16)
    other, part = torch.zeros_like(whole), torch.zeros_like(whole[: n // world])
    launches: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: all_gather_flat(whole, part),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "all-reduce": lambda: dist.all_reduce(whole),
    }
    rows: Rows = []
    for name, launch in launches.items():
        launch()
        dist.barrier()
        seconds = elapsed(launch, setting.device, setting.pick(10, 1))
        rows.append({"what": name, "found": f"{2 * n / 1e6:.0f} MB in {seconds * 1e3:.3g} ms"})
    return rows


def _engines(world: int, setting: Setting) -> Rows:
    """Train with every rank as a node. Losses are the first steps'."""
    shape: Shape = setting.pick(
        Shape(layers=8, hidden=1024, ffn=2752, heads=8, sequence=1024, micro_batch=1, dtype=torch.bfloat16),
        Shape(layers=2, hidden=64, ffn=128, heads=4, vocabulary=256, sequence=16, micro_batch=1),
    )
    rows: Rows = []
    for preset in PRESETS if world > 1 else ():
        quantised = preset == PRESETS[-1]
        step, _ = ours(preset, shape, 1, setting.device, policy_of(DELTA) if quantised else None)
        losses = [float(step()) for _ in range(3)]
        seconds = step_seconds(step, setting.device, setting.pick(5, 1))
        rows.append(
            {"what": f"engine, {preset}{', zeropp messages' * quantised}", "found": _told(losses, seconds)}
        )
    return rows


def _told(losses: Sequence[float], seconds: float) -> str:
    sane = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    fall = " to ".join(f"{loss:.4f}" for loss in (losses[0], losses[-1]))
    return f"{seconds * 1e3:.1f} ms a step; loss {fall}" + ("" if sane else " (**does not fall**)")
