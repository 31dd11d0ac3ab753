"""A run's resident memory does not grow from step to step: freed memory is used again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.log.metrics import read_metrics
from megazero.mesh.launch import TUNABLES, allocator_settings
from tests import ROOT

FLAGS = """
    --nproc-per-node 2 --device cpu --model-family llama --num-layers 8 --hidden-size 256 --num-attention-heads 4
    --seq-length 128 --vocab-size 4096 --micro-batch-size 2 --zero-preset zero3 --zero-prefetch-bytes 0 --mock-data
    --lr 1e-4 --eval-iters 0 --train-iters 60
"""
SETTLED = 20  # iterations, after which 40 follow


def growth(folder: Path, environ: dict[str, str]) -> int:
    """Return by how many bytes the first rank's peak rises after it has settled."""
    given = {name: value for name, value in os.environ.items() if name != TUNABLES}
    subprocess.run(
        [sys.executable, str(ROOT / "pretrain/pretrain_gpt.py"), *FLAGS.split(), "--log-dir", str(folder)],
        env={**given, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        check=True,
        timeout=400,
        stdout=subprocess.DEVNULL,
    )
    peaks = [line["memory_bytes"] for line in read_metrics(folder) if "memory_bytes" in line]
    return peaks[-1] - peaks[SETTLED - 1]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident sizes are those of Linux")
def test_freed_memory_is_used_again(tmp_path: Path) -> None:
    assert growth(tmp_path / "ours", {}) < 40e6
    if allocator_settings({}):  # the measurement can fail: this glibc, as it is
        assert growth(tmp_path / "glibc's", {TUNABLES: "glibc.malloc.check=0"}) > 100e6
