"""Launchers themselves start two ranks of pretrain_gpt.py; what they mean is tests/unit/mesh/test_launch.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megazero.config.run import stored_values
from megazero.log.exit_status import STATUS_FILE, ExitStatus, read_status
from megazero.mesh.starter import free_port
from tests import ROOT
from tests.sizes import LEAST

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


# -- how ranks end -----------------------------------------------------------------------------------

TRAIN = ["-m", "megazero", "train"]
OWN = [sys.executable, *TRAIN, "--nproc-per-node", "2"]
UNDER_TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    *TRAIN,
]


def start(words: list[str], folder: Path, *flags: str) -> subprocess.Popen[str]:
    """Two ranks, in a process group of their own, as a shell starts a job."""
    return subprocess.Popen(
        [*words, *FLAGS.replace("--train-iters 2", "").split(), "--log-dir", str(folder), *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, status",
    [(OWN, ExitStatus.STOPPED), pytest.param(UNDER_TORCHRUN, 0, marks=pytest.mark.slow)],
)
def test_a_planned_stop_shows_no_trace(tmp_path: Path, words: list[str], status: int) -> None:
    run = start(words, tmp_path, "--train-iters", "9", "--exit-interval", "2")
    text, _ = run.communicate(timeout=300)
    assert run.returncode == status, text
    assert "Traceback" not in text and "exitcode" not in text, text
    lines = text.splitlines()
    assert lines[-1].startswith(" ended at iteration 2/9"), text
    assert read_status(tmp_path / STATUS_FILE) == ExitStatus.STOPPED
    first = next(i for i, line in enumerate(lines) if line.startswith(" iteration"))
    assert first <= 25, text
    kept = (tmp_path / "config.yaml").read_text()
    assert all(
        f"# {line.strip()}" in kept
        for line in lines
        if line.startswith((" decoder", " layout", " predicted"))
    )
    assert stored_values(yaml.safe_load(kept))["lr"] == 1e-3  # below its comments, every option


@pytest.mark.slow
def test_ctrl_c_shows_no_trace(tmp_path: Path) -> None:
    run = start(OWN, tmp_path, "--train-iters", "20000", "--save", str(tmp_path / "save"))
    assert run.stdout is not None
    seen = []
    while not seen or (seen[-1] and not seen[-1].startswith(" iteration")):
        seen.append(run.stdout.readline())
    os.killpg(run.pid, signal.SIGINT)
    text = "".join(seen) + run.communicate(timeout=300)[0]
    assert run.returncode == read_status(tmp_path / STATUS_FILE) == ExitStatus.INTERRUPTED, text
    assert "Traceback" not in text and "RankFailure" not in text, text
    assert "interrupted: what was not saved" in text.splitlines()[-1], text
    assert not any((tmp_path / "save").glob("iter_*"))
