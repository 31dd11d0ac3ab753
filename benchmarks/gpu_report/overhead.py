"""What the engine costs on one rank: a step of zero.shard over a step of plain torch, in turns."""

from __future__ import annotations

import statistics

import torch

from benchmarks.gpu_report import loops
from benchmarks.gpu_report.loops import Size
from benchmarks.gpu_report.record import Record, Skip
from benchmarks.gpu_report.setting import Setting, free, step_seconds

SIZES = (
    Size("host-bound", layers=24, hidden=256, ffn=688, heads=4, vocabulary=4096, sequence=128),
    Size("middle", layers=16, hidden=1024, ffn=2752, heads=8, sequence=2048),
)


def run(setting: Setting, record: Record) -> None:
    device = setting.device
    for size in setting.pick(SIZES, (loops.TINY,)):
        for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            with record.attempt(size=size.name, dtype=name) as row:
                if setting.left < 5:
                    raise Skip("the piece's time was over")
                mine, _ = loops.ours(size, device, dtype=dtype)
                model = loops.decoder(size, device, dtype=dtype)
                theirs = loops.plain(size, device, model, lambda t, model=model: model(t, t).sum())
                taken: dict[str, list[float]] = {"ours": [], "plain": []}
                for turn in range(setting.pick(12, 2)):
                    for who, step in (("ours", mine), ("plain", theirs)):
                        seconds = step_seconds(step, device, setting.pick(5, 1))
                        if turn > 1 or setting.rehearsal:
                            taken[who].append(seconds)
                ratios = [a / b for a, b in zip(*taken.values(), strict=True)]
                row["megazero ms"] = statistics.median(taken["ours"]) * 1e3
                row["plain ms"] = statistics.median(taken["plain"]) * 1e3
                row["ratio"] = statistics.median(ratios)
                row["range"] = f"{min(ratios):.3f} to {max(ratios):.3f}"
            free(device)
