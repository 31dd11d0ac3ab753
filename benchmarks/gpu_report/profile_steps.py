"""A profile of a few training steps: kernels by time, and the labels that the engine sets around its hops.

The engine runs as one rank of 2 nodes of 2 in preset zeropp (lone_rank.py), so that every kind of hop and kernel is
in it; a mixture's alone. The Chrome trace lies beside the report's other files (chrome://tracing, perfetto).
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu_report import loops
from benchmarks.gpu_report.allocations import stepping
from benchmarks.gpu_report.loops import Step
from benchmarks.gpu_report.record import Record
from benchmarks.gpu_report.setting import Setting
from benchmarks.gpu_report.training import MIXTURE, TINY_MIXTURE
from benchmarks.harness import wait
from megazero.train.callbacks.profiling import label
from megazero.zero import Engine

STEPS, MOST = 3, 15
STEP = "training step"
ON_DEVICE, ON_HOST = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",)
LABELS = ("user_annotation", "gpu_user_annotation")


def run(setting: Setting, record: Record) -> None:
    with stepping("zeropp", setting.pick(loops.HALF, loops.TINY), setting.device) as (step, engine):
        _profile(step, engine, setting.folder / "profile.json.gz", setting, record)


def run_mixture(setting: Setting, record: Record) -> None:
    step, engine = loops.ours(setting.pick(MIXTURE, TINY_MIXTURE), setting.device)
    _profile(step, engine, setting.folder / "profile-experts.json.gz", setting, record)


def _profile(step: Step, engine: Engine, file: Path, setting: Setting, record: Record) -> None:
    for _ in range(2):
        step()
    for lane in engine.lanes:
        lane.label = label
    activities = [ProfilerActivity.CPU] + ([] if setting.rehearsal else [ProfilerActivity.CUDA])
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            with record_function(STEP):
                step()
        wait(setting.device)
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))
    record.note(f"the trace of {STEPS} steps is {file.name} in the folder of the report's results")
    tell(read_trace(file), record, on_device=not setting.rehearsal)


def read_trace(file: Path) -> list[dict[str, Any]]:
    opener: Any = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt") as text:
        return json.load(text)["traceEvents"]


def tell(events: Sequence[Mapping[str, Any]], record: Record, on_device: bool) -> None:
    """Write rows of the kernels (on a CPU: operations) that take most time, and of all labels."""
    where = "kernel" if on_device else "operation, CPU, with those inside"
    kernels = summed(events, ON_DEVICE if on_device else ON_HOST)
    total = sum(microseconds for _, microseconds in kernels.values())
    for name, (count, microseconds) in largest(kernels, MOST):
        record.row(
            kind=where, name=name[:90], **{"per step": count / STEPS, "us per step": microseconds / STEPS},
            share=microseconds / total if on_device else None,
        )  # fmt: skip
    labels = {
        kind: {n: f for n, f in summed(events, (kind,)).items() if not n.startswith(("Optimizer.", STEP))}
        for kind in LABELS
    }
    for kind, found in labels.items():
        for name, (count, microseconds) in largest(found, 4 * MOST):
            record.row(
                kind="label, device" if kind.startswith("gpu") else "label, host", name=name[:90],
                **{"per step": count / STEPS, "us per step": microseconds / STEPS}, share=None,
            )  # fmt: skip
    _tell_idle(events, record)


def _tell_idle(events: Sequence[Mapping[str, Any]], record: Record) -> None:
    """Note how much of the time from the first to the last kernel the device was busy."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in ON_DEVICE and "dur" in e)
    if not spans:
        return
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    record.note(f"the device was busy for {busy / (reached - spans[0][0]):.1%} of the profiled steps")


def summed(events: Sequence[Mapping[str, Any]], categories: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Return name -> how many events, and their microseconds."""
    counts: defaultdict[str, int] = defaultdict(int)
    taken: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in categories and "dur" in event:
            counts[event["name"]] += 1
            taken[event["name"]] += event["dur"]
    return {name: (counts[name], taken[name]) for name in counts}


def largest(found: Mapping[str, tuple[int, float]], most: int) -> list[tuple[str, tuple[int, float]]]:
    return sorted(found.items(), key=lambda item: -item[1][1])[:most]
