"""The sections that change nothing of the training: what is predicted of it, profiled, and written beside it."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.options.fields import option


@dataclass(frozen=True)
class PlanningConfig:
    """What is predicted of a run before it allocates, and printed beside what was measured at its end."""

    cluster: str | None = option(
        None,
        "cluster file, or the name of one that comes with the planner: step times are predicted by it, and "
        "--zero-preset auto chooses by it",
    )
    loss_policy: str = option(
        "exact",
        "what messages that the planner chooses may round: nothing; what ZeRO++ rounds, as measured in docs/loss.md; "
        "or more than that",
        choices=("exact", "zeropp", "aggressive"),
    )
    memory_check: bool = option(
        True, "refuse a run whose predicted memory is more than its devices have, before it allocates"
    )


@dataclass(frozen=True)
class ProfilingConfig:
    """A trace of a few iterations, as LOG_DIR/profile/rank_N.json.gz for chrome://tracing or ui.perfetto.dev."""

    profile: bool = option(False, "write a trace of what the ranks compute and send")
    profile_step_start: int = option(10, "the trace begins after this iteration", low=0)
    profile_step_end: int = option(12, "the trace ends after this iteration", low=1)
    profile_ranks: tuple[int, ...] = option((0,), "ranks that write a trace")


@dataclass(frozen=True)
class LoggingConfig:
    """What is written beside the checkpoints. Throughput is always logged."""

    log_interval: int = option(
        100, "iterations between console lines, whose figures are means over them", low=1
    )
    log_dir: str = option(
        "logs", "folder of metrics.jsonl, of events.jsonl and of the resolved configuration"
    )
    tensorboard_dir: str | None = option(None, "folder of TensorBoard events")
    wandb_project: str | None = option(None, "Weights & Biases project; none: not used")
    wandb_entity: str | None = option(None, "user or team of the project (default: wandb's own)")
    wandb_exp_name: str | None = option(None, "name of the run there")
    wandb_save_dir: str | None = option(None, "folder of its local files")
