"""From a parsed configuration to a Trainer, and the program around it: errors, signals, exit codes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from megazero.comm.traffic import Traffic
from megazero.config import RunConfig, World
from megazero.config.fields import show
from megazero.config.run import all_options
from megazero.data import load_tokenizer
from megazero.data.files import replacing
from megazero.data.tokenizer import NullTokenizer, TokenizerInfo
from megazero.mesh.launch import Launch, prepare_cuda
from megazero.mesh.mesh import Mesh, discover_ranks_per_node, init_distributed
from megazero.models import Decoder
from megazero.models.attention_kernels import math_note
from megazero.models.flops import parameter_count
from megazero.train.batch_size import BatchSchedule
from megazero.train.checkpointing import Checkpointing
from megazero.train.console import Schedule, TrainConsole
from megazero.train.datasets import make_datasets
from megazero.train.guards import (
    STOP_SIGNALS,
    ExitConditions,
    NonFiniteLoss,
    RankFailure,
    StopSignals,
    readable_failures,
)
from megazero.train.loggers import Logger, Loggers, TensorBoardLogger, WandbLogger, new_run_id
from megazero.train.metrics import MetricsWriter
from megazero.train.origin import Progress, find_origin
from megazero.train.parallelize import DTYPES, build_decoder, build_pipeline, make_mesh, shard_decoder
from megazero.train.schedule import LearningRate
from megazero.train.timebill import TimeBill
from megazero.train.trainer import Outputs, Schedules, Trainer

RESOLVED_FILE = "config.yaml"
# Options that may differ between ranks: what only the first one uses, and where files lie on a node.
OWN_OPTIONS = {"data_cache_path", "tokenizer_model"}
OWN_SECTIONS = {"logging"}


def main(config: RunConfig, launch: Launch) -> int:
    """Train as configured; the process's exit status. Every expected failure is one clear message."""
    began = time.monotonic()
    trainer: Trainer | None = None
    with ExitStack() as stack:
        try:
            with readable_failures(
                rank=launch.rank,
                host=socket.gethostname(),
                timeout_s=config.training.distributed_timeout_minutes * 60,
                phase=lambda: trainer.phase if trainer else "the preparation",
            ):
                trainer = prepare(config, launch, stack, began)
                with trainer.outputs.console:
                    trainer.run()
        except (ValueError, NonFiniteLoss, RankFailure, OSError) as error:
            _fail(launch, error)
        except Exception as error:  # unexpected: the trace is what helps
            traceback.print_exc()
            _fail(launch, error)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _fail(launch: Launch, error: Exception) -> None:
    """Say it and leave without waiting for collectives that can no longer complete."""
    # A user's mistake is mostly the same on all ranks and said once; what is about one rank is said by it.
    if not isinstance(error, ValueError) or _first_to_say(f"{error}"):
        print(f"[rank {launch.rank}] {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if launch.rank == 0 and launch.world_size > 1:
        time.sleep(1)  # it may hold the store where the others ask whether the message was said
    os._exit(1)


def _first_to_say(text: str) -> bool:
    """True on one of the ranks that fail with this text, and wherever the store does not answer any more."""
    if not dist.is_initialized():
        return True
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        return dist.distributed_c10d._get_default_store().add(f"megazero/said/{digest}", 1) == 1
    except RuntimeError:
        return True


def pick_device(config: RunConfig, launch: Launch) -> torch.device:
    """The configured device; auto takes CUDA where there is one, one per local rank."""
    wanted, present = config.training.device, torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ValueError("--device cuda, but torch sees no CUDA device; use --device cpu or auto")
    if wanted == "cpu" or not present:
        return torch.device("cpu")
    if launch.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {launch.local_rank} has no GPU: torch sees {torch.cuda.device_count()}; start at most "
            "that many ranks per node, or use --device cpu"
        )
    return torch.device("cuda", launch.local_rank)


