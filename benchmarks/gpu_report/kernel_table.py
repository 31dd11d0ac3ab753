"""What the kernels compile to for compute capability 9.0: the table of docs/results/kernels.md. It needs no GPU.

    python -m benchmarks.gpu_report.kernel_table

The machine code is read by cuobjdump, which comes with Triton.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests import kernel_compile  # isort: skip  first: it tells the kernels that they will be compiled

import torch

from benchmarks import harness
from benchmarks.gpu_report.kernels import BITS, operations
from benchmarks.gpu_report.page import table

BLOCKS = 132  # of a row: a multiple of 4 rows, none of 16, as Triton would specialise for
REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 227 << 10, 64, 32  # of a multiprocessor, at most
RESERVED = 1 << 10  # bytes of shared memory that the system takes for each program


def main() -> None:
    harness.parser(__doc__).parse_args()
    print(f"Triton {harness.installed('triton')}\n\n{table(list(rows()))}")


def rows() -> Iterator[dict[str, Any]]:
    compiled = kernel_compile.capture()
    cpu = torch.device("cpu")
    every = ((bits, each) for bits in BITS for each in operations(BLOCKS * 128, bits, cpu))
    for bits, (name, rounding, _, launch) in every:
        compiled.clear()
        launch()
        (kernel,) = compiled
        used = kernel_compile.resources(kernel)
        widths = accesses(kernel_compile.dumped(kernel, "-sass"))
        yield {
            "kernel": name,
            "bits": bits,
            "rounding": rounding,
            **used,
            "warps": warps(used["registers"], used["shared"], kernel.metadata.num_warps),
            "loads": told(widths["LDG"]),
            "stores": told(widths["STG"]),
        }


def accesses(sass: str) -> dict[str, Counter[int]]:
    """Count the machine code's LDG and STG (loads and stores of global memory) by width in bits."""
    found: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter()}
    for kind, rest in re.findall(r"\b(LDG|STG)\.([\w.]+)", sass):
        (width,) = re.findall(r"(?:^|\.)[US]?(8|16|64|128)(?=\.|$)", rest) or ["32"]
        found[kind][int(width)] += 1
    return found


def told(widths: Counter[int]) -> str:
    return ", ".join(f"{width} x {count}" for width, count in sorted(widths.items(), reverse=True))


def warps(registers: int, shared: int, program: int) -> int:
    """Return how many warps a multiprocessor holds, in programs of ``program`` warps. A warp's registers come in
    256."""
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // of_warp // program
    by_shared = SHARED // (shared + RESERVED)
    return min(by_registers, by_shared, PROGRAMS, WARPS // program) * program


if __name__ == "__main__":
    harness.start(main)
