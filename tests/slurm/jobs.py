"""Jobs of tests/slurm: a tiny model through the scripts of pretrain/slurm, and what they leave."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import ROOT, sizes
from tests.slurm.cluster import Cluster, until

SCRIPTS = ROOT / "pretrain" / "slurm"
ITERATIONS = 150
FLAGS: Mapping[str, Any] = {
    **sizes.TINY,
    "train_iters": ITERATIONS,
    "lr_decay_iters": ITERATIONS,
    "save_interval": 40,
    "log_interval": 50,
}


def words(**changed: object) -> list[str]:
    """The command line of the tiny model, with some flags changed."""
    return sizes.words({**FLAGS, **changed})


def submit(
    slurm: Cluster,
    folder: Path,
    *options: str,
    script: str = "pretrain.sbatch",
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> int:
    """Submit one of the scripts for a run in ``folder``, on 2 nodes with 2 tasks each. Returns the job's number."""
    variables = {"RUN": str(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shape = ("--nodes=2", "--ntasks-per-node=2", f"--output={folder}-%j.out", "--job-name=tiny")
    arguments = flags or words()
    return slurm.submit(
        SCRIPTS / script, arguments, options=(*shape, *options), environ={**variables, **(environ or {})}
    )


def log(folder: Path) -> str:
    """What the jobs of a run printed."""
    return "".join(path.read_text() for path in sorted(folder.parent.glob(f"{folder.name}-*.out")))


def iterations(folder: Path) -> int:
    metrics = folder / "logs" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for_iterations(folder: Path, count: int) -> None:
    until(lambda: iterations(folder) > count, 150, lambda: f"the run does not begin: {log(folder)}")


def curve(folder: Path) -> dict[int, float]:
    """The loss of each iteration. Each is there once."""
    rows = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "lm_loss" in row]
    assert len(rows) == len({row["iteration"] for row in rows}), "an iteration is there twice"
    return {row["iteration"]: row["lm_loss"] for row in rows}


def nodes_of(slurm: Cluster, number: int) -> list[int]:
    """The nodes that a job has, as the cluster counts them, first the one that its script runs on."""
    names = slurm.call("scontrol", "show", "hostnames", slurm.job(number)["NodeList"]).split()
    return [int(name.removeprefix("node")) for name in names]
