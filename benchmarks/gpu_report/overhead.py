"""What the engine costs on one rank: a step of zero.shard over a step of plain torch, in turns.

The engine has a run's own optimizer (--optimizer-impl auto) and, in a column of its own, torch's AdamW as the plain
loop has.
"""

from __future__ import annotations

import statistics

import torch

from benchmarks.gpu_report import loops
from benchmarks.gpu_report.loops import Size
from benchmarks.gpu_report.record import Record
from benchmarks.gpu_report.setting import Setting, free
from benchmarks.harness import learned, ratios, require_training, step_seconds, take_turns
from benchmarks.steps import ADAMW

SIZES = (
    Size("host-bound", layers=24, hidden=256, ffn=688, heads=4, vocabulary=4096, sequence=128),
    Size("middle", layers=16, hidden=1024, ffn=2752, heads=8, sequence=2048),
)
COLUMNS = {
    "ours": "megazero, as a run has it ms",
    "torch's": "megazero, torch's AdamW ms",
    "plain": "plain ms",
}


def run(setting: Setting, record: Record) -> None:
    device = setting.device
    for size in setting.pick(SIZES, (loops.TINY,)):
        for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
            with record.attempt(size=size.name, dtype=name) as row:
                setting.need(5)
                mine, _ = loops.ours(size, device, dtype=dtype)
                theirs_too, _ = loops.ours(size, device, dtype=dtype, optimizer=ADAMW)
                model = loops.decoder(size, device, dtype=dtype)
                theirs = loops.plain(size, device, model, lambda t, model=model: model(t, t).sum())
                steps = {"ours": mine, "torch's": theirs_too, "plain": theirs}
                require_training({name: learned([step(), step()]) for name, step in steps.items()})
                turns = {
                    name: lambda step=step: step_seconds(step, device, setting.pick(4, 1))
                    for name, step in steps.items()
                }
                taken = take_turns(turns, setting.pick(8, 2), warm_up=setting.pick(2, 0))
                for name, each in taken.items():
                    row[COLUMNS[name]] = statistics.median(each) * 1e3
                found = ratios(taken["ours"], taken["plain"])
                row["ratio"] = statistics.median(found)
                row["range"] = f"{min(found):.3f} to {max(found):.3f}"
            free(device)
