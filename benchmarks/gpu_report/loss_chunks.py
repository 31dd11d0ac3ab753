"""The loss of a head with a vocabulary of 128k in chunks of tokens, whole, and by torch's linear_cross_entropy.

Forward and backward of norm, projection and loss in bf16, as benchmarks/features/loss_chunks.py measures them on a
CPU. The formula is the planner's (megazero/plan/activations.py).
"""

from __future__ import annotations

import statistics

import torch
import torch.nn.functional as F

from benchmarks.features.loss_chunks import TORCH, WHOLE, Sizes, formula, make_step, name_of
from benchmarks.gpu_report.record import Record, Skip
from benchmarks.gpu_report.setting import Setting, free
from benchmarks.harness import peak_bytes, require_gradients

SIZES: tuple[Sizes, ...] = ((8192, 512, 131072, "bf16"), (8192, 4096, 131072, "bf16"))
TINY: tuple[Sizes, ...] = ((64, 64, 256, "bf16"),)


def run(setting: Setting, record: Record) -> None:
    for sizes in setting.pick(SIZES, TINY):
        whole, norms = 0.0, list[float]()
        for chunk in (WHOLE, *setting.pick((4096, 2048, 1024, 512), (32, 16)), TORCH):
            with record.attempt(tokens=sizes[0], hidden=sizes[1], logits=name_of(chunk)) as row:
                setting.need(setting.pick(5, 0))
                if chunk == TORCH and not hasattr(F, "linear_cross_entropy"):
                    raise Skip(f"torch {torch.__version__} has no linear_cross_entropy")
                row |= _measured(sizes, chunk, setting, norms)
                whole = whole or row["ms"]
                row["time of whole"] = row["ms"] / whole
            free(setting.device)


def _measured(sizes: Sizes, chunk: int, setting: Setting, norms: list[float]) -> dict[str, float]:
    """Return the figures of one way. norms: of the gradients of those before it; its own is added to them."""
    device, cuda = setting.device, setting.device.type == "cuda"
    step = make_step(sizes, chunk, device)
    taken = [step() for _ in range(setting.pick(13, 2))]
    norm = taken[0][1]
    require_gradients({**{f"one before it ({n})": each for n, each in enumerate(norms)}, "this one": norm})
    norms.append(norm)
    found = {
        "ms": 1e3 * statistics.median(seconds for seconds, _ in taken[setting.pick(3, 1) :]),
        "norm": norm,
    }
    if cuda:
        found["peak GB"] = peak_bytes(step) / 1e9
    if chunk != TORCH:
        found["formula GB"] = formula(sizes, chunk, not cuda) / 1e9
    return found
