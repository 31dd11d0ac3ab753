"""The health check: before the first step every node is tested, and a bad one is named so that it can be excluded.

Faults end the run: a device that computes wrongly or is missing, a --save folder that a node does not share, no room
for checkpoints.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megazero.config import RunConfig, World
from megazero.files import replacing
from megazero.log.exit_status import ExitStatus, end_folder, status_of
from megazero.log.line_file import NO_ROOM
from megazero.mesh.launch import Launch
from megazero.mesh.objects import gather_objects
from megazero.ops.health_probes import (
    Facts,
    find_facts,
    free_bytes,
    has_cuda,
    missing_bytes,
    missing_gpus,
    probe_folder,
)
from megazero.plan.communication import OuterFormat
from megazero.plan.memory import GIB, checkpoint_bytes
from megazero.plan.units import WIDTHS

BAD_NODES_FILE = "bad_nodes"  # beside exit_status: the names to exclude, one a line, for the batch script


@dataclass(frozen=True)
class Fault:
    """One fault. node: the name of its node, or '' if it is the same everywhere."""

    node: str
    text: str
    status: ExitStatus


class Unhealthy(ValueError):
    """The health check found faults. ``nodes`` are those to exclude, the same on every rank.

    exit_status: RANK_LOST if other nodes would work, else that of a mistake or a full disk. waiver: the flag
    that does without what failed.
    """

    def __init__(self, faults: Sequence[Fault], waiver: str = "--no-health-check does without") -> None:
        final = [fault.status for fault in faults if fault.status != ExitStatus.RANK_LOST]
        self.exit_status = final[0] if final else ExitStatus.RANK_LOST
        lost = (fault.node for fault in faults if fault.status == ExitStatus.RANK_LOST)
        self.nodes = tuple(sorted(set(lost)))
        texts = dict.fromkeys(f"{fault.node}: {fault.text}" if fault.node else fault.text for fault in faults)
        cure = f". Leave them out: --exclude={','.join(self.nodes)}" if self.nodes else ""
        super().__init__(f"health check: {'; '.join(texts)}{cure} ({waiver})")


@dataclass(frozen=True)
class Storage:
    """What a run will save. checkpoint_bytes: of one checkpoint; 0 if not known."""

    folder: Path
    checkpoint_bytes: int = 0
    keep_last: int | None = None

    @property
    def size(self) -> str:
        return f"{self.checkpoint_bytes / GIB:.3g} GiB"


def check_health(node: str, device: torch.device, save: Storage | None = None) -> tuple[str, ...]:
    """Test the nodes of all ranks: devices, memory, and the folder of ``save``. Collective.

    node: this rank's, as the scheduler names it. Returns notes for the user. Raises the same Unhealthy on every rank.
    """
    began = time.monotonic()
    every: list[Facts] = gather_objects(find_facts(node, device), Facts)
    nodes = [facts.node for facts in every]
    _refuse(device_faults(every))
    notes = [f"{facts.node}: {facts.unused}" for facts in every if facts.unused]
    notes += check_storage(save, nodes) if save is not None else []
    seconds = time.monotonic() - began
    said = f"health check of {len(nodes)} ranks on {len(set(nodes))} nodes: {seconds:.1f} s"
    return (said, *dict.fromkeys(notes))


def check_storage(save: Storage, nodes: Sequence[str]) -> list[str]:
    """Test whether all ranks share the folder, and whether checkpoints fit. Returns notes. Collective."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    _refuse(folder_faults(probe_folder(save.folder, rank, gather_objects), nodes))
    if not save.checkpoint_bytes:
        return []
    room = gather_objects(look_for_room(save) if rank == 0 else None)[0]  # as the first rank sees it
    if isinstance(room, OSError):
        text = f"rank 0 cannot tell how much room {save.folder} has: {room}"
        raise Unhealthy([Fault(nodes[0], text, status_of(room))])
    missing, free = room
    _refuse(room_faults(save, missing, free))
    return [f"--save has room for {free // save.checkpoint_bytes} checkpoints of {save.size}"]


