"""Memory in bytes: what a host has, and what this process takes of it or of a CUDA device."""

from __future__ import annotations

import resource
from collections.abc import Mapping

import torch
from torch import nn


def host_memory() -> Mapping[str, int]:
    """Return the lines of /proc/meminfo by name ("MemAvailable", "MemTotal"); empty where there is none."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.endswith("kB\n")}
    except OSError:
        return {}


def peak_memory(device: torch.device) -> int:
    """Return the peak: what was allocated on a CUDA device, or what was resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_memory(device: torch.device) -> int:
    """Return what is in use now: allocated on a CUDA device, or resident on a CPU without mapped files."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _resident_pages(1) - mapped_memory()


def mapped_memory() -> int:
    """Return what is resident of mapped files."""
    return _resident_pages(2)


def _resident_pages(column: int) -> int:
    """Return a column of /proc/self/statm: 1 is all that is resident, 2 mapped files; 0 without it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[column]) * resource.getpagesize()
    except OSError:
        return 0


def use_libraries(device: torch.device) -> None:
    """Make torch load now all that it loads at first use: its memory is not the model's.

    On a CPU its optimizers import torch._dynamo, and with it Triton: 95 MB of 110 here. The rest is oneDNN's and
    autograd's. On CUDA each of the two threads that compute has a workspace of cuBLAS (32 MiB each on an H100).

    The backward begins with a kernel of torch's own. It makes the device's context current in autograd's thread,
    which torch leaves to the first launch on device 0. cuBLAS would warn that there is none and set it: under tensor
    and pipeline parallelism a backward may begin with a product of matrices.
    """
    weight = nn.Parameter(torch.zeros(64, 64, device=device))
    (weight @ weight).square().sum().backward()
    torch.optim.AdamW([weight], fused=True).step()
