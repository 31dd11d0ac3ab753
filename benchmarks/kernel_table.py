"""docs/kernels.md: what the kernels compile to for compute capability 9.0, which needs no GPU.

    python benchmarks/kernel_table.py [--out docs/kernels.md]

Read from the machine code by cuobjdump, which comes with Triton.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import kernel_compile  # isort: skip  first: it tells the kernels that they will be compiled

from benchmarks import harness
from benchmarks.gpu_report.kernels import BITS, operations
from benchmarks.gpu_report.page import table

BLOCKS = 132  # of a row: a multiple of 4 rows, none of 16, as Triton would specialise for
REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 227 << 10, 64, 32  # of a multiprocessor, at most
RESERVED = 1 << 10  # bytes of shared memory that the system takes for each program
PAGE = """\
# The kernels as compiled

    python benchmarks/kernel_table.py

writes this page; it needs no GPU. Every kernel is compiled for compute capability 9.0 (H100, H200) by Triton
{triton}, and the machine code is read by its cuobjdump.

- *registers*: of a thread; a program has 128 threads. *spilled*: bytes of a thread's stack, where it has too few.
- *shared*: bytes of shared memory of a program; what its threads exchange to find a block's absmax, or to change the
  layout between loads and stores.
- *warps*: that a multiprocessor holds at once, of 64, by registers and shared memory.
- *loads*, *stores*: of global memory in the machine code, by width in bits and how often they stand there; 128 is
  the widest. 16 bits are scales, one of a block each, and 32 or 64 the payload where a thread has no more of it.

An access of less than 128 bits costs no bandwidth of its own where neighbouring threads take neighbouring bytes, as
they do here: a warp's accesses are joined into sectors of 32 bytes. Bandwidth itself needs a card: `make gpu-report`.

{table}

{spills}

`make test` compiles the kernels, too, and looks at registers, spills, widths and exactly rounded arithmetic
(`tests/unit/test_kernels_compile.py`).
"""


def main() -> None:
    out = harness.parser(__doc__, out=harness.DOCS / "kernels.md").parse_args().out
    import triton

    found = list(rows())
    page = PAGE.format(triton=triton.__version__, table=table(found), spills=spills(found))
    out.write_text(page)
    print(page)


def rows() -> Iterator[dict[str, Any]]:
    compiled = kernel_compile.capture()
    for name, bits, rounding, launch in kernels():
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


def spills(found: list[dict[str, Any]]) -> str:
    """What the table says of registers that are too few, in words."""
    names = dict.fromkeys(row["kernel"] for row in found if row["spilled"])
    return f"Too few registers: {', '.join(names)}." if names else "No kernel spills."


def kernels() -> Iterator[tuple[str, int, str, Callable[[], object]]]:
    """Name, bits, rounding, launch: those that the report on a GPU measures, and the two others."""
    import torch

    for bits in BITS:
        for name, rounding, _, launch in operations(BLOCKS * 128, bits, torch.device("cpu")):
            yield name, bits, rounding, launch
    others = kernel_compile.launches(kernel_compile.ROWS, BLOCKS, 3)
    drawn = kernel_compile.DRAWN[0]
    for name, told_as in (
        ("quantize with clip", "encode fp16, searched clip"),
        ("reorder_quantize", "reorder-encode bf16"),
    ):
        yield told_as, 4, "stochastic", lambda name=name: others[name](drawn)


def accesses(sass: str) -> dict[str, Counter[int]]:
    """LDG and STG (loads and stores of global memory) -> width in bits -> how many stand in the machine code."""
    found: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter()}
    for kind, rest in re.findall(r"\b(LDG|STG)\.([\w.]+)", sass):
        (width,) = re.findall(r"(?:^|\.)[US]?(8|16|64|128)(?=\.|$)", rest) or ["32"]
        found[kind][int(width)] += 1
    return found


def told(widths: Counter[int]) -> str:
    return ", ".join(f"{width} x {count}" for width, count in sorted(widths.items(), reverse=True))


def warps(registers: int, shared: int, program: int) -> int:
    """Warps that a multiprocessor holds, in programs of ``program`` warps. Registers come in 256 for a warp."""
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // of_warp // program
    by_shared = SHARED // (shared + RESERVED)
    return min(by_registers, by_shared, PROGRAMS, WARPS // program) * program


if __name__ == "__main__":
    harness.start(main)
