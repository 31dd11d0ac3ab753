"""From a parsed configuration to a Trainer, and the program around it: errors, signals, exit statuses."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch.distributed as dist

from megazero.checkpoint.errors import first_bytes
from megazero.comm.hops import Traffic
from megazero.config import RunConfig, World, begun
from megazero.config.read.beginning import Beginning, read_beginning
from megazero.data.source import SampleSource
from megazero.data.tokenizer import TokenizerInfo
from megazero.data.tokenizer_files import read_tokenizer_files, tokenizer_options
from megazero.log.exit_status import ExitStatus, end_folder, forget_status, record_status, status_of
from megazero.log.time_bill import TimeBill
from megazero.mesh.launch import Launch
from megazero.mesh.mesh import Mesh, world_group
from megazero.mesh.objects import gather_objects
from megazero.mesh.waiting import waiting
from megazero.models import Decoder
from megazero.ops.exit_conditions import ExitConditions, NotStarted, StopSignals
from megazero.ops.failures import NonFiniteLoss, RankFailure, readable_failures, reported_elsewhere
from megazero.ops.health import Unhealthy, check_run, record_bad_nodes
from megazero.ops.lease import BEAT_S, SILENT_S, FolderInUse, Lease
from megazero.ops.stragglers import Stragglers
from megazero.ops.watchdog import judging_s
from megazero.pp.executor import Pipeline
from megazero.train.callbacks.callback import Callback
from megazero.train.callbacks.chain import Callbacks
from megazero.train.callbacks.exits import Exits
from megazero.train.callbacks.profiling import Profiler
from megazero.train.callbacks.reports import (
    FurtherReport,
    PartReport,
    Prediction,
    RoundingWatch,
    StragglerWatch,
    TasksReport,
)
from megazero.train.callbacks.users import make_callbacks
from megazero.train.data.datasets import (
    cut_short,
    make_datasets,
    run_tokenizer,
    tokenizer_info,
    with_vocabulary,
)
from megazero.train.distributed import find_world, make_mesh, start_rank
from megazero.train.expert_balance import ExpertBalance
from megazero.train.forecast import Forecast, foresee, room_of
from megazero.train.outputs import Outputs, agree_on_start, open_outputs, report_start, surroundings
from megazero.train.parallelize import build_decoder, build_pipeline, shard_decoder
from megazero.train.peak import peak_tflops
from megazero.train.qk_clip import QKClip
from megazero.train.replicas import Membership, Standings
from megazero.train.schedule.learning_rate import LearningRate
from megazero.train.schedule.loss_scaling import LossScaling
from megazero.train.schedule.run_length import RunLength, run_length
from megazero.train.state.checkpointing import Checkpointing, SavedTokenizer
from megazero.train.state.origin import Origin, find_origin, leave_behind
from megazero.train.state.progress import Progress
from megazero.train.supervisor import Supervisor
from megazero.train.tasks import Scorer
from megazero.train.trainer import Trainer
from megazero.zero import Engine

LEAVING_S = 60.0  # that a failed rank has to report and leave


def main(
    config: RunConfig,
    launch: Launch,
    signals: StopSignals | None = None,
    lease: Lease | None = None,
    beginning: Beginning | None = None,
) -> int:
    """Train as configured, and return the process's exit status. Every expected failure is one clear message.

    signals: already handles the signals that stop the run. lease: not taken yet. beginning: on the first rank, what
    it has read of the folders of --load and --save, if it has. Raises NotStarted.
    """
    supervisor = Supervisor(config, launch, lease)
    with ExitStack() as stack:
        try:
            if launch.rank == 0:
                _take_folders(config, supervisor)
            with readable_failures(
                rank=launch.rank,
                host=launch.host,
                timeout_s=config.training.distributed_timeout_minutes * 60,
                phase=lambda: supervisor.phase,
            ):
                trainer = prepare(config, launch, stack, signals, supervisor, beginning)
                supervisor.trainer = trainer
                with trainer.outputs.console:
                    status = trainer.run()
        except (RankFailure, ValueError, NonFiniteLoss, OSError) as error:
            _fail(supervisor, error, signals)
        except Exception as error:  # unexpected: the trace is what helps
            traceback.print_exc()
            _fail(supervisor, error, signals)
    if launch.rank == 0:
        supervisor.report_end(status, trainer.exits.reason or "the last iteration is done")
    if dist.is_initialized():
        with waiting:
            dist.barrier()
            supervisor.stop_watchdog()
            # srun --kill-on-bad-exit ends all ranks with the first that leaves with STOPPED; rank 0 may hold the
            # store.
            dist.barrier()
        dist.destroy_process_group()
    return status


def _fail(supervisor: Supervisor, error: Exception, signals: StopSignals | None) -> None:
    """Report the error and leave, without waiting for collectives that can no longer complete."""
    if signals is not None:
        signals.hold()
    if isinstance(error, RankFailure):
        supervisor.find_missing(f"{error}")
    launch = supervisor.launch
    status = status_of(error) if supervisor.refused is None else ExitStatus.IN_USE
    # What follows writes, perhaps to a disk that hangs.
    limit = threading.Timer(LEAVING_S, os._exit, [status])
    limit.daemon = True
    limit.start()
    if not reported_elsewhere(error):
        supervisor.tell(type(error).__name__, f"{error}")
    if launch.rank == 0 or _is_own_account(error, supervisor):
        supervisor.report_end(status, f"{type(error).__name__}: {error}")
        if isinstance(error, Unhealthy) and launch.rank == 0:
            record_bad_nodes(supervisor.config.logging.log_dir, error.nodes)
    if supervisor.trainer is not None:
        supervisor.trainer.outputs.loggers.flush()
    sys.stdout.flush()
    if launch.world_size > 1:
        # The first rank may hold the store where the others look whether the message was printed. And launchers
        # signal all ranks when one has left: before that the first one records how the run ended.
        time.sleep(1)
    os._exit(status)


def _is_own_account(error: Exception, supervisor: Supervisor) -> bool:
    """Tell whether this error says why the run ends, so that a rank other than the first reports it.

    The first rank may be lost, or sees only that this rank has left. While training, an unexpected error may be the
    loss of another rank, in a message that nobody knows yet.
    """
    if isinstance(error, RankFailure):
        return not error.reported_elsewhere
    return supervisor.trainer is None or status_of(error) != ExitStatus.UNEXPECTED


def _take_folders(config: RunConfig, supervisor: Supervisor) -> None:
    """Take the lease of the run's folders, on the first rank. If another run has it, ``_share_lease`` tells all."""
    try:
        supervisor.lease.take(lambda text: print(text, flush=True))
    except FolderInUse as error:
        supervisor.refused = refused = f"{error}"
        record_status(
            end_folder(None), ExitStatus.IN_USE, lambda: print(refused, file=sys.stderr, flush=True)
        )
        return
    forget_status(config.logging.log_dir, supervisor.launch.attempt)
    record_bad_nodes(config.logging.log_dir, ())


