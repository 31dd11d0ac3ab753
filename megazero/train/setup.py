"""From a parsed configuration to a Trainer, and the program around it: errors, signals, exit codes."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megazero.comm.traffic import Traffic
from megazero.config import RunConfig
from megazero.data.tokenizer_files import read_tokenizer_files
from megazero.mesh.launch import Launch
from megazero.train.batch_size import run_length
from megazero.train.checkpointing import Checkpointing
from megazero.train.datasets import make_datasets, tokenizer_info, with_vocabulary
from megazero.train.guards import ExitConditions, NonFiniteLoss, RankFailure, StopSignals, readable_failures
from megazero.train.learning_rate import LearningRate
from megazero.train.loss_scaling import LossScaling
from megazero.train.origin import find_origin
from megazero.train.outputs import agree_on_run_id, open_outputs, report_start
from megazero.train.parallelize import build_decoder, build_pipeline, shard_decoder
from megazero.train.profiling import Profiler
from megazero.train.ranks import arrange_ranks, start_rank
from megazero.train.timebill import TimeBill
from megazero.train.trainer import Trainer


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


def prepare(config: RunConfig, launch: Launch, stack: ExitStack, began: float) -> Trainer:
    """Make all that a run needs, in the order in which mistakes are cheapest to find. Collective.

    stack: closes what is opened here. began: time.monotonic() at the start of the process.
    """
    timeout = timedelta(minutes=config.training.distributed_timeout_minutes)
    # First of all the ranks join: from then on the others notice when one of them fails alone (a file that its node
    # does not see).
    device, notes = start_rank(config.training, launch, timeout)
    tokenizer = tokenizer_info(config)
    config = with_vocabulary(config, tokenizer)
    mesh = arrange_ranks(config, launch, device, timeout)

    # What is left to do, and the data it takes, are counted from where the run begins.
    origin = find_origin(config, mesh)
    length = run_length(config, mesh.dp_size, origin.progress)
    learning_rate = LearningRate.of(config)
    datasets, progress = make_datasets(config, tokenizer, length, origin.progress)

    bill = TimeBill()
    decoder = build_decoder(config, mesh, Traffic())
    engine = shard_decoder(decoder, config, mesh, bill.span)
    pipeline = build_pipeline(decoder, engine, config, mesh, bill.span)
    scaling = LossScaling.of(config.precision)
    files = (
        read_tokenizer_files(config.data.tokenizer_type, config.data.tokenizer_model)
        if mesh.rank == 0
        else {}
    )
    checkpointing = Checkpointing(
        config, mesh, engine, decoder.placements(), tokenizer.fingerprint, scaling, files
    )
    checkpointing.load(origin)

    notes = (*progress.notes, *launch.found_nodes(mesh.grid.ranks_per_node), *notes)
    progress = replace(progress, run_id=agree_on_run_id(progress), notes=notes)
    outputs = open_outputs(config, progress, length.last_iteration, stack, first=mesh.rank == 0)
    report_start(config, mesh, decoder, progress, outputs.console)
    exits = ExitConditions(
        agree=lambda flag: bool(mesh.gather_rows(torch.tensor([float(flag)], device=device)).any()),
        exit_interval=config.training.exit_interval,
        exit_duration_in_mins=config.training.exit_duration_in_mins,
        signals=stack.enter_context(StopSignals()) if config.training.exit_signal_handler else None,
        began=began,
    )
    profiler = Profiler(config, decoder, engine, pipeline, bill, outputs.console.note)
    return Trainer(
        decoder,
        engine,
        pipeline,
        datasets,
        length,
        learning_rate,
        checkpointing,
        outputs,
        exits,
        bill,
        profiler,
        progress,
    )
