"""Peak memory of a step against 2N/P + 4N/G + 12N/OS and activations, for shard factors above 1, too.

The engine runs as one rank of 2 nodes of 2 (lone_rank.py). Activations are what a forward leaves allocated. On a CPU,
where no allocator counts, the buffers that the engine holds after the backward are compared with the formula.
"""

from __future__ import annotations

import torch

from benchmarks.gpu_report import loops
from benchmarks.gpu_report.loops import Size
from benchmarks.gpu_report.record import Record
from benchmarks.gpu_report.setting import Setting, free
from benchmarks.lone_rank import lone_rank
from benchmarks.steps import held_bytes
from megazero.config import resolve_shards
from megazero.config.model.spec import parameter_count
from megazero.zero import Engine, Policy

PRESETS = ("ddp", "zero1", "zero2", "zero3", "mics", "hpz")
WORLD, NODE = 4, 2


def run(setting: Setting, record: Record) -> None:
    size = setting.pick(loops.HALF, loops.TINY)
    n = parameter_count(size.config)
    record.note(
        f"N = {n / 1e6:.1f}M parameters; one rank of {WORLD} on 2 nodes, recompute none, 1 micro-batch"
    )
    for preset in PRESETS:
        factors = resolve_shards(preset, WORLD, NODE).factors
        p, g, os = factors
        with record.attempt(preset=preset, P=p, G=g, OS=os) as row:
            setting.need(3)
            formula = 2 * n / p + 4 * n / g + 12 * n / os
            row["formula GB"] = formula / 1e9
            row |= _measured(size, factors, setting, formula)


def _measured(
    size: Size, factors: tuple[int, int, int], setting: Setting, formula: float
) -> dict[str, float]:
    with lone_rank(WORLD, NODE, factors, setting.device) as mesh:
        step, engine = loops.ours(size, setting.device, mesh=mesh, policy=Policy())
        step()
        if setting.device.type == "cpu":
            return {"held / formula": _held(engine, size, setting) / formula}
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated()
        activations = _activations(engine, size, setting)
        del step, engine
        free(setting.device)
    return {
        "activations GB": activations / 1e9,
        "peak GB": peak / 1e9,
        "peak / (formula + activations)": peak / (formula + activations),
    }


def _activations(engine: Engine, size: Size, setting: Setting) -> int:
    """Return the bytes that a forward leaves behind for its backward."""
    tokens = loops.batch(size, setting.device)
    before = torch.cuda.memory_allocated()
    engine.begin_step(1)
    loss = engine.module(tokens, tokens).sum()
    left = torch.cuda.memory_allocated() - before
    loss.backward()
    engine.step()
    return left


def _held(engine: Engine, size: Size, setting: Setting) -> int:
    tokens = loops.batch(size, setting.device)
    engine.begin_step(1)
    engine.module(tokens, tokens).sum().backward()
    held = sum(held_bytes(engine).values())
    engine.step()
    return held
