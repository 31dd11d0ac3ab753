"""What a rank does on its device before it trains: libraries take memory, a kernel is tried, pages are locked."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megazero.kernels import dispatch
from megazero.kernels.pages import lock_pages, unlock_pages
from tests import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# A backward that begins with a product, in a process of its own: cuBLAS warns once. It prints how much memory grew.
PRODUCT = """
import warnings, torch
from megazero.ops.memory import use_libraries
warnings.simplefilter("error")
device = torch.device("cuda", 0)
use_libraries(device)
torch.cuda.synchronize()
before = torch.cuda.memory_allocated(device)
weight = torch.nn.Parameter(torch.ones(64, 64, device=device))
(weight @ weight).sum().backward()
del weight
torch.cuda.synchronize()
print(torch.cuda.memory_allocated(device) - before)
"""


def test_a_backward_finds_its_context_and_takes_no_workspace_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", PRODUCT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 0 and "CUDA context" not in done.stderr


def test_a_kernel_runs() -> None:
    assert dispatch.why_none_runs(torch.device("cuda", 0)) == ""


def test_copies_of_locked_pages_do_not_hold_the_host() -> None:
    there, memory = torch.arange(1 << 20, device="cuda"), torch.empty(1 << 23, dtype=torch.uint8)
    lock_pages(memory)
    try:
        assert memory.is_pinned()
        torch.cuda._sleep(1 << 27)  # some 80 ms
        held = memory.view(torch.int64)
        held.copy_(there, non_blocking=True)
        assert not torch.cuda.current_stream().query(), "the host waited"
        torch.cuda.synchronize()
        assert torch.equal(held, there.cpu())
    finally:
        unlock_pages(memory)
