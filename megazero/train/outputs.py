"""Where results go: the console, LOG_DIR with metrics.jsonl and the resolved configuration, and outside loggers."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from megazero.config import RunConfig, World
from megazero.data.files import replacing
from megazero.mesh.mesh import Mesh
from megazero.models import Decoder, architecture_of
from megazero.models.attention_kernels import math_note
from megazero.train.console import TrainConsole
from megazero.train.loggers import Logger, Loggers, TensorBoardLogger, WandbLogger, new_run_id
from megazero.train.metrics import MetricsWriter
from megazero.train.origin import Progress
from megazero.train.parallelize import DTYPES
from megazero.train.skipping import LeftOut
from megazero.zero import StepInfo

RESOLVED_FILE = "config.yaml"


@dataclass(frozen=True)
class Outputs:
    """The places where a rank writes. On ranks other than the first the console and the loggers are silent.

    metrics: the writer of metrics.jsonl; None on ranks other than the first.
    """

    console: TrainConsole
    loggers: Loggers
    metrics: MetricsWriter | None

    def evaluation(self, at: Progress, loss: float, name: str = "") -> None:
        """Report an evaluation. loss: nats per token. name: of its data; empty for the one validation set."""
        self.console.evaluation(at.iteration, loss, *([name] if name else []))
        if self.metrics is None:
            return
        extra = {"eval_data": name} if name else {}
        line = self.metrics.evaluation(at.iteration, at.consumed_samples, loss, **extra)
        if name:  # a curve of its own in TensorBoard and wandb: eval_lm_loss/NAME
            line = {key: {name: value} if key.startswith("eval_") else value for key, value in line.items()}
        self.loggers.log(at.iteration, line)

    def went_back(self, why: str, out: LeftOut) -> None:
        """Report that the updates of the iterations ``out`` were undone, and why."""
        self.console.warning(f"{why}: back to iteration {out.first - 1}; left out from here on: {out}")
        if self.metrics is not None:
            self.metrics.undo(out.first, out.last)


def agree_on_run_id(progress: Progress) -> str:
    """The id of this run at outside loggers: the one of ``progress``, or a new one. Collective."""
    run_id = [progress.run_id or new_run_id()]
    if dist.is_initialized():
        dist.broadcast_object_list(run_id, src=0)
    return run_id[0]


def open_outputs(
    config: RunConfig, progress: Progress, last_iteration: int, stack: ExitStack, *, first: bool
) -> Outputs:
    """Open what this rank writes to; ``stack`` closes it. first: this is the first rank, the only one that writes.

    Raises ValueError if a logger that was asked for cannot run.
    """
    log = config.logging
    console = TrainConsole(
        total=last_iteration, begin=progress.iteration, log_interval=log.log_interval, enabled=first
    )
    metrics = None
    members: list[Logger] = []
    if first:
        resolved = config.to_dict()
        undone = [(each.first, each.last) for each in progress.left_out]
        metrics = MetricsWriter(log.log_dir, iteration=progress.iteration, undone=undone)
        stack.callback(metrics.close)
        with replacing(Path(log.log_dir) / RESOLVED_FILE) as file:
            file.write(yaml.safe_dump(resolved, sort_keys=False).encode())
        if log.tensorboard_dir:
            members.append(TensorBoardLogger(log.tensorboard_dir, iteration=progress.iteration))
        if log.wandb_project:
            members.append(
                WandbLogger(
                    log.wandb_project,
                    run_id=progress.run_id,
                    entity=log.wandb_entity,
                    name=log.wandb_exp_name,
                    directory=log.wandb_save_dir,
                    config=resolved,
                )
            )
    loggers = Loggers(members)
    stack.callback(loggers.close)
    return Outputs(console, loggers, metrics)


def report_start(
    config: RunConfig,
    mesh: Mesh,
    decoder: Decoder,
    progress: Progress,
    console: TrainConsole,
    predicted: Sequence[str] = (),
) -> None:
    """Print what is about to run: the model's size, where it starts, every option, the layout, the notes.

    predicted: lines on what the planner predicts of it.
    """
    world = World(mesh.grid.world_size, mesh.grid.ranks_per_node)
    facts: dict[str, object] = {
        "device": str(mesh.device),
        "starts after": f"iteration {progress.iteration}, {progress.consumed_samples:,} samples consumed",
    }
    console.header(f"megazero on {world.world_size} ranks", facts)
    dtype, packed = DTYPES[config.precision.params_dtype], config.data.reset_attention_mask
    math = math_note(decoder.config, decoder.tp, mesh.device, dtype, packed)
    remarks = [f"note: {text}" for text in (math, export_note(config)) if text]
    for line in (*progress.notes, *config.describe(world), *remarks, *predicted):
        console.note(line)


def export_note(config: RunConfig) -> str | None:
    """Return what to say of a model that cannot be exported to Hugging Face, or None if it can."""
    try:
        architecture_of(config.model)
    except ValueError as error:
        return f"checkpoints of this run cannot be exported: {error}"
    return None


def events(info: StepInfo) -> dict[str, Any]:
    """The extra metrics of a step: if it was skipped, what rounding lost, what is sent exactly from now on."""
    out: dict[str, Any] = {"skipped": 1} if info.skipped else {}
    if info.errors:
        out["quantization_unit"] = info.sampled
        out |= {f"quantization_error_{kind}": error for kind, error in info.errors.items()}
    return out | ({"fallbacks": list(info.fallbacks)} if info.fallbacks else {})


def peak_memory(device: torch.device) -> int:
    """The peak of the memory in bytes: what was allocated on a CUDA device, or what was resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
