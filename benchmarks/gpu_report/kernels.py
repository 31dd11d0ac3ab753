"""Bandwidth of the kernels, as a share of a device copy that moves as many bytes, measured beside each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import torch

from benchmarks.gpu_report.record import Record
from benchmarks.gpu_report.setting import Setting, quickest
from megazero.comm.wire import DEFAULT_BLOCK
from megazero.kernels import dispatch
from megazero.kernels.adamw import Rates, adamw
from megazero.kernels.dequantize import dequantize
from megazero.kernels.dequantize_accumulate import dequantize_accumulate
from megazero.kernels.dequantize_sum_quantize import dequantize_sum_quantize
from megazero.kernels.format import Format
from megazero.kernels.hadamard import Hadamard
from megazero.kernels.quantize import quantize
from megazero.kernels.sum_rows import sum_rows
from megazero.kernels.weighted_swiglu import gradients, product

BITS = (32, 16, 8, 4, 2)  # of an element of a message; 32 and 16: exact
ROWS = 4  # messages of an operation: sources of a sum
WIDTH = 1024  # of an expert
RATES = Rates.of(10, 1e-4, (0.9, 0.95), 1e-8, 0.1, 0.5)
EXACT = {32: torch.float32, 16: torch.bfloat16}
Operation = tuple[str, str, int, Callable[[], object]]  # name, rounding, bytes read and written, what runs


def run(setting: Setting, record: Record) -> None:
    if not dispatch.AVAILABLE:
        record.note("Triton is not installed: what was measured is the torch references")
    elif setting.rehearsal:
        record.note(
            "the kernels ran in Triton's interpreter" if dispatch.INTERPRETED else "the references ran"
        )
    copied = cache(lambda size: _copy_rate(size, setting))
    for n in setting.pick((1 << 22, 1 << 26), (1 << 10,)):
        for bits in BITS:
            for name, rounding, moved, launch in operations(n, bits, setting.device):
                with record.attempt(operation=name, bits=bits, rounding=rounding, elements=ROWS * n) as row:
                    setting.need(2)
                    rate = moved / quickest(launch, setting)
                    row["GB/s"] = rate / 1e9
                    row["of a copy"] = rate / copied(moved)


def operations(n: int, bits: int, device: torch.device) -> Iterator[Operation]:
    """Yield the operations as the engine uses them: rows of n elements, fp32 masters and sums, bf16 gradients and
    parameters."""
    if bits in EXACT:
        x, out = torch.randn(ROWS, n, device=device).to(EXACT[bits]), torch.zeros(n, device=device)
        own, moved = x[0], x.nbytes + 2 * out.nbytes
        yield "sum", "-", moved, lambda: sum_rows(x[1:], out, True, own)
        yield from _updates(n, device) if bits == 32 else _activations(n, device)
        return
    form = Format(bits, DEFAULT_BLOCK[bits])
    coded = ROWS * form.coded_bytes(n)
    messages = torch.zeros(ROWS, _filled(form.coded_bytes(n)), dtype=torch.uint8, device=device)
    onward = torch.zeros(ROWS, _filled(form.coded_bytes(n // ROWS)), dtype=torch.uint8, device=device)
    exact = torch.randn(ROWS, n, device=device)
    half = exact.to(torch.bfloat16)
    sums = torch.zeros(n, device=device)
    for x, of in ((exact, "fp32"), (half, "bf16")):
        yield f"encode {of}", "nearest", x.nbytes + coded, lambda x=x: quantize(x, messages, form)
    yield (
        "decode-sum-encode", "nearest", coded + form.coded_bytes(n),
        lambda: dequantize_sum_quantize(messages, n, form, onward, form),
    )  # fmt: skip
    mixed = replace(form, transform=Hadamard(form.block))
    yield "encode fp32", "Hadamard", exact.nbytes + coded, lambda: quantize(exact, messages, mixed)
    yield (
        "decode-add bf16", "Hadamard", 2 * half.nbytes + coded,
        lambda: dequantize(messages, half, mixed, add=True),
    )  # fmt: skip
    yield (
        "decode-sum fp32", "Hadamard", coded + 2 * sums.nbytes,
        lambda: dequantize_accumulate(messages, sums, mixed, True),
    )  # fmt: skip
    yield "decode bf16", "-", half.nbytes + coded, lambda: dequantize(messages, half, form)
    yield "decode-add bf16", "-", 2 * half.nbytes + coded, lambda: dequantize(messages, half, form, add=True)
    yield (
        "decode-sum fp32", "-", coded + 2 * sums.nbytes,
        lambda: dequantize_accumulate(messages, sums, form, True),
    )  # fmt: skip


def _updates(n: int, device: torch.device) -> Iterator[Operation]:
    """Yield updates of ROWS * n elements."""
    state = torch.zeros(4, ROWS * n, device=device)
    yield "update", "-", state.nbytes + 3 * state[0].nbytes, lambda: adamw(*state, RATES)  # type: ignore[call-arg]


def _activations(n: int, device: torch.device) -> Iterator[Operation]:
    """Yield those of experts' rows of WIDTH elements, ROWS * n in all."""
    gate, up, grad = torch.randn(3, ROWS * n // WIDTH, WIDTH, device=device).to(torch.bfloat16)
    probabilities = torch.rand(len(gate), device=device)
    yield "weighted SwiGLU", "-", 3 * gate.nbytes, lambda: product(gate, up, probabilities)
    yield "gradients of SwiGLU", "-", 5 * gate.nbytes, lambda: gradients(grad, gate, up, probabilities)


def _filled(size: int) -> int:
    return -(-size // 16) * 16


def _copy_rate(moved: int, setting: Setting) -> float:
    """Return the bytes read and written per second of a copy that moves ``moved``."""
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return moved / quickest(lambda: target.copy_(source), setting)
