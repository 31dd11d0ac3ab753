"""Kernel against reference, operation by operation, on a device. Run as a program (with TRITON_INTERPRET=1) it
prints a JSON object: case -> names of the operations whose results differ."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from unittest.mock import patch

import torch

from megazero.kernels import (
    adamw,
    dequantize,
    dequantize_accumulate,
    dequantize_sum_quantize,
    dispatch,
    quantize,
    sum_rows,
    weighted_swiglu,
)
from megazero.kernels.format import Format
from megazero.kernels.hadamard import Hadamard
from megazero.kernels.noise import Noise
from megazero.kernels.values import scales_at


@dataclass(frozen=True)
class Case:
    name: str
    form: Format
    next_form: Format
    dtype: torch.dtype
    blocks: int = 4  # of a slice; a multiple of 4, so that half of it is whole blocks of next_form, too


def mixed(bits: int, block: int, size: int) -> Format:
    return Format(bits, block, Hadamard(size, 3))


CASES = (
    Case("8 bits, fp32", Format(8, 128), Format(4, 64), torch.float32),
    Case("8 bits, bf16", Format(8, 16), Format(8, 16), torch.bfloat16),
    Case("4 bits, fp16", Format(4, 64), Format(2, 64), torch.float16),
    Case("4 bits, bf16", Format(4, 8), Format(4, 16), torch.bfloat16),
    Case("8 bits, Hadamard, fp32", mixed(8, 128, 64), mixed(4, 64, 64), torch.float32),
    Case("4 bits, Hadamard, bf16", mixed(4, 128, 128), Format(2, 64), torch.bfloat16),
    Case("2 bits, Hadamard, fp16", mixed(2, 64, 32), mixed(4, 16, 16), torch.float16),
    Case("8 bits, Hadamard of 8 in 2,048, bf16", mixed(8, 2048, 8), mixed(8, 512, 8), torch.bfloat16),
    Case("2 bits in blocks of 8, fp32", Format(2, 8), Format(8, 32), torch.float32, 8),
)


def values(case: Case, rows: int, device: str) -> torch.Tensor:
    """[rows, n]: normal values, and in the first row blocks of what is hard."""
    torch.manual_seed(0)
    x = torch.randn(rows, case.blocks, case.form.block)
    x[0, 0, 1] = torch.nan
    x[0, 1, 2] = -torch.inf
    x[1, 0] = 0
    x[1, 1] *= 2e-39
    x[1, 2, 0] = torch.finfo(case.dtype).max
    return x.flatten(1).to(case.dtype).to(device)


def buffer(form: Format, k: int, n: int, device: str) -> torch.Tensor:
    return torch.zeros(k, -(-form.coded_bytes(n) // 16) * 16, dtype=torch.uint8, device=device)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but for the bits of a NaN."""
    if a.dtype == torch.uint8:
        return torch.equal(a, b)
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0))


def on_kernels(there: bool):
    """Inside, operations on a CPU run by the interpreted kernels, or by the references."""
    return patch.object(dispatch, "INTERPRETED", dispatch.INTERPRETED and there)


def different(case: Case, device: str, rows: int = 3) -> list[str]:
    """Names of the operations whose kernel does not give the reference's bits (computed on the CPU)."""
    form, next_form = case.form, case.next_form
    x = values(case, rows, device)
    n = x.shape[1]
    results = []
    for where, kernel in ((device, True), ("cpu", False)):
        messages, differences = (buffer(form, rows, n, where) for _ in range(2))
        summed = buffer(next_form, 2, n // 2, where)
        decoded = torch.zeros(rows, n, dtype=case.dtype, device=where)
        added = x.roll(form.block + 5).to(where).repeat(1, 2)  # only its middle is added to
        part = added[:, 1 : n + 1]
        sums = torch.ones(n, device=where)
        one = torch.zeros(n, device=where)
        rows_sums = [sums.clone() for _ in range(4)]
        here = x.to(where)
        ways = [(accumulate, own) for accumulate in (False, True) for own in (None, here[0].float())]
        with on_kernels(kernel):
            assert dispatch.use_kernel(messages, here) == kernel
            quantize.quantize(here, messages, form)
            quantize.quantize(here.float(), differences, form, here.roll(1, 0))
            dequantize.dequantize(messages, decoded, form)
            dequantize.dequantize(messages, part, form, add=True)
            dequantize_accumulate.dequantize_accumulate(messages, sums, form, True)
            dequantize_accumulate.dequantize_accumulate(messages[2:], one, form, False)
            dequantize_sum_quantize.dequantize_sum_quantize(messages, n, form, summed, next_form)
            for out, (accumulate, own) in zip(rows_sums, ways, strict=True):
                sum_rows.sum_rows(here[:, 1:], out[: n - 1], accumulate, None if own is None else own[1:])
        results.append((messages, differences, decoded, added, sums, one, summed, torch.cat(rows_sums)))
    names = (
        "quantize",
        "difference",
        "dequantize",
        "add",
        "accumulate",
        "sum of one",
        "sum_quantize",
        "sum_rows",
    )
    return [name for name, a, b in zip(names, *results, strict=True) if not same(a.cpu(), b)]


KEPT = ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))


