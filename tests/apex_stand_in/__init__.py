"""NVIDIA's apex, stood in for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

FOLDER = Path(__file__).parent
MODULES = ("apex", "amp_C", "fused_layer_norm_cuda")


@contextmanager
def installed(folder: Path = FOLDER) -> Iterator[None]:
    """Inside the block ``import apex`` finds what lies in the folder."""
    kept = {n: m for n, m in sys.modules.items() if n.split(".")[0] not in MODULES}
    with patch.object(sys, "path", [f"{folder}", *sys.path]), patch.dict(sys.modules, kept, clear=True):
        yield
