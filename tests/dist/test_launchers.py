"""Launchers themselves start two ranks of pretrain_gpt.py; what they mean is tests/unit/test_launch.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.runs import free_port
from tests.sizes import LEAST

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "pretrain" / "pretrain_gpt.py")
FLAGS = f"--model-family llama {LEAST} --micro-batch-size 2 --train-iters 2 "
FLAGS += "--log-interval 1 --eval-iters 0 --device cpu"
TORCH = ["--nproc-per-node", "2", "--master-port", "{port}"]
EACH = 'for r in 0 1; do RANK=$r "$@" & done; wait'
# launcher -> (what stands before the program, what it says of the node)
STARTS = {
    "torchrun": ([sys.executable, "-m", "torch.distributed.run", *TORCH], None),
    "torch.distributed.launch": ([sys.executable, "-m", "torch.distributed.launch", *TORCH], None),
    "mpirun": (["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable], None),
    "a script": (["bash", "-c", EACH, "-", sys.executable], "RANK and WORLD_SIZE does not say"),
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", STARTS)
def test_a_launcher_starts_one_world(tmp_path: Path, launcher: str) -> None:
    words, said = STARTS[launcher]
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    port = str(free_port())
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if launcher == "a script":
        env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [*(word.format(port=port) for word in words), PROGRAM, *FLAGS.split(), "--log-dir", str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert len(re.findall("megazero on 2 ranks", text)) == 1, text
    assert "2 ranks, 2 per node" in text
    assert ("does not say how many ranks a node has: 2" in text) == (said is not None) and (
        said or ""
    ) in text
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2]
