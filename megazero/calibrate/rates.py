"""Measures a rank's own work, on all ranks at once: matrices, memory, the optimizer's update."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megazero.calibrate.timing import Clock
from megazero.config import RunConfig
from megazero.mesh.objects import gather_objects
from megazero.models.dtypes import DTYPES
from megazero.plan.compute import UPDATE_BYTES
from megazero.products import make_product
from megazero.products.product import Product
from megazero.train.parallelize import optimizer_factory

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # of what is copied and updated
MATRIX = {"cpu": 1024, "cuda": 8192}
BOOT = Path("/proc/sys/kernel/random/boot_id")  # one for each host, whatever namespaces it is seen from


def measure_device(config: RunConfig, clock: Clock) -> dict[str, Any]:
    """Return the section ``device`` of the cluster file, and where ranks share processors, ``cores``. Collective.

    Operands are random: on equal values few bits switch, and a GPU that its power limits clocks higher.
    """
    device, name = clock.device, config.precision.params_dtype
    n, elements = MATRIX[device.type], ELEMENTS[device.type]
    a = torch.randn(n, n, dtype=DTYPES[name], device=device)
    out, source = torch.empty_like(a), torch.randn(4 * elements, device=device)
    target = torch.empty_like(source)

    def tflops(product: Product) -> float:
        x = product.operand(a)
        return 2 * n**3 / clock(lambda: product.forward(x, a, out=out), slowest=False).median / 1e12

    rates = {
        f"{each}_tflops": tflops(make_product(each)) for each in sorted({name, config.precision.product})
    }
    copy = clock(lambda: target.copy_(source), slowest=False)
    host = find_host()
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        title, memory, reserved = facts.name, facts.total_memory, 1.5
    else:
        title = f"{host['count']} processors shared by {host['ranks']} ranks"
        memory, reserved = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // host["ranks"], 0.5
    section = {
        "name": title,
        "memory_gib": memory / 2**30,
        "reserved_gib": min(reserved, memory / 2**31),
        "memory_gbytes_per_s": 2 * source.nbytes / copy.median / 1e9,
        **rates,
        "matmul_efficiency": 1.0,
        "update_gbytes_per_s": elements * UPDATE_BYTES / _update(config, clock, elements) / 1e9,
    }
    if device.type == "cuda":
        return {"device": section}
    return {"device": section, "cores": host}


def _update(config: RunConfig, clock: Clock, elements: int) -> float:
    """Return the seconds of the norm, the clip and the optimizer's update of so many fp32 master weights."""
    weight = nn.Parameter(torch.randn(elements, device=clock.device))
    weight.grad = gradient = torch.randn_like(weight)
    optimizer = optimizer_factory(config)([{"params": [weight]}])

    def update() -> None:
        torch.linalg.vector_norm(gradient)
        torch._foreach_mul_([gradient], 1.0)
        optimizer.step()

    return clock(update, slowest=False).median


def find_host() -> dict[str, int]:
    """Return how many processors this rank's host has for its ranks, and how many ranks that are."""
    own = (BOOT.read_text() if BOOT.exists() else "", sorted(os.sched_getaffinity(0)))
    mine = [cores for boot, cores in gather_objects(own) if boot == own[0]]
    processors = len({core for cores in mine for core in cores})
    return {"count": max(1, processors // torch.get_num_threads()), "ranks": len(mine)}
