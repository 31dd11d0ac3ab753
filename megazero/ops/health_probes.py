"""Probes of a rank's node before the first step: its device, memory, and the folder of --save."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import store
from megazero.checkpoint.directory import leftovers
from megazero.files import appears
from megazero.mesh.launch import given_gpus

MATRIX = 256  # rows of the matrices that are multiplied
PATTERN = 2**28  # elements of int32 that a GPU's memory is written and read with: 1 GiB
BLOCK = 512  # bytes of st_blocks (POSIX: what a file takes on the disk, holes left out)

Gather = Callable[[Any], list]  # one object per rank, by rank


@dataclass(frozen=True)
class Facts:
    """What a rank found out about its node. wrong: the faults of its device, in words; empty if there are none.

    device_memory: free bytes and all bytes. unused: what NCCL leaves out of the network cards, in words.
    """

    node: str
    device: str
    wrong: tuple[str, ...]
    device_memory: tuple[int, int]
    unused: str = ""


def missing_gpus() -> str | None:
    """Say that this rank was given more GPUs than torch sees. None if torch sees all of them."""
    (given, variable), seen = given_gpus(os.environ), torch.cuda.device_count()
    if seen >= given:
        return None
    found = (
        f"torch {torch.__version__} sees {seen}" if has_cuda() else f"torch {torch.__version__} has no CUDA"
    )
    return f"{given} {'GPU was' if given == 1 else 'GPUs were'} given ({variable}), and {found}"


def has_cuda() -> bool:
    """Tell whether torch was built for GPUs."""
    return torch.backends.cuda.is_built()


def find_facts(node: str, device: torch.device) -> Facts:
    """Test this rank's device."""
    wrong = tuple(device_faults(device))
    # A device that failed may fail at this, too.
    asks = device.type == "cuda" and not wrong
    device_memory = torch.cuda.mem_get_info(device) if asks else (0, 0)
    return Facts(node, device.type, wrong, device_memory, unused_rdma(os.environ.get("NCCL_IB_HCA", "")))


def unused_rdma(taken: str, root: Path = Path("/sys/class/infiniband")) -> str:
    """Say which active RDMA devices NCCL does not take, or return "".

    taken: NCCL_IB_HCA, beginnings of names; behind = whole names, and behind ^ those that are left out.
    """
    left_out, exact = taken.startswith("^"), taken.lstrip("^").startswith("=")
    words = [word.split(":")[0] for word in taken.lstrip("^=").split(",") if word]

    def takes(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words) != left_out

    ports = root.glob("*/ports/*/state")
    active = sorted({port.parents[2].name for port in ports if "ACTIVE" in port.read_text()})
    idle = [name for name in active if words and not takes(name)]
    if not idle:
        return ""
    return (
        f"NCCL_IB_HCA={taken} leaves {', '.join(idle)} unused, of the active RDMA devices {', '.join(active)}: "
        "a port that shows as two halves needs both"
    )


def device_faults(device: torch.device) -> list[str]:
    """Return the faults of a device: wrong products, memory that loses data."""
    try:
        wrong = [] if multiplies(device) else ["the product of two small matrices is wrong"]
        if device.type == "cuda":
            wrong += [] if remembers(device) else ["its memory does not hold what was written"]
            torch.cuda.empty_cache()
        return wrong
    except RuntimeError as error:  # of CUDA, too; a full memory is one
        return [f"{error}".splitlines()[0]]


def multiplies(device: torch.device) -> bool:
    """Tell whether a product of small integers is exact. Every format that a device multiplies in can hold them."""
    numbers = torch.arange(MATRIX * MATRIX).view(MATRIX, MATRIX)
    left, right = numbers % 7 - 3, numbers % 5 - 2
    found = left.float().to(device) @ right.float().to(device)
    return torch.equal(found.cpu().long(), left @ right)


def remembers(device: torch.device, elements: int = PATTERN) -> bool:
    """Write a pattern into a part of the device's memory and tell whether it is read back."""
    pattern = (torch.arange(2**20, device=device) * 0x9E3779B1 % 2**31).int()
    memory = torch.empty(elements // 2**20, 2**20, dtype=torch.int32, device=device)
    memory.copy_(pattern)
    return bool((memory == pattern).all())


def probe_folder(folder: Path, rank: int, gather: Gather) -> Mapping[int, str | OSError]:
    """Have each rank write a small file into ``folder`` and read the first rank's. The files are removed. Collective.

    Returns the problems by rank, in words or as the error of a write, the same on every rank.
    """
    token = gather(secrets.token_hex(4))[0]
    first = folder / f".probe-{token}-0"
    own = folder / f".probe-{token}-{rank}"
    try:
        failed = gather(_attempt(lambda: _write(own, make=True)) if rank == 0 else None)[0]
        if failed is not None:
            return {0: failed}
        problem: str | OSError | None = None
        if rank != 0:
            lost = f"does not see the file that rank 0 wrote into {folder}: it is another folder here"
            problem = (
                _attempt(lambda: _write(own)) if appears(partial(os.path.exists, first), folder) else lost
            )
        problems = dict(enumerate(gather(problem)))
        if rank == 0:
            for other in problems:
                file = folder / f".probe-{token}-{other}"
                if problems[other] is None and not appears(partial(os.path.exists, file), folder):
                    problems[other] = f"rank 0 does not see the file that it wrote into {folder}"
        return {other: wrong for other, wrong in gather(problems)[0].items() if wrong is not None}
    finally:
        _attempt(lambda: own.unlink(missing_ok=True))


def _write(path: Path, make: bool = False) -> None:
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(b"written to see whether all nodes share this folder\n")
        file.flush()
        os.fsync(file.fileno())


def _attempt(action: Callable[[], object]) -> OSError | None:
    try:
        action()
    except OSError as error:
        return error
    return None


def free_bytes(folder: Path) -> int:
    """Return the bytes that are free where ``folder`` lies, with what killed saves left and the next one removes."""
    there = (Path(at, name) for path in leftovers(folder) for at, _, names in os.walk(path) for name in names)
    return shutil.disk_usage(folder).free + sum(path.lstat().st_blocks * BLOCK for path in there)


def missing_bytes(folder: Path, checkpoint_bytes: int, keep_last: int | None) -> int:
    """Return how many bytes a run's checkpoints lack there; 0 or less: none.

    A run holds ``keep_last`` of them and the one that it writes. Those that are there already are not counted, but at
    least one has to fit.
    """
    there = min(len(store.checkpoints(folder)), keep_last or 0)
    return max(1, (keep_last or 0) + 1 - there) * checkpoint_bytes - free_bytes(folder)