def different_updates(device: str, n: int = 5 * adamw.TILE // 2 + 7) -> list[str]:
    """Names of what three updates by the kernel leave in other bits than the reference's."""
    found = []
    for kept in KEPT:
        results = []
        for where, kernel in ((device, True), ("cpu", False)):
            torch.manual_seed(0)
            master, grad = torch.randn(2, n).unbind(0)
            first, second = (torch.zeros(n, dtype=each) for each in kept)
            grad[:4] = torch.tensor([torch.nan, -torch.inf, 1e-40, 0.0])
            grad[200] = 1e6
            state = [x.to(where) for x in (master, grad, first, second)]
            with on_kernels(kernel):
                assert dispatch.use_kernel(state[0], state[1]) == kernel
                for step, decay, scale in ((1, 0.1, 0.37), (2, 0.0, 1.0), (1000, 0.1, 3e-5)):
                    rates = adamw.Rates.of(step, 1e-2, (0.9, 0.95), 1e-8, decay, scale)
                    adamw.adamw(*state, rates, Noise(3, step, 4, 128))
            results.append(state)
        names = ("master", "grad", "exp_avg", "exp_avg_sq")
        changed = zip(names, *results, strict=True)
        found += [f"{name}, {kept}" for name, a, b in changed if not same(a.cpu(), b)]
    return found


def different_activations(device: str, rows: int = 3) -> list[str]:
    """Names of what of weighted SwiGLU and its gradients the kernels give in other bits than the reference.

    Gates are spread over all that bf16 has; 64 rows have every one. A second time all sums are exact, whatever their
    order.
    """
    found, drawn, width = [], torch.Generator().manual_seed(0), weighted_swiglu.TILE + 8
    every = (torch.arange(rows * width) * 40503).to(torch.int16).view(rows, width)
    near, size = torch.rand(2, rows, width, generator=drawn) + 0.5
    sign = torch.randint(2, (rows, width), generator=drawn) * 2.0 - 1
    normal = torch.randn(2, rows, width, generator=drawn)
    cases = {"gates": (every.view(torch.bfloat16), *normal), "exact sums": (near, size, sign)}
    probabilities = torch.rand(rows, generator=drawn)
    for name, case in cases.items():
        results = []
        for where, kernel in ((device, True), ("cpu", False)):
            gate, up, grad = (x.to(where, torch.bfloat16) for x in case)
            shares = probabilities.to(where)
            with on_kernels(kernel):
                assert dispatch.use_kernel(gate, up) == kernel
                out = weighted_swiglu.product(gate, up, shares)
                results.append((out, *weighted_swiglu.gradients(grad, gate, up, shares)))
        names = ("product", "gate", "up", "probabilities")[: 4 if name == "exact sums" else 3]
        found += [
            f"{what}, {name}" for what, a, b in zip(names, *results, strict=False) if not same(a.cpu(), b)
        ]
    return found


@dispatch.jit
def _scales_at(out, b, row_bytes, row_blocks, PART: dispatch.tl.constexpr):
    at = scales_at(dispatch.tl.load(out), b, row_bytes, row_blocks, PART)
    dispatch.tl.store(out, at)


def far_scales() -> str:
    """Where block 5 of row 7 has its scale, by the kernels, in rows of 2 ** 28 blocks of 64 bytes (16 GiB)."""
    out = torch.tensor([7])
    _scales_at[(1,)](out, 5, 1 << 34, 1 << 28, 64)
    return str(out.item())


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {case.name: different(case, "cpu") for case in CASES}
    results |= {"scales_at": [far_scales()], "adamw": different_updates("cpu")}
    results |= {"weighted SwiGLU": different_activations("cpu")}
    results["why none runs"] = [dispatch.why_none_runs(torch.device("cpu"))]
    json.dump(results, sys.stdout)
