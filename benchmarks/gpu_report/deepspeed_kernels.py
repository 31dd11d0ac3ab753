"""The kernels against DeepSpeed's CUDA quantiser, which ZeRO++ uses, on the same fp16 values."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_report.record import Record, Skip, one_line
from benchmarks.gpu_report.setting import Setting, quickest
from megazero.comm.wire import DEFAULT_BLOCK
from megazero.kernels.dequantize import dequantize
from megazero.kernels.format import Format
from megazero.kernels.quantize import quantize

GROUP = 2048  # values that share a scale at DeepSpeed's; here a block may have as many


def run(setting: Setting, record: Record) -> None:
    theirs: Any = None
    with record.attempt(operation="DeepSpeed's quantiser is built") as row:
        theirs = _load(setting)
        row["found"] = "yes"
    if theirs is None:
        return
    x = torch.randn((1 << 26) // GROUP, GROUP, device=setting.device).half()
    for bits in (8, 4):
        try:
            rival = _theirs(theirs, x, bits, setting)
        except Exception as error:  # noqa: BLE001 - a failure is a row
            record.row(operation="encode, decode", bits=bits, reason=one_line(error))
            continue
        for block in (DEFAULT_BLOCK[bits], GROUP):
            for name, launch in _ours(x.view(1, -1), Format(bits, block)).items():
                with record.attempt(operation=name, bits=bits, block=block, elements=x.numel()) as row:
                    mine = quickest(launch, setting)
                    row |= {"megazero ms": mine * 1e3, "DeepSpeed ms": rival[name] * 1e3}
                    row["times as fast"] = rival[name] / mine


def _theirs(module: Any, x: torch.Tensor, bits: int, setting: Setting) -> dict[str, float]:
    """Return the seconds of DeepSpeed's operations on groups x [groups, values], by name."""
    coded, scales = module.quantize(x, len(x), bits, module.Symmetric)
    launches = {
        "encode": lambda: module.quantize(x, len(x), bits, module.Symmetric),
        "decode": lambda: module.dequantize(coded, scales, len(x), bits, module.Symmetric),
    }
    return {name: quickest(launch, setting) for name, launch in launches.items()}


def _ours(x: torch.Tensor, form: Format) -> dict[str, Callable[[], object]]:
    messages = torch.zeros(1, form.coded_bytes(x.numel()), dtype=torch.uint8, device=x.device)
    out = torch.empty_like(x)
    return {
        "encode": lambda: quantize(x, messages, form),
        "decode": lambda: dequantize(messages, out, form),
    }


def _load(setting: Setting) -> Any:
    if importlib.util.find_spec("deepspeed") is None:
        raise Skip("deepspeed is not installed (pip install deepspeed)")
    if setting.rehearsal:
        raise Skip("DeepSpeed's quantiser is a CUDA extension, and there is no CUDA device")
    from deepspeed.ops.op_builder import QuantizerBuilder

    return QuantizerBuilder().load()  # compiles it with nvcc
