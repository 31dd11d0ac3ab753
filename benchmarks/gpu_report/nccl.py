"""The engine over NCCL, as 4 ranks on one card, with the losses of one rank beside theirs.

Each rank says to NCCL that it is a host of its own, and data go through sockets (benchmarks/shared_card.py): what is
shown is that the collectives and their order are right, not how fast they are. To megazero the ranks are 2 nodes of
2. Every case trains on the same samples, built as a run builds it: a dense model, one with 8 experts, and the dense
one with Muon. Each kind has one rank's losses beside it. The rehearsal runs on gloo.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_report.record import Record
from benchmarks.gpu_report.setting import Setting, free
from benchmarks.shared_card import Work, together
from benchmarks.steps import Shape, options_of
from megazero.config import World, make_config
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder

SMALL = Shape(layers=4, hidden=256, ffn=512, heads=4, vocabulary=512, sequence=128)
WORLD, PER_NODE, SAMPLES, STEPS = 4, 2, 8, 4
PRESETS = ("ddp", "zero1", "zero2", "zero3", "mics", "hpz", "zeropp")
PP = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ACROSS = {"expert_model_parallel_size": 4, "moe_dispatch_across_nodes": "exact"}
EXPERTS = {
    "num_experts": 8, "moe_ffn_hidden_size": 256, "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}  # fmt: skip
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
TIMEOUT = 180.0  # seconds, of all ranks together


def run(setting: Setting, record: Record) -> None:
    alone = {name: list[float]() for name in KINDS}

    def tell_one(row: dict[str, Any]) -> None:
        alone[row["what"]] = row["losses"]
        record.row(what=f"{row['what']}, one rank", found=_told(row["losses"]), difference=None)

    def tell(row: dict[str, Any]) -> None:
        losses, one = row.pop("losses"), alone[KIND_OF[row["what"]]]
        apart = max(abs(a - b) for a, b in zip(losses, one, strict=True))
        told = _told(losses) + " (**apart**)" * (not apart <= APART)
        record.row(**row, found=told, difference=apart)

    def ranks(world: int, work: Sequence[Work], tell: Callable[[dict[str, Any]], object]) -> None:
        seconds = min(setting.pick(TIMEOUT, 4 * TIMEOUT), max(1.0, setting.left))
        together(world, work, setting.device, seconds, tell)

    ranks(1, [partial(_train, name, own, 1, setting) for name, (own, _) in KINDS.items()], tell_one)
    layouts = {name: base | own for base, cases in KINDS.values() for name, own in cases.items()}
    work = [partial(_train, name, own, WORLD, setting) for name, own in layouts.items()]
    with record.attempt(what=f"all cases on {WORLD} ranks") as row:
        ranks(WORLD, work, tell)
        row["found"] = "done"


def _train(name: str, options: Mapping[str, Any], world: int, setting: Setting) -> dict[str, Any]:
    """Return the losses of the first steps on SAMPLES samples, the same in every layout."""
    size, device, began = SMALL, setting.device, time.monotonic()
    free(device)  # of the case before
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


def _told(losses: list[float]) -> str:
    sane = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f}" + ("" if sane else " (**does not fall**)")
