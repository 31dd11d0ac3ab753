"""The engine and the collectives over NCCL, as 4 ranks on one card, with the losses of one rank beside them.

NCCL refuses communicators whose ranks share a device of one host. Here each rank says that it is a host of its own
(NCCL_HOSTID), and data go through sockets: what is shown is that the collectives and their order are right, not how
fast they are. To megazero the ranks are 2 nodes of 2. Every case trains on the same samples, built as a run builds
it: a dense model, one with 8 experts, and the dense one with Muon. Each kind has one rank's losses beside it. The
rehearsal runs on gloo.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_report.loops import Size
from benchmarks.gpu_report.record import Record, one_line
from benchmarks.gpu_report.setting import Setting, elapsed, free
from benchmarks.steps import options_of
from megazero.config import World, make_config
from megazero.mesh.launch import prepare_cuda
from megazero.mesh.mesh import all_gather_flat
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder

SMALL = Size("small", layers=4, hidden=256, ffn=512, heads=4, vocabulary=512, sequence=128)
WORLD, PER_NODE, SAMPLES, STEPS = 4, 2, 8, 4
PRESETS = ("ddp", "zero1", "zero2", "zero3", "mics", "hpz", "zeropp")
PP = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ACROSS = {"expert_model_parallel_size": 4, "moe_dispatch_across_nodes": "exact"}
EXPERTS = {
    "num_experts": 8, "moe_ffn_hidden_size": 256, "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}  # fmt: skip
Cases = Mapping[str, Mapping[str, Any]]
# By kind, the options of its one rank, and by name what its layouts have besides.
KINDS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "dense": (
        {},
        {
            **{preset: {"zero_preset": preset} for preset in PRESETS},
            "PP 2, zb-h1, zero2": {"zero_preset": "zero2", **PP},
            "TP 2 + SP, zero3": {"zero_preset": "zero3", **TP},
            "CP 2, zero3": {"zero_preset": "zero3", "context_parallel_size": 2},
            "CP 4, zero1": {"zero_preset": "zero1", "context_parallel_size": 4},
            "CP 4, keys in INT8, zero3": {
                "zero_preset": "zero3", "context_parallel_size": 4, "cp_gather_bits": 8,
            },
        },
    ),
    "experts": (
        EXPERTS,
        {
            "experts, zero3": {"zero_preset": "zero3"},
            "EP 2, zero2": {"zero_preset": "zero2", "expert_model_parallel_size": 2},
            "EP 2, zeropp": {"zero_preset": "zeropp", "expert_model_parallel_size": 2},
            "EP 4 of 2 nodes, zero3": {"zero_preset": "zero3", **ACROSS},
            "EP 4, rows in INT8, zero3": {"zero_preset": "zero3", **ACROSS, "moe_dispatch_across_nodes": "int8"},
            "EP 2, PP 2, zero2": {"zero_preset": "zero2", "expert_model_parallel_size": 2, **PP},
            "EP 2, TP 2 + SP, zero3": {"zero_preset": "zero3", "expert_model_parallel_size": 2, **TP},
            "EP 2, CP 2, zero3": {
                "zero_preset": "zero3", "expert_model_parallel_size": 2, "context_parallel_size": 2,
            },
        },
    ),
    "Muon": (
        {"optimizer": "muon"},
        {"Muon, zero3": {"zero_preset": "zero3"}, "Muon, TP 2 + SP, zero1": {"zero_preset": "zero1", **TP}},
    ),
}  # fmt: skip
KIND_OF = {name: kind for kind, (_, cases) in KINDS.items() for name in cases}
# Of a loss, from one rank's, in all 4 steps: what sums in another order, and INT4 messages, may change.
APART = 0.05
SHARED_CARD = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
TIMEOUT = 120.0  # seconds, of all ranks together
GRACE = 2.0  # for the other ranks when one has failed
Rows = list[dict[str, Any]]


def run(setting: Setting, record: Record) -> None:
    alone = {name: list[float]() for name in KINDS}

    def tell_one(row: dict[str, Any]) -> None:
        alone[row["what"]] = row["losses"]
        record.row(what=f"{row['what']}, one rank", found=_told(row["losses"]), difference=None)

    def tell(row: dict[str, Any]) -> None:
        losses, kind = row.pop("losses", None), KIND_OF.get(row["what"], "")
        if losses is not None:
            apart = max(abs(a - b) for a, b in zip(losses, alone[kind], strict=True))
            row |= {"found": _told(losses) + " (**apart**)" * (not apart <= APART), "difference": apart}
        record.row(**row)

    together(1, {name: options for name, (options, _) in KINDS.items()}, setting, tell_one)
    layouts = {name: base | own for base, cases in KINDS.values() for name, own in cases.items()}
    with record.attempt(what=f"all cases on {WORLD} ranks") as row:
        together(WORLD, layouts, setting, tell)
        row["found"] = "done"


def together(
    world: int,
    cases: Cases,
    setting: Setting,
    tell: Callable[[dict[str, Any]], object],
) -> Rows:
    """Return what rank 0 found, and ``tell`` each row when it is there. Raises RuntimeError with the error of the
    first rank that failed."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_rank, args=(r, world, store, setting, cases, queue)) for r in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            answers = _collect(
                queue, world, min(setting.pick(TIMEOUT, 4 * TIMEOUT), max(1.0, setting.left)), tell
            )
        finally:
            for process in ranks:
                process.join(timeout=GRACE)
                process.kill()
                process.join()
    failed = [f"rank {rank}: {answer}" for rank, answer in answers.items() if isinstance(answer, str)]
    if failed:
        raise RuntimeError(failed[0])
    if len(answers) < world:
        raise RuntimeError(f"{world - len(answers)} of {world} ranks did not answer in the time")
    return answers[0]  # type: ignore[return-value]