def prepare(config: RunConfig, launch: Launch, stack: ExitStack, began: float) -> Trainer:
    """Everything before the first iteration, in the order in which mistakes are cheapest to find."""
    notes = prepare_cuda()  # before anyone asks for devices: that starts CUDA
    device = pick_device(config, launch)
    if config.training.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it before its first use
        torch.use_deterministic_algorithms(True)
    timeout = timedelta(minutes=config.training.distributed_timeout_minutes)
    if launch.world_size > 1:
        # First: from here on the others notice when one rank fails alone (a file that its node does not see).
        init_distributed(launch, device, timeout)
    tokenizer = tokenizer_info(config)
    config = with_vocabulary(config, tokenizer)
    refuse_different_options(config, launch.world_size)  # before ranks form groups, each by its own options
    world = World(launch.world_size, discover_ranks_per_node(launch, config.parallel.ranks_per_node))
    mesh = make_mesh(config, world, device, timeout)
    origin = find_origin(
        config, mesh
    )  # first: what is left to do, and the data it takes, are counted from there
    schedules = make_schedules(config, mesh, origin.progress)
    datasets, progress = make_datasets(config, tokenizer, schedules, origin.progress)
    bill = TimeBill()
    decoder = build_decoder(config, mesh, Traffic())
    engine = shard_decoder(decoder, config, mesh, bill.span)
    pipeline = build_pipeline(decoder, engine, config, mesh, bill.span)
    checkpointing = Checkpointing(config, mesh, engine, decoder.placements(), tokenizer.fingerprint)
    checkpointing.load(origin)
    outputs, progress = open_outputs(config, mesh, schedules, progress, stack)
    progress = dataclasses.replace(
        progress, notes=(*progress.notes, *(notes if device.type == "cuda" else ()))
    )
    _describe(config, mesh, outputs.console, decoder, progress)
    signals = None
    if config.training.exit_signal_handler:
        signals = stack.enter_context(StopSignals(STOP_SIGNALS))
    exits = ExitConditions(
        agree=lambda flag: bool(mesh.gather_rows(torch.tensor([float(flag)], device=device)).any()),
        exit_interval=config.training.exit_interval,
        exit_duration_in_mins=config.training.exit_duration_in_mins,
        signals=signals,
        began=began,
    )
    return Trainer(
        decoder, engine, pipeline, datasets, schedules, checkpointing, outputs, exits, bill, progress
    )


def tokenizer_info(config: RunConfig) -> TokenizerInfo:
    """The run's tokenizer; a null one of --vocab-size where none is named."""
    data = config.data
    if data.tokenizer_type is None:
        if config.model.vocab_size is None:
            raise ValueError(
                "the vocabulary is unknown: give --tokenizer-type and --tokenizer-model, or --vocab-size"
            )
        return NullTokenizer(config.model.vocab_size - 1).info
    return load_tokenizer(data.tokenizer_type, data.tokenizer_model, config.model.vocab_size).info


def with_vocabulary(config: RunConfig, tokenizer: TokenizerInfo) -> RunConfig:
    """The configuration with the tokenizer's vocabulary; a larger --vocab-size stays, a smaller one is refused."""
    wanted = config.model.vocab_size
    if wanted is not None and wanted < tokenizer.vocab_size and config.data.tokenizer_type != "NullTokenizer":
        raise ValueError(
            f"--vocab-size {wanted} is below the tokenizer's {tokenizer.vocab_size}; leave it out, or give at "
            f"least {tokenizer.vocab_size}"
        )
    size = max(wanted or 0, tokenizer.vocab_size)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def refuse_different_options(config: RunConfig, world_size: int) -> None:
    """Collective. ValueError, the same on all ranks, if they were started with different options."""
    if world_size == 1:
        return
    own = {
        name: config.get(name)
        for name, option in all_options().items()
        if name not in OWN_OPTIONS and option.section not in OWN_SECTIONS
    }
    digests: list[Any] = [None] * world_size
    dist.all_gather_object(digests, hashlib.sha256(json.dumps(own).encode()).hexdigest())
    if len(set(digests)) > 1:  # only now the values: they are large, the digests are not
        every: list[Any] = [None] * world_size
        dist.all_gather_object(every, own)
        raise ValueError(odd_ranks(every, digests))