def _share_lease(supervisor: Supervisor) -> None:
    """Tell all ranks what the first one holds. Collective. Raises NotStarted on every rank if another run has it."""
    lease = supervisor.lease
    refused, owner, folders = gather_objects((supervisor.refused, lease.holder.owner, lease.folders))[0]
    if refused is not None:
        raise NotStarted(refused, ExitStatus.IN_USE)
    lease.adopt(owner, folders)
    if supervisor.launch.rank == 0:
        for folder in folders:
            lease.check(folder, fresh=True)


def _look_for_kill_switch(path: str | None) -> None:
    """Raise NotStarted on every rank if any rank sees the file. Collective."""
    if path is not None and any(gather_objects(os.path.exists(path))):
        raise NotStarted(
            f"--kill-switch-path {path} is there: the run does not begin; remove the file to start it"
        )


def _begun(config: RunConfig, launch: Launch, beginning: Beginning | None) -> RunConfig:
    """Return the configuration, completed by the folders of --load and --save. One rank reads them. Collective."""

    def read() -> bytes:
        return (beginning or read_beginning(config.values())).told

    told = first_bytes(world_group(), "the first rank told where the run begins", read)
    return begun(config, World(launch.world_size, launch.local_world_size or 0), Beginning.of(told))


class Joined(NamedTuple):
    """What all ranks run on. config: as it was completed. notes: for the user, as those of the next stages."""

    config: RunConfig
    tokenizer: TokenizerInfo
    mesh: Mesh
    forecast: Forecast | None
    notes: Sequence[str]


