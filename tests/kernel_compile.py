"""Compiles every kernel for a GPU, which needs none. Prints a JSON object: kernel -> the widths of its global
accesses and what would break equality with the references. Run as a program, without the interpreter."""

from __future__ import annotations

import json
import re
import sys

import torch


def compiled(kernel, pointers: dict[str, str], constants: dict[str, object]) -> dict[str, list[str]]:
    """The kernel's PTX for compute capability 9.0 with 16-byte aligned pointers and row sizes, summarised."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, values, hints = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
            continue
        signature[name] = pointers.get(name, "i32")
        if name in pointers or name in ("row_bytes", "out_bytes", "row_stride"):
            hints[(i,)] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(kernel, signature, values, hints),
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False},
    )
    ptx = made.asm["ptx"]
    return {
        "accesses": sorted(set(re.findall(r"(?:ld|st)\.global\.[\w.]+", ptx))),
        "inexact": sorted(set(re.findall(r"\w+\.(?:approx|full)\.\w+|\w+\.ftz\.\w+|fma\.\w+\.\w+", ptx))),
    }


def main() -> None:
    torch.version.cuda = torch.version.cuda or "any"  # dispatch then loads Triton, as with a CUDA build
    from megazero.kernels import (  # fmt: skip
        dequantize,
        dequantize_accumulate,
        dequantize_sum_quantize,
        dispatch,
        quantize,
        reorder_quantize,
    )

    tile = dispatch.TILE
    buffers = {"messages": "*i8", "halves": "*i16"}
    sums = {"LARGEST": 1 << 30, "STOCHASTIC": True}
    eight, four = {"BITS": 8, "BLOCK": 128, "R": tile // 128}, {"BITS": 4, "BLOCK": 64, "R": tile // 64}
    two_hops = {"NEXT_BITS": 4, "NEXT_BLOCK": 64, "CLIP": 0, "ELEMENTS": tile}
    out = {**buffers, "out": "*i8", "out_halves": "*i16"}
    jobs = {
        "quantize": (quantize, {**buffers, "x": "*fp32"}, {**eight, **sums, "CLIP": 0}),
        "quantize with clip": (quantize, {**buffers, "x": "*fp16"}, {**four, **sums, "CLIP": 4}),
        "reorder_quantize": (reorder_quantize, {**buffers, "x": "*i16"}, {**four, **sums, "CLIP": 0}),
        "dequantize": (dequantize, {**buffers, "out": "*i16"}, {**eight, "ADD": False}),
        "dequantize and add": (dequantize, {**buffers, "out": "*i16"}, {**eight, "ADD": True}),
        "accumulate": (dequantize_accumulate, {**buffers, "out": "*fp32"}, {**four, "ACCUMULATE": True}),
        "sum_quantize": (dequantize_sum_quantize, out, {**eight, **two_hops, **sums}),
    }
    made = {
        name: compiled(module._kernel, pointers, constants)
        for name, (module, pointers, constants) in jobs.items()
    }
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