def _collect(
    queue: Any, world: int, seconds: float, tell: Callable[[dict[str, Any]], object]
) -> dict[int, Rows | str]:
    """Return by rank what it found, or the text of its error. Ranks that did not answer in time are left out."""
    answers: dict[int, Rows | str] = {}
    end = time.monotonic() + seconds
    while len(answers) < world and (left := end - time.monotonic()) > 0:
        try:
            rank, answer = queue.get(timeout=left)
        except Empty:
            break
        if isinstance(answer, dict):
            tell(answer)
            continue
        answers[rank] = answer
        if isinstance(answer, str):
            end = min(end, time.monotonic() + GRACE)
    return answers


def _rank(rank: int, world: int, store: str, setting: Setting, cases: Cases, queue: Any) -> None:
    if world > 1:
        os.environ.update(SHARED_CARD, NCCL_HOSTID=f"host{rank}")
    prepare_cuda(world)
    torch.set_num_threads(1)
    rows: Rows = []
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
        work = [partial(_train, name, options, world, setting) for name, options in cases.items()]
        work += [partial(_collective, verb, world, setting) for verb in VERBS] if world > 1 else []
        for each in work:
            rows.append(each())
            if rank == 0:
                queue.put((rank, dict(rows[-1])))
            free(setting.device)
        queue.put((rank, rows))
        dist.barrier()
    except Exception as error:  # noqa: BLE001 - told to the parent
        queue.put((rank, one_line(error, 600)))


def _train(name: str, options: Mapping[str, Any], world: int, setting: Setting) -> dict[str, Any]:
    """Return the losses of the first steps on SAMPLES samples, the same in every layout."""
    size, device, began = SMALL, setting.device, time.monotonic()
    values = {**options_of(size), "micro_batch_size": 1, "global_batch_size": SAMPLES, "lr": 1e-3, "seed": 1}
    values |= {
        "train_iters": STEPS,
        "mock_data": True,
        "params_dtype": "bf16",
        "untie_embeddings_and_output_weights": True,
    }
    ranks = World(world, min(world, PER_NODE))
    config = make_config({**values, **options}, ranks)
    mesh = make_mesh(config, ranks, device)
    decoder = build_decoder(config, mesh)
    engine = shard_decoder(decoder, config, mesh)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, size.vocabulary, (SAMPLES, size.sequence), generator=drawn).to(device)
    own = decoder.cp.own(tokens.chunk(mesh.batch_ranks)[mesh.batch_rank], 1).contiguous().split(1)
    batches = [MicroBatch(t, t, torch.ones(t.shape, device=device)) for t in own]
    losses = []
    for _ in range(STEPS):
        engine.begin_step(len(batches), tokens.numel(), pipeline.program(len(batches)))
        loss = pipeline.step(batches).reshape(1)
        engine.step()
        rows = mesh.gather_rows(loss if mesh.tp.index == 0 else torch.zeros_like(loss))
        losses.append(float(rows.sum()) / tokens.numel())
    return {"what": name, "losses": losses, "seconds": time.monotonic() - began}


VERBS = ("all-gather", "all-to-all", "all-reduce")


def _collective(name: str, world: int, setting: Setting) -> dict[str, Any]:
    n = setting.pick(1 << 22, 1 << 10) // world * world
    whole = torch.zeros(n, device=setting.device, dtype=torch.bfloat16)
    other, part = torch.zeros_like(whole), torch.zeros_like(whole[: n // world])
    launches: dict[str, Callable[[], Any]] = {
        "all-gather": lambda: all_gather_flat(whole, part),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "all-reduce": lambda: dist.all_reduce(whole),
    }
    launches[name]()
    dist.barrier()
    seconds = elapsed(launches[name], setting.device, 2)
    return {"what": name, "found": f"{2 * n / 1e6:.1f} MB in {seconds * 1e3:.3g} ms"}


def _told(losses: list[float]) -> str:
    sane = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f}" + ("" if sane else " (**does not fall**)")
