"""The peak of a run's device, by which its console says how much of it training reaches (MFU)."""

from __future__ import annotations

import torch

from megazero.config import RunConfig
from megazero.config.options.cluster import load_cluster

# Dense products in bf16 and fp16 by NVIDIA's data sheets, in TFLOP/s, by what the device's name contains: the first
# that is in it counts.
PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def peak_tflops(config: RunConfig, device: torch.device) -> float | None:
    """Return the device's peak in TFLOP/s for the run's dtype, or None if it is not known.

    A cluster file of --cluster decides, else the device's name.
    """
    dtype = config.precision.params_dtype
    if config.planning.cluster is not None:
        told = load_cluster(config.planning.cluster).device
        try:
            return told.peak(dtype) / 1e12
        except ValueError:
            return None
    if device.type != "cuda" or dtype not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
