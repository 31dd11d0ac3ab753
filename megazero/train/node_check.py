"""The health check of ranks that do not train, for ``megazero check-nodes``."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megazero.config.options.sections import TrainingConfig
from megazero.mesh.launch import Launch
from megazero.mesh.mesh import create_mesh, discover_ranks_per_node
from megazero.mesh.objects import gather_objects
from megazero.ops.health import HealthCheck, Storage
from megazero.ops.health_transport import ask_nccl, transport_notes, transport_of
from megazero.train.distributed import start_rank


def check_nodes(
    training: TrainingConfig, launch: Launch, save: Path | None, checkpoint_bytes: int, keep_last: int | None
) -> tuple[str, ...]:
    """Join the other ranks, if there are any, and check. Returns the notes. Raises Unhealthy.

    save: the folder that all nodes share, or None. It needs room for ``keep_last`` checkpoints of
    ``checkpoint_bytes`` bytes.
    """
    timeout = timedelta(minutes=training.distributed_init_timeout_minutes)
    asked = ask_nccl(os.environ)
    device, _ = start_rank(training, launch, timeout)
    health = HealthCheck(launch.host)
    health.check_ranks(device)
    if save is not None:
        health.check_storage(Storage(save, checkpoint_bytes, keep_last))
    if dist.is_initialized():
        ranks, world = discover_ranks_per_node(launch), launch.world_size
        health.check_groups(
            create_mesh(shards=(world, world, world), ranks_per_node=ranks, device=device, timeout=timeout)
        )
    own = transport_of(asked) if asked is not None and device.type == "cuda" else None
    return (*health.notes(), *transport_notes(gather_objects((launch.host, own))))
