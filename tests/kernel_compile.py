"""Launches every operation on CPU tensors as for a GPU, up to the compiled kernel, which needs none. Prints a JSON
object: launch -> the widths of its global accesses, its registers, what would break equality with the references, and
how many kernels were compiled for all that it draws. Run as a program, without the interpreter. Arguments name the
launches (default: all)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

torch.version.cuda = torch.version.cuda or "any"  # dispatch then loads Triton, as with a CUDA build
from megazero.kernels import (  # noqa: E402
    adamw,
    dequantize,
    dequantize_accumulate,
    dequantize_sum_quantize,
    dispatch,
    quantize,
    sum_rows,
    weighted_swiglu,
)
from megazero.kernels.format import Format  # noqa: E402
from megazero.kernels.hadamard import Hadamard  # noqa: E402
from megazero.kernels.noise import Noise  # noqa: E402
from tests.kernel_cases import buffer  # noqa: E402

ROWS, BLOCKS = 3, 132  # of a launch; neither row nor block counts are multiples of 16


@dataclass(frozen=True)
class Keyed(Noise):
    """Noise whose keys are not hashed but given."""

    given: tuple[int, int] = (0, 0)

    @property
    def keys(self) -> tuple[int, int]:
        return self.given


# What Triton specialises by itself: 1 and multiples of 16; and a counter of more than 31 bits.
DRAWN = (
    Keyed(0, 0, 0, 4, (-5, 3)),
    Keyed(0, 0, 0, 0, (0, 1)),
    Keyed(0, 0, 0, 2, (1, 16)),
    Keyed(0, 0, 0, (1 << 32) + 32, (16, 0)),
)


def capture() -> list[Any]:
    """From here on launches on CPU tensors compile for compute capability 9.0 and do not run; the list grows by
    the compiled kernel of each."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target
        )
    )
    run, compiled = JITFunction.run, []

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *args, warmup=True, **options))

    JITFunction.run = compile_only
    dispatch.INTERPRETED = True  # CPU tensors take the kernels
    return compiled


def launches(rows: int, blocks: int) -> dict[str, Callable[[Noise], None]]:
    """Every operation as a function of its noise; tensors of ``rows`` rows of ``blocks`` blocks."""
    eight, four = Format(8, 128), Format(4, 64)

    def encoded(form: Format) -> torch.Tensor:
        return buffer(form, rows, blocks * form.block, "cpu")

    def values(form: Format, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(rows, blocks * form.block, dtype=dtype)

    def sum_quantize(_: Noise) -> None:
        n = blocks * eight.block
        messages, out = buffer(four, rows, n, "cpu"), buffer(eight, 1, n, "cpu")
        dequantize_sum_quantize.dequantize_sum_quantize(messages, n, four, out, eight)

    def update(noise: Noise, kept: torch.dtype = torch.float32) -> None:
        """The step's numbers change, and 1 and 16 are among them."""
        state = values(eight, torch.float32).view(1, -1).repeat(2, 1).unbind(0)
        held = (torch.zeros_like(state[0], dtype=kept) for _ in range(2))
        rates = adamw.Rates.of(*((1, 1.0) if noise is DRAWN[0] else (7, 16.0)), (0.9, 0.5), 1e-8, 0.0, 1.0)
        adamw.adamw(*state, *held, rates, noise)

    def mixed(noise: Noise) -> Format:
        return Format(4, 64, transform=Hadamard(64, noise.start))

    half = torch.bfloat16
    inner, probabilities = values(eight, half), torch.zeros(rows)
    decode, accumulate = dequantize.dequantize, dequantize_accumulate.dequantize_accumulate
    return {
        "quantize": lambda _: quantize.quantize(values(eight, torch.float32), encoded(eight), eight),
        "quantize a difference": lambda _: quantize.quantize(
            values(eight, torch.float32), encoded(eight), eight, values(eight, half)
        ),
        "quantize and mix": lambda noise: quantize.quantize(
            values(four, torch.float32), encoded(four), mixed(noise)
        ),
        "dequantize and mix": lambda noise: decode(encoded(four), values(four, half), mixed(noise)),
        "accumulate and mix": lambda noise: accumulate(
            encoded(four), values(four, torch.float32)[0], mixed(noise), True
        ),
        "dequantize": lambda _: decode(encoded(eight), values(eight, half), eight),
        "dequantize and add": lambda _: decode(encoded(eight), values(eight, half), eight, add=True),
        "accumulate": lambda _: accumulate(encoded(four), values(four, torch.float32)[0], four, True),
        "sum_quantize": sum_quantize,
        "adamw": update,
        "adamw in bf16": lambda noise: update(noise, half),
        "adamw in int8": lambda noise: update(noise, torch.uint8),
        "sum_rows": lambda _: sum_rows.sum_rows(
            values(four, half), values(four, torch.float32)[0], True, values(four, half)[0]
        ),
        "weighted SwiGLU": lambda _: weighted_swiglu.product(inner, inner, probabilities),
        "gradients of SwiGLU": lambda _: weighted_swiglu.gradients(inner, inner, inner, probabilities),
    }


def resources(kernel: Any) -> dict[str, int]:
    """Of a compiled kernel: registers of a thread, bytes of its stack (what does not fit in registers) and of shared
    memory."""
    said = dumped(kernel, "-res-usage")
    (registers,) = re.findall(r"REG:(\d+)", said)
    stack = sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", said)))
    return {"registers": int(registers), "spilled": stack, "shared": kernel.metadata.shared}


def dumped(kernel: Any, what: str) -> str:
    """What CUDA's cuobjdump, which Triton's package brings, prints of a compiled kernel. what: its option."""
    import triton.backends.nvidia as nvidia

    program = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([program, what, file.name], capture_output=True, text=True, check=True).stdout


def summary(compiled: list[Any]) -> dict[str, Any]:
    """Of the kernels of one operation's launches: the first one's PTX in short, and how many there are."""
    ptx = compiled[0].asm["ptx"]
    return {
        **resources(compiled[0]),
        "accesses": sorted(set(re.findall(r"(?:ld|st)\.global\.[\w.]+", ptx))),
        "inexact": sorted(set(re.findall(r"\w+\.(?:approx|full)\.\w+|\w+\.ftz\.\w+|fma\.\w+\.\w+", ptx))),
        # of 64 bits, as one per block and source was; of numbers, at a quarter of an addition's rate
        "divisions": len(re.findall(r"(?:div|rem)\.[su]64", ptx)),
        "conversions": len(re.findall(r"cvt\.\w+\.(?:f32\.[su]\d|[su]\d+\.f32)", ptx)),
        # between threads, in loops
        "exchanges": len(re.findall(r"bar\.|shfl\.", str(re.findall(r"(\$L\w+):(.*?)bra\s+\1;", ptx, re.S)))),
        "compilations": len({id(kernel) for kernel in compiled}),
    }


def main(names: Sequence[str]) -> None:
    """Compile the launches of these names, or all."""
    compiled = capture()
    made = {}
    for size, (rows, blocks) in {"": (ROWS, BLOCKS), " of one block": (1, 1)}.items():
        every = launches(rows, blocks)
        for name in names or every:
            compiled.clear()
            for noise in DRAWN:
                every[name](noise)
            made[name + size] = summary(compiled)
    compiled.clear()
    why = dispatch.why_none_runs(torch.device("cpu"))  # it compiles, but does not run
    made["tried at a start"] = summary(compiled) if compiled else {"accesses": why}
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
