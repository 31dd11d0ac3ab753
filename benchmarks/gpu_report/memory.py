"""Peak memory of a step against 2N/P + 4N/G + 12N/OS and activations, for shard factors above 1, too.

The engine runs as one rank of 2 nodes of 2 (lone_rank.py). Activations are what a forward leaves allocated. On a CPU,
where no allocator counts, the buffers that the engine holds after the backward are compared with the formula.
"""

from __future__ import annotations

import torch

from benchmarks.gpu_report.record import Record
from benchmarks.gpu_report.setting import TINY, Setting, free
from benchmarks.gpu_report.training import AS_A_RUN
from benchmarks.lone_rank import lone_rank
from benchmarks.steps import Shape, batches, engine_step, held_bytes, llama
from megazero.config import resolve_shards
from megazero.config.model.spec import parameter_count
from megazero.zero import Policy

PRESETS = ("ddp", "zero1", "zero2", "zero3", "mics", "hpz")
WORLD, NODE = 4, 2
HALF = Shape(12, 1536, 4096, 12, vocabulary=32000, sequence=2048, micro_batch=1, dtype=torch.bfloat16)


def run(setting: Setting, record: Record) -> None:
    shape = setting.pick(HALF, TINY)
    n = parameter_count(llama(shape))
    record.note(
        f"N = {n / 1e6:.1f}M parameters; one rank of {WORLD} on 2 nodes, recompute none, 1 micro-batch"
    )
    for preset in PRESETS:
        factors = resolve_shards(preset, WORLD, (NODE,)).factors
        p, g, os = factors
        with record.attempt(preset=preset, P=p, G=g, OS=os) as row:
            setting.need(3)
            formula = 2 * n / p + 4 * n / g + 12 * n / os
            row["formula GB"] = formula / 1e9
            row |= _measured(shape, factors, setting, formula)


def _measured(
    shape: Shape, factors: tuple[int, int, int], setting: Setting, formula: float
) -> dict[str, float]:
    with lone_rank(WORLD, NODE, factors, setting.device) as mesh:
        step, engine = engine_step(shape, mesh, policy=Policy(), optimizer=AS_A_RUN)
        (tokens,), cuda = batches(shape, setting.device), setting.device.type == "cuda"
        for _ in range(2):
            step()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            step()
            peak, before = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        engine.begin_step(1)
        loss = engine.module(tokens, tokens).sum()
        activations = torch.cuda.memory_allocated() - before if cuda else 0
        loss.backward()
        held = sum(held_bytes(engine).values())
        engine.step()
        del step, engine, loss
        free(setting.device)
    if not cuda:
        return {"held / formula": held / formula}
    return {
        "activations GB": activations / 1e9,
        "peak GB": peak / 1e9,
        "peak / (formula + activations)": peak / (formula + activations),
    }