def odd_ranks(every: Sequence[Mapping[str, Any]], digests: Sequence[str]) -> str:
    """Which ranks differ from most others (from the first rank where there is no most), and in which options."""
    usual = digests.index(Counter(digests).most_common(1)[0][0])
    groups: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        if digest != digests[usual]:
            groups.setdefault(digest, []).append(rank)
    parts = []
    for ranks in groups.values():
        wrong = {name: value for name, value in every[ranks[0]].items() if value != every[usual][name]}
        said = (
            f"{all_options()[name].flag} {show(value)} (rank {usual}: {show(every[usual][name])})"
            for name, value in wrong.items()
        )
        who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
        parts.append(f"{who} {', '.join(said)}")
    return (
        f"ranks were started with different options: {'; '.join(parts)}. Start every rank with the same ones"
    )


def make_schedules(config: RunConfig, mesh: Mesh, begin: Progress) -> Schedules:
    """Batch size and learning rate over the run, and its last iteration counted from where it begins.

    --train-iters counts iterations whatever their batch; --train-samples ends where the next whole batch would
    exceed it. Raises ValueError for sizes that do not divide, and for samples that fill no batch.
    """
    optimizer, training = config.optimizer, config.training
    assert optimizer.lr
    sizes = BatchSchedule.of(config, mesh.dp_size)
    span = config.lr_span
    rate = LearningRate(
        peak=optimizer.lr,
        decay=span.decay,
        minimum=optimizer.min_lr,
        warmup=span.warmup,
        style=optimizer.lr_decay_style,
        wsd_decay=span.wsd_decay or None,
        wsd_style=optimizer.lr_wsd_decay_style,
    )
    last = training.train_iters or _last_iteration(sizes, training.train_samples or 0, begin)
    return Schedules(sizes, rate, span.unit == "samples", last)


def _last_iteration(sizes: BatchSchedule, samples: int, begin: Progress) -> int:
    last = begin.iteration + sizes.iterations_within(samples, begin.consumed_samples)
    if last == 0:
        raise ValueError(
            f"--train-samples {samples} does not fill the first global batch; nearest: {sizes.batch_size(0)}"
        )
    return last


def open_outputs(
    config: RunConfig, mesh: Mesh, schedules: Schedules, progress: Progress, stack: ExitStack
) -> tuple[Outputs, Progress]:
    """Console, metrics and loggers of the first rank; silent ones elsewhere. The run id is agreed on."""
    log, first = config.logging, mesh.rank == 0
    run_id = [progress.run_id or new_run_id()]
    if dist.is_initialized():
        dist.broadcast_object_list(run_id, src=0)
    progress = dataclasses.replace(progress, run_id=run_id[0])
    schedule = Schedule(schedules.last_iteration, progress.iteration, log.log_interval)
    console = TrainConsole(schedule, enabled=first)
    metrics = None
    members: list[Logger] = []
    if first:
        metrics = MetricsWriter(log.log_dir, iteration=progress.iteration)
        stack.callback(metrics.close)
        with replacing(Path(log.log_dir) / RESOLVED_FILE) as file:
            file.write(yaml.safe_dump(config.to_dict(), sort_keys=False).encode())
        if log.tensorboard_dir:
            members.append(TensorBoardLogger(log.tensorboard_dir, iteration=progress.iteration))
        if log.wandb_project:
            members.append(
                WandbLogger(
                    log.wandb_project,
                    run_id=progress.run_id,
                    name=log.wandb_exp_name,
                    directory=log.wandb_save_dir,
                    config=config.to_dict(),
                )
            )
    loggers = Loggers(members)
    stack.callback(loggers.close)
    return Outputs(console, loggers, metrics), progress


def _describe(
    config: RunConfig, mesh: Mesh, console: TrainConsole, decoder: Decoder, progress: Progress
) -> None:
    grid = mesh.grid
    facts: dict[str, object] = {
        "parameters": f"{parameter_count(decoder.config):,}",
        "device": str(mesh.device),
        "starts after": f"iteration {progress.iteration}, {progress.consumed_samples:,} samples consumed",
    }
    console.header(f"megazero on {grid.world_size} ranks", facts)
    dtype, packed = DTYPES[config.precision.params_dtype], config.data.reset_attention_mask
    math = math_note(decoder.config, decoder.tp, mesh.device, dtype, packed)
    described = config.describe(World(grid.world_size, grid.ranks_per_node))
    for line in (*progress.notes, *described, *([f"note: {math}"] if math else [])):
        console.note(line)
