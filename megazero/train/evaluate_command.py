"""The command ``megazero evaluate``: the losses of a checkpoint on data, on the ranks of a launch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from megazero.config import ConfigError, RunConfig, World, begun, run_command
from megazero.config.layout.shards import AUTO, QUANTISED
from megazero.config.model.published import is_published
from megazero.config.options.data_inputs import PARTS
from megazero.config.options.data_sources import NO_DATA
from megazero.config.read.beginning import Beginning, read_beginning
from megazero.config.read.flags import read_flags
from megazero.config.read.parse import make_run, read_layers
from megazero.config.read.sources import Layer
from megazero.config.run import all_options
from megazero.log.exit_status import ExitStatus, status_of
from megazero.mesh.launch import Launch, take_launch
from megazero.mesh.starter import start_again
from megazero.ops.failures import reported_elsewhere

USAGE = """usage: megazero evaluate --load DIR [--nproc-per-node N] [flags of training]
       megazero evaluate --load runs/a --data-path data/text_text_document --split 0,1,0 --micro-batch-size 8
       torchrun ... -m megazero evaluate --load hf:models/published FLAGS

Measures the mean loss of a checkpoint, or of a Hugging Face folder (hf:DIR), on the validation and test data of
training's flags: up to --eval-iters global batches of each, which are those of the run's own evaluations. Any layout
may have written the checkpoint, and any layout reads it. The flags of a training may be given as they are: what only
training uses changes nothing, and weights are sent exactly. --split 0,1,0 evaluates all of the data. With --tasks
hellaswag,arc_easy it evaluates tasks of lm-eval's harness, too, and data only if they are named. Nothing is written
but the index of samples beside the data.
Exit status 0: the losses are printed; 2: a flag, the checkpoint or the data is wrong.
"""
SECTIONS = ("model", "parallel", "precision", "data")
OPTIONS = (
    *("micro_batch_size", "global_batch_size", "step_batch_size_schedule", "eval_global_batch_size"),
    *("zero_preset", "zero_stage", "zero_shard", "zero_hpz_partition_size", "zero_params_lifetime"),
    *("zero_prefetch_bytes", "zero_chunk_numel", "zero_unit_layers"),
    *(
        "eval_iters",
        "eval_tasks",
        "eval_tasks_limit",
        "seed",
        "device",
        "attention_backend",
        "compile",
        "compile_backend",
    ),
    *("deterministic_mode", "distributed_timeout_minutes", "distributed_init_timeout_minutes"),
    *("load", "ckpt_step", "accept_field", "finetune"),
)
# What names data to evaluate on.
DATA = ("data_path", "mock_data", *PARTS)
# What a run must say, and an evaluation does not use; sgd without momentum keeps no states.
NO_TRAINING = {"lr": 1.0, "train_iters": 1, "optimizer": "sgd", "sgd_momentum": 0.0}


def main(argv: Sequence[str]) -> int:
    """Return the exit status."""
    try:
        launch, ranks, flags = take_launch(argv)
    except ValueError as error:
        print(error, file=sys.stderr)
        return ExitStatus.MISTAKE
    world = World(ranks, ranks) if ranks else World(launch.world_size, launch.local_world_size or 0)

    def run() -> int:
        config = evaluation_config(flags, world)
        if ranks is not None:
            return start_again(argv, flags, ranks, device=config.training.device)
        return _evaluate(config, launch)

    return run_command("evaluate", argv, lambda: USAGE, run, launch.rank)


def evaluation_config(flags: Sequence[str], world: World | None) -> RunConfig:
    """Return the configuration of an evaluation by a training's flags. Raises ConfigError."""
    said = _without_training(read_layers(read_flags(flags)))
    load, beginning = said.values.get("load"), Beginning()
    if load is None and not said.unread:
        said.errors.append("--load is required: a folder of --save, or hf:DIR")
    elif load is not None:
        beginning = read_beginning(said.values)
        if beginning.error or beginning.path is None and not is_published(load):
            said.errors.append(
                beginning.error or f"--load {load} holds no checkpoint; name a folder of --save"
            )
    if said.values.get("eval_tasks") and not any(said.values.get(name) for name in DATA):
        said.values |= {**NO_DATA, "eval_iters": 0}
    elif said.values.get("eval_iters") == 0:
        said.errors.append("--eval-iters 0 measures nothing; nearest: --eval-iters 1")
    if said.errors:
        raise ConfigError(said.errors)
    if beginning.manifest is not None:
        stored = beginning.manifest.configuration.get("model", {})
        said.values.setdefault("seq_length", stored.get("seq_length"))
    return begun(make_run(said, world), world, beginning)


def _without_training(said: Layer) -> Layer:
    """Return the values that an evaluation uses. Weights are sent as they are, whatever training did."""
    kept = {
        name: value
        for name, value in said.values.items()
        if name in OPTIONS or all_options()[name].section in SECTIONS
    }
    if kept.get("zero_preset") == AUTO:
        del kept["zero_preset"]
    if kept.get("zero_preset") in QUANTISED:
        kept |= {"zero_quantized_weights": False, "zero_quantized_gradients": False}
    said.values = {"micro_batch_size": 1, **kept, **NO_TRAINING, "finetune": True}
    said.accepted, said.conditions = [], []
    return said


def _evaluate(config: RunConfig, launch: Launch) -> int:
    import torch.distributed as dist

    from megazero.train.evaluation import evaluate_checkpoint  # brings torch

    try:
        lines = evaluate_checkpoint(config, launch)
    except (ValueError, OSError, RuntimeError) as error:
        _leave(launch, error)
    if launch.rank == 0:
        print("\n".join(lines), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return ExitStatus.FINISHED


def _leave(launch: Launch, error: Exception) -> NoReturn:
    """Say what is wrong, on one of the ranks that know it, and end without waiting for the others."""
    if not reported_elsewhere(error):
        where = "" if launch.rank == 0 else f"rank {launch.rank}: "
        said = error if isinstance(error, ConfigError) else f"error: {where}{error}"
        print(said, file=sys.stderr, flush=True)
    time.sleep(1)  # launchers end all ranks with the first that leaves
    os._exit(status_of(error))
