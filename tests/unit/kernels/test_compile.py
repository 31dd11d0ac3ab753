"""The kernels compile for a GPU (without one), with 16-byte accesses and exactly rounded arithmetic, but for exp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks.gpu_report.kernels import BITS, operations
from tests import ROOT

KERNELS = (
    "quantize", "quantize a difference", "dequantize", "dequantize and add", "accumulate",
    "sum_quantize", "sum_rows", "adamw",
    "quantize and mix", "dequantize and mix", "accumulate and mix", "adamw in bf16",
    "adamw in int8", "weighted SwiGLU", "gradients of SwiGLU",
)  # fmt: skip
EXP = ("cvt.ftz.sat", "ex2.approx.ftz", "fma.rm.ftz", "fma.rn.ftz")  # CUDA's, which torch has, too
INEXACT = {
    # their products are exact
    **dict.fromkeys(("accumulate", "accumulate and mix", "sum_quantize"), ["fma.rn.f32"]),
    "weighted SwiGLU": [*EXP],
    "gradients of SwiGLU": sorted([*EXP, "fma.rn.f32"]),
}  # torch fuses one, too
pytestmark = pytest.mark.long
ALWAYS = ("quantize", "dequantize and add", "sum_quantize", "adamw")


def of_each(kernels: Iterable[str]) -> list[Any]:
    """Return the parameters of a test of these kernels: those of ALWAYS, and slow ones."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALWAYS)) for name in kernels]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the kernels of the selected tests compile to."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed (it has wheels for Linux only)")
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    env.pop("TRITON_INTERPRET", None)
    here = [item for item in request.session.items if item.path == request.path]
    names = () if any(item.get_closest_marker("slow") for item in here) else ALWAYS
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_compile", *names],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", of_each(KERNELS))
def test_compiles_to_wide_accesses_and_exact_arithmetic(kernel: str, compiled: dict[str, Any]) -> None:
    accesses = compiled[kernel]["accesses"]
    for kind in ("ld", "st"):
        assert any(name.startswith(f"{kind}.global.v4") for name in accesses), accesses
    assert compiled[kernel]["inexact"] == INEXACT.get(kernel, [])


@pytest.mark.parametrize("kernel", of_each(KERNELS))
def test_blocks_stay_in_registers(kernel: str, compiled: dict[str, Any]) -> None:
    """decode-sum-encode had 255 of them, and 2 to 3% of a copy's bandwidth on an H100."""
    assert compiled[kernel]["spilled"] == 0
    assert compiled[kernel]["registers"] <= 128


@pytest.mark.parametrize("kernel", of_each(kernel for kernel in KERNELS if "adamw" not in kernel))
def test_addresses_and_digits_take_no_slow_arithmetic(kernel: str, compiled: dict[str, Any]) -> None:
    assert (compiled[kernel]["divisions"], compiled[kernel]["conversions"]) == (0, 0)


@pytest.mark.parametrize("kernel", of_each(("sum_quantize", "accumulate", "accumulate and mix")))
def test_a_message_is_added_without_exchanges_between_threads(kernel: str, compiled: dict[str, Any]) -> None:
    """Eight barriers for each source were part of decode-sum-encode's 56% of a copy's bandwidth on an H100."""
    assert compiled[kernel]["exchanges"] == 0


@pytest.mark.parametrize("size", ["", " of one block"])
@pytest.mark.parametrize("kernel", of_each(KERNELS))
def test_one_compilation_serves_all_noise(kernel: str, size: str, compiled: dict[str, Any]) -> None:
    """Keys and counters of 0, 1, 16 and beyond 31 bits: nothing compiles in mid-training."""
    assert compiled[kernel + size]["compilations"] == 1


@pytest.mark.slow
def test_every_kernel_is_tried(compiled: dict[str, Any]) -> None:
    start = "tried at a start"  # of a run, by dispatch.py
    assert compiled[start]["accesses"] == ["st.global.b32"]
    assert set(compiled) - {start} == {kernel + size for kernel in KERNELS for size in ("", " of one block")}


def test_the_page_of_compiled_kernels_has_every_operation() -> None:
    """docs/results/kernels.md was written by kernel_table.py as it is now, whatever the compiler's version."""
    page = (ROOT / "docs" / "results" / "kernels.md").read_text()
    found = {tuple(line.split(" | ")[:3]) for line in page.splitlines() if line.startswith("| ")}
    for bits in BITS:
        for name, rounding, *_ in operations(64 * 128, bits, torch.device("cpu")):
            assert (f"| {name}", f"{bits}", rounding) in found, (name, bits, rounding)
