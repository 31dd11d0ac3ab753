"""docs/results/kernels.md: what the kernels compile to for compute capability 9.0. It needs no GPU.

    python -m benchmarks.gpu_report.kernel_table [--out docs/results/kernels.md]

Read from the machine code by cuobjdump, which comes with Triton.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from tests import kernel_compile  # isort: skip  first: it tells the kernels that they will be compiled

from benchmarks import harness
from benchmarks.gpu_report.kernels import BITS, operations
from benchmarks.gpu_report.page import table

BLOCKS = 132  # of a row: a multiple of 4 rows, none of 16, as Triton would specialise for
REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 227 << 10, 64, 32  # of a multiprocessor, at most
RESERVED = 1 << 10  # bytes of shared memory that the system takes for each program
PAGE = """\
# The kernels as compiled

    python -m benchmarks.gpu_report.kernel_table

writes this page and needs no GPU. Triton {triton} compiles every kernel for compute capability 9.0 (H100, H200),
and its cuobjdump reads the machine code.

- *kernel*: sum (`kernels/sum_rows.py`), update (`adamw.py`), encode (`quantize.py`), decode and decode-add
  (`dequantize.py`), decode-sum (`dequantize_accumulate.py`), decode-sum-encode (`dequantize_sum_quantize.py`).
- *bits*: of an element of a message, exact at 32 and 16; of an update's parameters.
- *registers*: per thread; a program has 128 threads. *spilled*: bytes of a thread's stack, used when registers run
  out.
- *rounding*: how values are rounded; *Hadamard* rounds to nearest after transforming each block.
- *shared*: bytes of shared memory per program, through which its threads find a block's absmax or change the layout
  between loads and stores.
- *warps*: how many a multiprocessor holds at once, of 64, as registers and shared memory allow.
- *loads*, *stores*: instructions on global memory in the machine code, by width in bits and count; 128 is the
  widest. 16-bit ones are scales, one per block; 64-bit ones are the payload of a thread that has no more.

Accesses narrower than 128 bits cost no extra bandwidth here, because neighbouring threads access neighbouring bytes
and a warp's accesses are combined into 32-byte sectors. [gpu.md](gpu.md) has their bandwidth on a card.

{table}

{spills}

## Bytes of an update

AdamW's update of n elements, with fp32 master, gradient and moments and parameters of w bytes (2 in 16 bits), moves

- in one pass (`kernels/adamw.py`): 28 n; with the P copy (28 + w) n; with the differences that a delta refresh
  encodes (32 + w) n;
- one operation after the other (gradients scaled in place, torch's fused step, then the cast, or rounding, conversion
  and subtraction): 36 n; (40 + w) n; (52 + 3 w) n.

In 16 bits these are 28, 30 and 34 bytes against 36, 42 and 58: 22, 29 and 41% less. Encoding the differences reads
them in both. With 1B parameters a rank that holds 1/8 of the optimizer's states moves 4.3 GB instead of 7.3 in a step
of zeropp. On an H100 134M elements take 1.25, 1.34 and 1.52 ms in one pass, and 1.80, 2.06 and 3.01 ms one operation
after the other (piece `update` of [gpu.md](gpu.md)).

`make test` compiles the kernels too: it checks spills, access widths, that arithmetic is exactly rounded, and that
one compilation serves all noise (`tests/unit/kernels/test_compile.py`).
"""


def main() -> None:
    out = harness.parser(__doc__, out=harness.DOCS / "results" / "kernels.md").parse_args().out
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
    """Return which kernels spill registers, in words."""
    names = dict.fromkeys(row["kernel"] for row in found if row["spilled"])
    return f"Too few registers: {', '.join(names)}." if names else "No kernel spills."


def kernels() -> Iterator[tuple[str, int, str, Callable[[], object]]]:
    """Yield name, bits, rounding and launch of those that the report on a GPU measures."""
    import torch

    for bits in BITS:
        for name, rounding, _, launch in operations(BLOCKS * 128, bits, torch.device("cpu")):
            yield name, bits, rounding, launch


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
