"""The ranks' part of a verification: recorded training steps on made-up tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megazero import zero
from megazero.comm.hops import Traffic
from megazero.config import RunConfig, World
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.data.gpt import document_fields
from megazero.data.sampler import micro_batch_ids
from megazero.mesh.mesh import Mesh
from megazero.pp.executor import Pipeline
from megazero.train.data.feeding import own_tokens
from megazero.train.distributed import make_mesh
from megazero.train.parallelize import (
    DTYPES,
    MicroBatch,
    build_decoder,
    build_pipeline,
    dropout_key,
    make_policy,
    shard_decoder,
)
from megazero.train.schedule.loss_scaling import LossScaling
from megazero.train.state.checkpointing import Checkpointing
from megazero.train.state.origin import find_origin
from megazero.train.state.progress import Progress
from megazero.verify.recorder import Recorder, RoundingRecord, StepRecord, UnitSlice, slices

# Of an engine, its pipeline and their configuration: what the steps of a run happen in.
Around = Callable[[zero.Engine, Pipeline, RunConfig], AbstractContextManager[object]]


def nothing_around(
    engine: zero.Engine, pipeline: Pipeline, config: RunConfig
) -> AbstractContextManager[object]:
    """Leave the run as it is."""
    return nullcontext()


@dataclass(frozen=True)
class TrainingRun:
    """The steps [start, stop) of one run.

    exact: the codecs are identities. save: the step after which the run saves, and the folder. load: the folder to
    begin from. around: a picklable function in which a test breaks a part of the engine, to see that the certificate
    finds it.
    """

    config: RunConfig
    exact: bool
    start: int
    stop: int
    save: tuple[int, str] | None = None
    load: str | None = None
    around: Around = nothing_around


@dataclass
class RankRecord:
    """One rank's results of a run.

    ``last`` is true if it has the last pipeline stage, and so the losses. ``place``: as in ``full_tensors.Piece``.
    """

    tp: int
    dp: int
    pp: int
    last: bool
    place: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    final: list[UnitSlice] = field(default_factory=list)
    rounded: dict[tuple[str, str], RoundingRecord] = field(default_factory=dict)


def run_all(runs: Sequence[TrainingRun], world: World) -> list[RankRecord]:
    """Do the runs one after the other, on one mesh.

    This is collective, and also works on one rank without torch.distributed.
    """
    mesh = make_mesh(runs[0].config, world, torch.device("cpu"))
    records = []
    for run in runs:
        records.append(_train(run, mesh))
        mesh.release()
    return records


def slice_block(config: RunConfig, world: World) -> int:
    """Return the number of elements that slices are whole multiples of.

    It is small, so that slices cut parameters, but it is whole blocks of messages.
    """
    return max([8, *(coding.block for coding in config.wire(world).codings)])


def tokens_of(config: RunConfig, step: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens (int64), labels (int64) and the loss mask (fp64), each [count, s], of a step's global batch.

    A fifth of the tokens is masked.
    """
    length, vocabulary = config.model.seq_length, config.model.vocabulary
    generator = torch.Generator().manual_seed(config.training.seed * 1000 + step)
    ids = torch.randint(0, vocabulary, (count, length + 1), generator=generator)
    mask = (torch.rand(count, length, generator=generator) > 0.2).double()
    return ids[:, :-1], ids[:, 1:], mask


def documents_of(config: RunConfig, tokens: torch.Tensor) -> dict[str, Any]:
    """Return the document fields of a MicroBatch that has these tokens (int64 [count, s]).

    Every fourth token of the vocabulary ends a document.
    """
    data, ends = config.data, (tokens % 4 == 0).numpy()
    fields = document_fields(
        ends, reset_position_ids=data.reset_position_ids, reset_attention_mask=data.reset_attention_mask
    )
    return {name: torch.from_numpy(values) for name, values in fields.items()}


def _train(run: TrainingRun, mesh: Mesh) -> RankRecord:
    config = run.config
    decoder = build_decoder(config, mesh, Traffic(mesh.links))
    policy = make_policy(config, mesh)
    policy = replace(policy, block=slice_block(config, World(mesh.world_size, mesh.grid.ranks_per_node)))
    if run.exact:
        policy = replace(policy, codecs=zero.Codecs())
    engine = shard_decoder(decoder, config, mesh, policy=policy)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    decoder.train()
    checkpoint = replace(config.checkpoint, save=run.save and run.save[1], load=run.load)
    stored = replace(config, checkpoint=checkpoint)
    checkpointing = Checkpointing(stored, engine, decoder.placements())
    origin = find_origin(stored, mesh)
    checkpointing.load(origin)
    assert origin.progress.iteration == run.start, (origin.progress, run)
    sizes, scaling = BatchSizes.of(config, mesh.batch_ranks), LossScaling.of(config.precision)
    consumed = sizes.consumed_after(run.start)
    last = pipeline.loss_rank == pipeline.rank
    place = mesh.rank % max(mesh.tp.size, mesh.grid.ep)
    record = RankRecord(mesh.tp.index, mesh.dp_rank, mesh.pp.index, last, place)
    with run.around(engine, pipeline, config):
        recorder = Recorder(decoder, engine, pipeline)
        for step in range(run.start, run.stop):
            size = sizes.batch_size(consumed)
            batches, divisor = _micro_batches(config, mesh, step, size)
            recorder.open(batches)
            factor, scaled_divisor = scaling.factors(divisor, mesh.dp_size)
            engine.begin_step(len(batches), scaled_divisor, pipeline.program(len(batches)))
            loss = pipeline.step(batches, factor).item()
            norm, saves = engine.step().grad_norm, run.save is not None and run.save[0] == step
            record.steps.append(recorder.close(loss / divisor, norm))
            consumed += size
            if saves:
                checkpointing.save(Progress(step + 1, consumed, "verify"))
                engine.traffic.take()  # of no step
    record.final, record.rounded = slices(engine, lambda unit: unit.master.value), recorder.rounded
    return record


def _micro_batches(config: RunConfig, mesh: Mesh, step: int, size: int) -> tuple[list[MicroBatch], float]:
    """Return this rank's micro-batches and how many tokens of the batch count.

    The micro-batches are dealt as the sampler deals them, and cut for context-parallel ranks.
    """
    tokens, labels, mask = tokens_of(config, step, size)
    micro, dtype = config.batch.micro_batch_size, DTYPES[config.precision.params_dtype]
    batches = []
    for begin in range(0, size, micro * mesh.batch_ranks):
        ids = micro_batch_ids(begin, micro, mesh.batch_rank, mesh.batch_ranks)
        rows, key = slice(ids.start, ids.stop), dropout_key(config, step, ids.start)
        fields = {"tokens": tokens[rows], "labels": labels[rows], "loss_mask": mask[rows].to(dtype)}
        fields |= documents_of(config, tokens[rows])
        own = own_tokens(fields, mesh, config.model.mtp_num_layers)
        batches.append(MicroBatch(**own, dropout_key=key, decisions={}))
    return batches, float(mask.sum())
