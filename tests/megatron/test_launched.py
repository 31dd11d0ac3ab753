"""Both ways of turning the patch on, under torchrun: the script's own enable(), and the launcher's word.

Three minutes on 2 cores:

    python -m pytest tests/megatron/test_launched.py -m slow
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ROOT
from tests.dist.pool import run_ranks
from tests.megatron.case import Run
from tests.megatron.cases import CASES, INT8_INT4, SMALL
from tests.megatron.training import train

pytest.importorskip("megatron.core")
pytest.importorskip("megatron_core_patch")

SCRIPT = str(ROOT / "tests/megatron/launched_job.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
FLAGS = ["--zero-quantized-weights", "--zero-quantized-gradients", "--ranks-per-node", "1"]
FLAGS += ["--zero-exact-numel", str(SMALL)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp2 vpp2 overlap"])
def test_both_ways_are_one(name: str, tmp_path: Path) -> None:
    """Of two model chunks a rank: the same bits and bytes, those of the harness, and of a second start. -m slow"""
    case = replace(CASES[name], bf16=True)
    words = json.dumps({**INT8_INT4, "ranks_per_node": case.ranks_per_node})
    enabled = launch([], ["--enable", words], name, tmp_path / "enabled")
    by_word = launch(["-m", "megatron_core_patch", *FLAGS], [], name, tmp_path / "by word")
    again = launch([], ["--enable", words, "--starts", "2"], name, tmp_path / "again")
    assert by_word == enabled == again
    assert by_word == run_ranks(case.world, train, case, INT8_INT4, timeout=120)
    assert by_word != run_ranks(case.world, train, case, timeout=120)


@pytest.mark.slow
def test_a_restart_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """What was under way when the first start broke is gone: the second has the bits and bytes of a first. -m slow"""
    name = "dp4 overlap"
    words = ["--enable", json.dumps({**INT8_INT4, "ranks_per_node": CASES[name].ranks_per_node})]
    whole = launch([], words, name, tmp_path / "whole")
    assert launch([], [*words, "--starts", "2", "--breaks"], name, tmp_path / "broken") == whole


def launch(patch: Sequence[str], words: Sequence[str], name: str, folder: Path) -> list[Run]:
    """Run the script on 4 ranks; return what each has to say. It must have seen its own words alone."""
    folder.mkdir()
    own = [SCRIPT, "--case", name, "--folder", str(folder), *words]
    # Not compiled: megatron-core asks torch.compile for what it fuses, before the harness can see to it.
    environ = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*TORCHRUN, *patch, *own], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(4)]
    assert all(argv == own for argv, _ in found)
    return [run for _, run in found]
