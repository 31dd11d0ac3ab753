"""Who am I: the only reader of launcher environment variables (torchrun, SLURM, single process). No torch.

CUDA's own variables are read and set here, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_CONNECTIONS = 32  # that CUDA has
USUAL_CONNECTIONS = 8  # what CUDA takes where nothing is said
MODULE_LOADING = "CUDA_MODULE_LOADING"


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process. ``local_world_size`` is its word for ranks per node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    launcher: str = "single process"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank {self.rank} is not in a world of {self.world_size} (from {self.launcher})"
            )


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """torchrun's variables first (srun torchrun sets both), then SLURM's, else one process."""
    env = os.environ if environ is None else environ
    try:
        if "RANK" in env and "WORLD_SIZE" in env:
            world = int(env["WORLD_SIZE"])
            return Launch(
                rank=int(env["RANK"]),
                world_size=world,
                local_rank=int(env.get("LOCAL_RANK", "0")),
                local_world_size=int(env.get("LOCAL_WORLD_SIZE", world)),
                master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
                master_port=int(env.get("MASTER_PORT", "29500")),
                launcher="torchrun",
            )
        if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
            return _read_slurm(env)
    except ValueError as error:
        raise ValueError(f"launcher environment is not readable: {error}") from None
    return Launch()


def _read_slurm(env: Mapping[str, str]) -> Launch:
    tasks = expand_tasks_per_node(env["SLURM_TASKS_PER_NODE"]) if "SLURM_TASKS_PER_NODE" in env else None
    world = int(env["SLURM_NTASKS"])
    if tasks and len(set(tasks)) > 1:
        raise ValueError(
            f"SLURM gives nodes different numbers of tasks ({env['SLURM_TASKS_PER_NODE']}); "
            f"ask for --ntasks-per-node={max(tasks)}"
        )
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    job = int(env.get("SLURM_JOB_ID", "0"))
    return Launch(
        rank=int(env["SLURM_PROCID"]),
        world_size=world,
        local_rank=int(env.get("SLURM_LOCALID", "0")),
        local_world_size=tasks[0] if tasks else world,
        master_addr=env.get("MASTER_ADDR") or first_host(nodes),
        master_port=int(env.get("MASTER_PORT") or 20000 + job % 20000),
        launcher="SLURM",
    )


def expand_tasks_per_node(text: str) -> list[int]:
    """SLURM_TASKS_PER_NODE: '4(x2),3' -> [4, 4, 3]."""
    out: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE={text!r}")
        out += [int(match[1])] * int(match[2] or 1)
    return out


def first_host(nodelist: str) -> str:
    """First host of a SLURM node list: 'gpu[03-07,11],login1' -> 'gpu03'."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)", nodelist)
    if match is None:
        raise ValueError(f"SLURM node list {nodelist!r}")
    prefix, inside, suffix = match[1], match[2], match[3]
    return prefix + re.split(r"[-,]", inside)[0] + suffix if inside else prefix


def cuda_settings(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """What to set in this environment before CUDA starts, and notes on values of its own that are replaced.

    - Kernels are loaded at the start: the first launch of one that is loaded lazily waits for all kernels under way,
      and a collective or a receive among them may be waiting for just that launch on another rank.
    - Streams that share a hardware connection run their kernels in the order of launch, so a receive that waits
      holds up what was launched after it on another stream. There are some 20: to compute, two to gather and two to
      reduce, and one for each communicator (two per data-parallel axis, tensor parallel, the pipeline's pairs, its
      ends, all ranks). So all connections that CUDA has; a number of the user's is kept from CUDA's default on.
    """
    settings, notes = {MODULE_LOADING: "EAGER", CONNECTIONS: f"{MOST_CONNECTIONS}"}, []
    loading, connections = environ.get(MODULE_LOADING), environ.get(CONNECTIONS)
    if loading not in (None, "EAGER"):
        notes.append(
            f"{MODULE_LOADING}={loading} of the environment is replaced by EAGER: a kernel that is loaded at its "
            "first launch waits for collectives that wait for other ranks"
        )
    if connections is not None and connections.strip().isdecimal() and int(connections) >= USUAL_CONNECTIONS:
        settings[CONNECTIONS] = connections
    elif connections is not None:
        notes.append(
            f"{CONNECTIONS}={connections} of the environment is replaced by {MOST_CONNECTIONS}: with fewer than "
            f"{USUAL_CONNECTIONS}, what a rank computes stands behind messages that wait for other ranks"
        )
    return settings, tuple(notes)


def prepare_cuda() -> tuple[str, ...]:
    """Put ``cuda_settings`` into this process's environment, before CUDA starts (asking for devices starts it).

    Returns the notes.
    """
    settings, notes = cuda_settings(os.environ)
    os.environ.update(settings)
    return notes