class Begun(NamedTuple):
    """Where the run begins, how long it is, and its data. users: the user's callbacks by name."""

    origin: Origin
    length: RunLength
    data: Mapping[str, SampleSource]
    progress: Progress
    users: Mapping[str, Callback]


class Built(NamedTuple):
    """The model on its ranks, with its weights loaded. forecast: with the memory in use before the model."""

    decoder: Decoder
    engine: Engine
    pipeline: Pipeline
    checkpointing: Checkpointing
    bill: TimeBill
    forecast: Forecast | None
    notes: Sequence[str]


def _join(config: RunConfig, launch: Launch, supervisor: Supervisor, beginning: Beginning | None) -> Joined:
    """Meet the other ranks and find out what all of them run on; nothing is allocated yet. Collective.

    Raises NotStarted.
    """
    # Collectives wait a little longer than the watchdog, which can name the missing ranks.
    limit = timedelta(minutes=config.training.distributed_timeout_minutes)
    timeout = limit + timedelta(seconds=judging_s(launch.world_size))
    # First of all the ranks join: from then on they notice when one of them fails alone (a file that its node does
    # not see). The first rank may have to wait for a folder's lease.
    lease = supervisor.lease
    held = launch.rank != 0 and any(lease.taker(f"{place.folder}") is not None for place in lease.places)
    patience = 2 * (SILENT_S + BEAT_S) if held else 0.0
    device, notes = start_rank(config.training, launch, timeout, supervisor.start_watchdog, patience)
    _share_lease(supervisor)
    config = _begun(config, launch, beginning)
    tokenizer = tokenizer_info(config)
    config, world = find_world(with_vocabulary(config, tokenizer), launch)
    supervisor.joining = "the planning"
    config, forecast, planned = foresee(config, world, device)  # before anything is allocated
    supervisor.joining = "making communicators"
    found = check_run(config, launch, world, device)
    mesh = make_mesh(config, world, device, timeout)
    if forecast is not None:  # communicators have taken their part
        forecast.refuse_without(room_of(device, mesh.grid.ranks_per_node))
    supervisor.joining = None
    _look_for_kill_switch(config.training.kill_switch_path)
    return Joined(config, tokenizer, mesh, forecast, (*found, *notes, *planned))


def _begin(joined: Joined) -> Begun:
    """Find where the run begins. What is left to do, and the data it takes, are counted from there. Collective."""
    config, mesh = joined.config, joined.mesh
    users = make_callbacks(config.logging.callbacks)
    origin = find_origin(config, mesh)
    length = run_length(config, mesh.batch_ranks, origin.progress)
    data, progress = make_datasets(config, joined.tokenizer, length, origin.progress)
    return Begun(origin, length, data, progress, users)


def _build(joined: Joined, begun: Begun, lease: Lease) -> Built:
    """Make the model and what saves it, prove that this can save, and load the weights. Collective."""
    config, mesh, origin, bill = joined.config, joined.mesh, begun.origin, TimeBill(links=joined.mesh.links)
    forecast = joined.forecast and joined.forecast.before_the_model(mesh.device)
    decoder = build_decoder(config, mesh, Traffic(mesh.links), bill.span)
    engine = shard_decoder(decoder, config, mesh, bill.span)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    files: Mapping[str, bytes] = {}
    if mesh.rank == 0:
        named = tokenizer_options(vars(config.data))
        files = read_tokenizer_files(config.data.tokenizer_type, named) or origin.of_model
    checkpointing = Checkpointing(
        config,
        engine,
        decoder.placements(),
        SavedTokenizer(joined.tokenizer.fingerprint, files),
        LossScaling.of(config.precision),
        Callbacks(users=begun.users),
        partial(lease.check, fresh=True),
    )
    if config.checkpoint.save is not None and origin.progress.iteration < begun.length.last_iteration:
        checkpointing.try_saving()
    checkpointing.load(origin)
    left = leave_behind(config, origin, mesh, begun.length.last_iteration)
    notes = (*left, *_not_named(origin, begun.users), *joined.notes, *cut_short(begun.data["train"]))
    return Built(decoder, engine, pipeline, checkpointing, bill, forecast, notes)


