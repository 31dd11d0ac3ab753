"""The one rule that decides where an operation runs. Imports Triton where it can.

A kernel runs where its tensors are on CUDA and Triton is installed. Elsewhere the torch reference runs, the rest of
the operation's own function, which gives the same bits. TRITON_INTERPRET=1, set before the first import, runs the
kernels on CPU tensors (tests). Triton is imported only where a kernel can run: with a CUDA build of torch, which
imports it too, or in the interpreter.

The first kernel of a machine has Triton build parts of its own, for which it needs a C compiler and Python's headers.
A run launches a kernel at its start to see whether they are there (``why_none_runs``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
AVAILABLE = find_spec("triton") is not None and (INTERPRETED or torch.version.cuda is not None)
LACKING = "Triton is not installed"  # why no kernel runs, where none is available
# Elements a program takes, whole blocks of every format: 16-byte accesses by 128 threads, of 4-bit payload too.
TILE = 4096

# Elements the references take at a time. A torch call costs 2 to 10 us, so large chunks win over the second-level
# cache: 8 bits encode in 3.0 ns per element at 64K, 1.9 at 128K, 0.95 at 256K, 0.7 to 1.0 at 512K (one core, fp32).
CHUNK = 1 << 18


def _plain(function: Callable | None = None, **_: Any) -> Any:
    return _plain if function is None else function


def _triton() -> tuple[Any, Any]:
    """Return (triton.jit, triton.language); without Triton, return a decorator that does nothing, and None."""
    if not AVAILABLE:
        return _plain, None
    import triton
    import triton.language as language

    return triton.jit, language


jit, tl = _triton()


def use_kernel(messages: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether an operation on messages (uint8) and values (or further messages) runs as a Triton kernel.

    messages must be contiguous: the kernels assume that rows lie one behind another (the references do not need
    it). fp64 values (parity modules) are left to the reference, which keeps their sums in fp64. On CUDA without
    Triton, the first call warns.
    """
    assert messages.is_contiguous(), (messages.shape, messages.stride())
    on_cuda = messages.is_cuda and values.is_cuda
    if values.dtype == torch.float64 or not (INTERPRETED or on_cuda):
        return False
    if not AVAILABLE:
        _warn_of_references()
    return AVAILABLE


def why_none_runs(device: torch.device) -> str:
    """Launch a kernel on this CUDA device. Return why none can run there, in a line, or '' if it has run."""
    if not AVAILABLE:
        return LACKING
    touched = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        _touch[(1,)](touched)
        return "" if touched.item() == 1 else "Triton's kernel wrote nothing"
    except Exception as error:  # of a compiler, of a missing file, of the driver
        return f"Triton: {type(error).__name__}: {error}".splitlines()[0]


def do_without(why: str) -> None:
    """Have the references run from now on, on CUDA too."""
    global AVAILABLE, LACKING
    AVAILABLE, LACKING = False, why


@jit
def _touch(out):  # type: ignore[no-untyped-def] # Triton compiles annotations, too
    tl.store(out, 1)


@cache
def _warn_of_references() -> None:
    """Warn once per process."""
    warnings.warn(
        f"{LACKING}: on CUDA the torch references of Triton's kernels run, which give the same bits in many passes "
        "over memory instead of one; install Triton (pip install triton) with a C compiler and Python's headers "
        "(gcc, python3-dev), or send exact messages",
        RuntimeWarning,
        stacklevel=2,
    )
