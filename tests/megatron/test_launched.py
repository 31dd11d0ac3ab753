"""The launcher's word under torchrun, and a restart in the process: what the harness has.

A minute on 2 cores:

    python -m pytest tests/megatron/test_launched.py -m slow
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ROOT
from tests.dist.pool import run_ranks
from tests.megatron.cases import CASES, INT8_INT4, SMALL
from tests.megatron.training import train

pytest.importorskip("megatron.core")
pytest.importorskip("megatron_core_patch")

SCRIPT = str(ROOT / "tests/megatron/launched_job.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
PATCH = ["-m", "megatron_core_patch", "--zero-quantized-weights", "--zero-quantized-gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp4 overlap", "pp2 vpp2 overlap"])
def test_a_launched_job_that_restarts_is_the_harness(name: str, tmp_path: Path) -> None:
    """The same bits and bytes, also of two model chunks a rank, though the first start broke in a step. -m slow"""
    case = replace(CASES[name], bf16=True)
    own = [SCRIPT, name, str(tmp_path)]
    flags = ["--ranks-per-node", str(case.ranks_per_node), "--zero-exact-numel", str(SMALL)]
    # Not compiled: megatron-core asks torch.compile for what it fuses, before the harness can see to it.
    environ = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, *PATCH, *flags, *own]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(4)]
    assert all(argv == own for argv, _ in found)
    runs = [run for _, run in found]
    assert runs == run_ranks(case.world, train, case, INT8_INT4, timeout=120)
    assert runs != run_ranks(case.world, train, case, timeout=120)