def _not_named(origin: Origin, users: Mapping[str, Callback]) -> list[str]:
    """Return a note for each callback whose state the checkpoint holds and this run does not take."""
    held = origin.saved.state.get("callbacks", {}) if origin.saved else {}
    return [
        f"the checkpoint has the state of the callback {name}, which this run does not name in --callbacks: the next "
        "checkpoint is without it"
        for name in held
        if name not in users
    ]


def _announce(
    launch: Launch, stack: ExitStack, lease: Lease, mesh: Mesh, begun: Begun, built: Built
) -> tuple[Progress, Outputs]:
    """Open the outputs, which ``stack`` closes, and say what runs. Returns the progress of this start. Collective."""
    config, length = built.checkpointing.config, begun.length
    progress = begun.progress
    start = replace(agree_on_start(config, launch, progress), lease=lease.holder.owner)
    halt = (f"the run stops after iteration {length.halt[0]}: {length.halt[1]}",) if length.halt else ()
    notes = (*progress.notes, *built.notes, *halt)
    progress = replace(progress, run_id=start.run_id, notes=notes)
    guard, peak = partial(lease.check, config.logging.log_dir), peak_tflops(config, mesh.device)
    first, predicted = mesh.rank == 0, built.forecast.facts(mesh.device) if built.forecast else {}
    about = {**surroundings(mesh), "predicted": predicted}
    outputs = open_outputs(
        config, progress, start, length.last_iteration, stack, guard, first=first, peak=peak, about=about
    )
    forecast = built.forecast.lines() if built.forecast else ()
    report_start(config, mesh, built.decoder, progress, outputs, forecast)
    return progress, outputs


def _own_callbacks(config: RunConfig, launch: Launch, built: Built) -> Iterator[Callback]:
    """Yield the trainer's own callbacks that follow the outputs, but for ``Exits``."""
    engine = built.engine
    yield StragglerWatch(Stragglers.of(engine.mesh, launch.host))
    yield RoundingWatch(engine.policy.codecs)
    yield Profiler(config, built.decoder, engine, built.pipeline, built.bill)
    for part in (engine.part(ExpertBalance), engine.part(QKClip)):
        if part is not None:
            yield PartReport(part)
    if config.model.mtp_num_layers:
        yield FurtherReport()
    if built.forecast:
        yield Prediction(built.forecast)
    if config.training.tasks:
        scorer = Scorer(config, engine.mesh, built.decoder, engine, built.pipeline)
        yield TasksReport(scorer, run_tokenizer(config), config.training)


def prepare(
    config: RunConfig,
    launch: Launch,
    stack: ExitStack,
    signals: StopSignals | None = None,
    supervisor: Supervisor | None = None,
    beginning: Beginning | None = None,
) -> Trainer:
    """Make all that a run needs, in the order in which mistakes are cheapest to find. Collective.

    stack: closes what is opened here. supervisor: knows when the process began, and learns how far the preparation
    is. beginning: as of ``main``. Raises NotStarted.
    """
    supervisor = supervisor or Supervisor(config, launch)
    joined = _join(config, launch, supervisor, beginning)
    begun = _begin(joined)
    built = _build(joined, begun, supervisor.lease)
    progress, outputs = _announce(launch, stack, supervisor.lease, joined.mesh, begun, built)
    config, length = joined.config, begun.length
    learning_rates = {apart: LearningRate.of(config, decoupled=apart) for apart in (False, True)}
    conditions = ExitConditions.of(config.training, signals, length.halt, supervisor.began)
    exits = Exits(conditions, any_time=bool(begun.users))
    if signals is not None:
        signals.hold()
    own = (outputs, exits, *_own_callbacks(config, launch, built))
    replicas = None
    if config.outer.outer_meet:
        stand = Standings.of(progress)
        replicas = Membership(config, built.engine, launch, stand, length.batch_sizes.batch_size)
    return Trainer(
        decoder=built.decoder,
        engine=built.engine,
        pipeline=built.pipeline,
        data=begun.data,
        length=length,
        learning_rates=learning_rates,
        progress=progress,
        checkpointing=built.checkpointing,
        outputs=outputs,
        exits=exits,
        bill=built.bill,
        callbacks=Callbacks(own, begun.users),
        replicas=replicas,
    )
