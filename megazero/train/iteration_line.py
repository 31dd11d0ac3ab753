"""The line of an iteration in metrics.jsonl, made of the step that was trained (docs/reference/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import training_flops
from megazero.log.metrics import IterationMetrics
from megazero.mesh.mesh import Mesh
from megazero.ops.memory import peak_memory
from megazero.train.callbacks.callback import TrainedStep
from megazero.train.state.progress import Progress, just_before
from megazero.zero import StepInfo


def iteration_line(
    step: TrainedStep,
    model: ModelConfig,
    mesh: Mesh,
    progress: Progress,
    rates: Mapping[str, float],
    scale: Mapping[str, Any],
    tokens_left: int,
) -> IterationMetrics:
    """Return the line without the callbacks' part. rates: the schedule's values. scale: the loss scale's metrics.
    tokens_left: those that the run will take.
    """
    totals = [f"{link}_bytes" for link in mesh.links]
    others = {name: rate for name, rate in rates.items() if name != "learning_rate"}
    flops = training_flops(model, [step.seq_length], mesh.tp.size) * step.samples
    return IterationMetrics(
        iteration=step.iteration,
        consumed_samples=progress.consumed_samples,
        lm_loss=step.loss,
        grad_norm=step.info.grad_norm,
        learning_rate=rates["learning_rate"],
        iteration_time_s=step.seconds,
        tokens_per_s=step.tokens / step.seconds,
        tflops_per_rank=flops / step.seconds / mesh.world_size / 1e12,
        sent={total: step.traffic[total] for total in totals},
        memory_bytes=peak_memory(mesh.device),
        time_bill=step.bill,
        extra={
            "batch_size": step.samples,
            "tokens_left": tokens_left,
            **others,
            **just_before(progress, step.iteration),
            **_of_engine(step.info),
            **({"outer": step.meeting} if step.meeting else {}),
            **scale,
            "bytes": {hop: sent for hop, sent in step.traffic.items() if hop not in totals},
        },
    )


def _of_engine(info: StepInfo) -> dict[str, Any]:
    """Return whether the step was skipped, and rounding errors."""
    out: dict[str, Any] = {"skipped": 1} if info.skipped else {}
    if info.errors:
        out["quantization_unit"] = info.sampled
        out |= {f"quantization_error_{kind}": error for kind, error in info.errors.items()}
    if info.zeroed is not None:
        out["quantization_zeroed_gradients"] = info.zeroed
    return out
