"""Host memory whose pages stay where they are, so that a CUDA device copies to and from it while the host goes on.

torch's own page-locked memory comes in powers of two: of large buffers a third more is taken on average.
"""

from __future__ import annotations

import torch


def lock_pages(memory: torch.Tensor) -> None:
    """Lock the pages of a contiguous host tensor. Unlock them before its memory is freed. Raises RuntimeError."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unlock_pages(memory: torch.Tensor) -> None:
    """Undo ``lock_pages``."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
