"""What the kernels compile to for compute capability 9.0: the table of docs/results/kernels.md. It needs no GPU.

    python -m benchmarks.gpu_report.kernel_table

The machine code is read by cuobjdump, which comes with Triton. Instructions are those of a message's kernels that run
for an element of what is written, of 4 messages where they are summed: all but those behind the last exit, and those
of the loop over sources 4 times. Slots are those that an H100 could issue while its memory moves the element's bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests import kernel_compile  # isort: skip  first: it tells the kernels that they will be compiled

import torch

from benchmarks import harness
from benchmarks.gpu_report.kernels import BITS, EXACT, ROWS, operations
from benchmarks.gpu_report.page import table
from megazero.kernels.dispatch import TILE

BLOCKS = 132  # of a row: a multiple of 4 rows, none of 16, as Triton would specialise for
REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 227 << 10, 64, 32  # of a multiprocessor, at most
RESERVED = 1 << 10  # bytes of shared memory that the system takes for each program
# An H100's: instructions of a thread that its 132 x 4 schedulers issue a second at 1.7 GHz, and bytes of its memory.
ISSUED, MEMORY = 132 * 4 * 32 * 1.7e9, 3.35e12
KINDS = (
    ("memory", r"(LD|ST)(G|S|L|C|SM)"),
    ("shuffle", r"SHFL"),
    ("fp", r"[FH](ADD|MUL|FMA)2?|IMAD"),  # at the full rate; IMAD there, too
    ("int", r"(?!U[A-Z]|NOP)\w+"),  # and comparisons, at half of it
    ("uniform", r"U\w+"),
)


def main() -> None:
    harness.parser(__doc__).parse_args()
    print(f"Triton {harness.installed('triton')}\n\n{table(list(rows()))}")


def rows() -> Iterator[dict[str, Any]]:
    compiled = kernel_compile.capture()
    cpu = torch.device("cpu")
    n = BLOCKS * 128
    every = ((bits, each) for bits in BITS for each in operations(n, bits, cpu))
    for bits, (name, rounding, moved, launch) in every:
        compiled.clear()
        launch()
        (kernel,) = compiled
        used = kernel_compile.resources(kernel)
        sass = kernel_compile.dumped(kernel, "-sass")
        widths = accesses(sass)
        row = {
            "kernel": name,
            "bits": bits,
            "rounding": rounding,
            **used,
            "warps": warps(used["registers"], used["shared"], kernel.metadata.num_warps),
            "loads": told(widths["LDG"]),
            "stores": told(widths["STG"]),
        }
        if bits not in EXACT:
            written = n if "sum" in name else ROWS * n
            run = instructions(sass, TILE // (32 * kernel.metadata.num_warps))
            row["instructions"] = ", ".join(f"{kind} {count:.1f}" for kind, count in run.items())
            row["slots"] = f"{ISSUED / MEMORY * moved / written:.1f}"
        yield row


def accesses(sass: str) -> dict[str, Counter[int]]:
    """Count the machine code's LDG and STG (loads and stores of global memory) by width in bits."""
    found: dict[str, Counter[int]] = {"LDG": Counter(), "STG": Counter()}
    for kind, rest in re.findall(r"\b(LDG|STG)\.([\w.]+)", sass):
        (width,) = re.findall(r"(?:^|\.)[US]?(8|16|64|128)(?=\.|$)", rest) or ["32"]
        found[kind][int(width)] += 1
    return found


def instructions(sass: str, elements: int) -> dict[str, float]:
    """Count the instructions that run for each of a thread's elements, by kind."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)[\w.]* *([^;]*);", sass)
    code = [(int(at, 16), name, rest) for at, name, rest in found]
    last = max(at for at, name, _ in code if name == "EXIT")
    jumps = ((int(rest.split("0x")[-1], 16), at) for at, name, rest in code if name == "BRA" and at < last)
    loops = [(first, at) for first, at in jumps if first < at]
    counted = dict.fromkeys((kind for kind, _ in KINDS), 0.0)
    for at, name, _ in code:
        kind = next((kind for kind, names in KINDS if re.fullmatch(names, name)), None)
        if at <= last and kind:
            counted[kind] += (ROWS if any(first <= at <= end for first, end in loops) else 1) / elements
    return counted


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
