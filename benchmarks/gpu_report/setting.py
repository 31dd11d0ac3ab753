"""A piece's setting: the device, the sizes, the time left; and a description of this machine."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.gpu_report.record import Skip
from benchmarks.harness import ROOT, installed
from benchmarks.steps import Shape

# Dense bf16 TFLOP/s of the tensor cores, from the makers' data sheets; the first name that occurs in the device's.
PEAKS = (
    ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("GH200", 989.4), ("H200", 989.4), ("H100", 989.4), ("H800", 989.4),
    ("H20", 148.0), ("B200", 2250.0), ("B100", 1750.0), ("A100", 312.0), ("A800", 312.0), ("A30", 165.0),
    ("A40", 149.7), ("A10G", 70.0), ("A10", 125.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0),
    ("RTX 6000 Ada", 364.2), ("RTX A6000", 154.8), ("RTX 4090", 165.2), ("RTX 3090", 71.0),
)  # fmt: skip
# The sizes of a rehearsal.
TINY = Shape(2, 64, 128, 4, vocabulary=256, sequence=16, micro_batch=1, dtype=torch.bfloat16)
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """rehearsal: tiny sizes on the CPU. seconds: that the piece has. folder: for its files (traces)."""

    rehearsal: bool
    folder: Path
    seconds: float = 600.0
    began: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.rehearsal else torch.device("cuda", 0)

    @property
    def left(self) -> float:
        """Seconds that the piece has left."""
        return self.seconds - (time.monotonic() - self.began)

    def need(self, seconds: float) -> None:
        """Skip the row if fewer are left."""
        if self.left < seconds:
            raise Skip("the piece's time was over")

    def pick(self, real: T, tiny: T) -> T:
        return tiny if self.rehearsal else real


def peak_tflops(name: str) -> float | None:
    """Return a device's peak by its name, or None if the table does not have it."""
    return next((peak for known, peak in PEAKS if known.lower() in name.lower()), None)


def elapsed(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the seconds of one ``run``, the mean of ``repeats`` in a row.

    On CUDA the device's clock counts, and the launches are queued behind a pause, so that a slow host is not
    measured."""
    if device.type == "cpu":
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - began) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2e5 * repeats))  # cycles: some 0.1 ms for each launch
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def quickest(launch: Callable[[], Any], setting: Setting) -> float:
    """Return the seconds of one launch, the least of a few means, after one that may compile."""
    launch()
    return min(elapsed(launch, setting.device, setting.pick(10, 1)) for _ in range(setting.pick(5, 1)))


def free(device: torch.device) -> None:
    """Give back the memory of models that are gone: engines are reference cycles."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def machine(rehearsal: bool) -> dict[str, str]:
    """Return what the figures are measured on, in words."""
    return {
        "device": f"the CPU ({os.cpu_count()} cores); no GPU was used" if rehearsal else _card(),
        "torch": torch.__version__,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if not rehearsal else "none",
        "Triton": installed("triton"),
        "commit": _output(
            "git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"
        ),
    }


def _card() -> str:
    card = torch.cuda.get_device_properties(0)
    peak = peak_tflops(card.name)
    rate = f"bf16 peak {peak:g} TFLOP/s" if peak else "its bf16 peak is not known here"
    return (
        f"{card.name}, {card.total_memory / 2**30:.1f} GiB, {card.multi_processor_count} multiprocessors, "
        f"compute capability {card.major}.{card.minor}; {rate}"
    )


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