def check_run(config: RunConfig, launch: Launch, world: World, device: torch.device) -> tuple[str, ...]:
    """Test the nodes of a run, if it has the health check. Returns notes. Collective. Raises Unhealthy."""
    wanted = config.training.health_check
    if not (launch.node is not None if wanted is None else wanted):
        return ()
    saves, dtype = config.checkpoint, config.precision.params_dtype
    storage: Storage | None = None
    if saves.save is not None:
        outer = OuterFormat.of(config.outer, max(WIDTHS[dtype], 4))
        size = checkpoint_bytes(config.model, dtype, config.optimizer, config.wire(world), outer)
        storage = Storage(Path(saves.save), size, saves.save_keep_last)
    return check_health(launch.host, device, storage)


def refuse_missing_gpus(wanted: str, node: str) -> None:
    """Raise Unhealthy if a node was given GPUs that torch does not see there. Collective.

    wanted: --device; 'cpu' needs none. The run's first collective: a run must not go to the CPU unnoticed.
    """
    mine = None if wanted == "cpu" else missing_gpus()
    every = gather_objects((node, mine, has_cuda()))
    bad = {node: (text, built) for node, text, built in every if text is not None}
    if not bad:
        return
    nodes = {node for node, _, _ in every}
    # Most of several nodes do not break at once: then the driver, the container or torch is the wrong one.
    few = len(nodes) == 1 or 2 * len(bad) < len(nodes)
    faults = [
        Fault(node, text, ExitStatus.RANK_LOST if few and built else ExitStatus.MISTAKE)
        for node, (text, built) in bad.items()
    ]
    raise Unhealthy(faults, waiver="--device cpu trains without GPUs")


def _refuse(faults: Sequence[Fault]) -> None:
    if faults:
        raise Unhealthy(faults)


def look_for_room(save: Storage) -> tuple[int, int] | OSError:
    """Return how many bytes the checkpoints of a run lack, and how many are free; or the error."""
    try:
        return missing_bytes(save.folder, save.checkpoint_bytes, save.keep_last), free_bytes(save.folder)
    except OSError as error:
        return error


def room_faults(save: Storage, missing: int, free: int) -> list[Fault]:
    """Return the fault of a disk that lacks ``missing`` bytes and has ``free`` ones."""
    if missing <= 0:
        return []
    kept = f"--save-keep-last {save.keep_last} and the one being written" if save.keep_last else "one"
    text = (
        f"--save {save.folder} has {free / GIB:.3g} GiB free. A checkpoint takes {save.size}: {kept} need "
        f"{missing / GIB:.3g} GiB more"
    )
    return [Fault("", text, ExitStatus.STORAGE)]


def device_faults(every: Sequence[Facts]) -> list[Fault]:
    """Return the faults of ranks' devices: they fail, or differ from most."""
    usual = Counter(facts.device for facts in every).most_common(1)[0][0]
    faults = []
    for rank, facts in enumerate(every):
        wrong = list(facts.wrong)
        if facts.device != usual:
            wrong.append(f"computes on {facts.device}, most ranks on {usual}")
        if facts.device_memory[0] * 2 < facts.device_memory[1]:
            free, whole = (size / GIB for size in facts.device_memory)
            wrong.append(
                f"{free:.1f} of {whole:.1f} GiB of GPU memory are free: another process holds the rest"
            )
        faults += [Fault(facts.node, f"rank {rank}: {text}", ExitStatus.RANK_LOST) for text in wrong]
    return faults


def folder_faults(problems: Mapping[int, str | OSError], nodes: Sequence[str]) -> list[Fault]:
    """Return the faults of nodes that do not share --save.

    If most nodes do not, it is the user's mistake and not the nodes'. If the first rank cannot write, or the disk is
    full, the error itself decides.
    """
    bad = {nodes[rank] for rank in problems}
    few = 2 * len(bad) < len(set(nodes))
    faults = []
    for rank, problem in problems.items():
        status = ExitStatus.RANK_LOST if few else ExitStatus.MISTAKE
        text = f"rank {rank} {problem}"
        if isinstance(problem, OSError):
            text = f"rank {rank} cannot write: {problem}"
            if rank == 0 or problem.errno in NO_ROOM:
                status = status_of(problem)
        faults.append(Fault(nodes[rank], text, status))
    return faults


def record_bad_nodes(log_dir: str, nodes: Sequence[str]) -> None:
    """Write the file bad_nodes for the batch script, or remove it. Errors of the disk are ignored."""
    path = (end_folder(log_dir) or Path(log_dir)) / BAD_NODES_FILE
    try:
        path.unlink(missing_ok=True)
        if nodes:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write("".join(f"{node}\n" for node in nodes).encode())
    except OSError:
        pass
