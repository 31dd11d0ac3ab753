"""What the ranks of a verification run: training steps on made-up tokens, watched."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from megazero import zero
from megazero.cli import faults
from megazero.cli.watch import Rounded, Step, UnitSlice, Watch, slices
from megazero.comm.traffic import Traffic
from megazero.config import RunConfig, World
from megazero.mesh.mesh import Mesh
from megazero.train.batch_size import BatchSchedule
from megazero.train.checkpointing import Checkpointing
from megazero.train.origin import Progress, find_origin
from megazero.train.parallelize import (
    DTYPES,
    MicroBatch,
    build_decoder,
    build_pipeline,
    make_mesh,
    make_policy,
    shard_decoder,
)

LEAST_BLOCK = 8  # elements that slices are whole multiples of: small, so that they cut parameters


@dataclass(frozen=True)
class Task:
    """Steps [start, stop) of one run.

    exact: identity codecs. save: after which step, and the folder. load: folder to begin from.
    fault: name of a seeded one (faults.py).
    """

    config: RunConfig
    exact: bool
    start: int
    stop: int
    save: tuple[int, str] | None = None
    load: str | None = None
    fault: str | None = None


@dataclass
class Outcome:
    """What one rank says of a task. stages: the pipeline stages it holds."""

    tp: int
    dp: int
    pp: int
    last: bool
    stages: tuple[int, ...]
    steps: list[Step] = field(default_factory=list)
    final: list[UnitSlice] = field(default_factory=list)
    rounded: dict[tuple[str, str], Rounded] = field(default_factory=dict)
    fault_applied: bool = False


def run_tasks(tasks: Sequence[Task], world: World) -> list[Outcome]:
    """The tasks one after the other, on one mesh. Collective; also without torch.distributed, on one rank."""
    mesh = make_mesh(tasks[0].config, world, torch.device("cpu"))
    outcomes = []
    for task in tasks:
        outcomes.append(_run(task, mesh))
        mesh.release()
    return outcomes


def schedule(config: RunConfig, data_parallel: int) -> BatchSchedule:
    """The batch size over the samples consumed, as the trainer makes it."""
    batch = config.batch
    assert batch.global_batch_size and batch.micro_batch_size
    if batch.rampup_batch_size is None:
        return BatchSchedule.constant(batch.global_batch_size, batch.micro_batch_size, data_parallel)
    start, increment, samples = batch.rampup_batch_size
    return BatchSchedule(
        start, increment, samples, batch.global_batch_size, batch.micro_batch_size, data_parallel
    )


def tokens_of(config: RunConfig, step: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels int64 and loss mask fp64 [count, s] of a step's global batch: a fifth do not count."""
    length, vocabulary = config.model.seq_length, config.model.vocab_size
    assert length and vocabulary
    generator = torch.Generator().manual_seed(config.training.seed * 1000 + step)
    ids = torch.randint(0, vocabulary, (count, length + 1), generator=generator)
    mask = (torch.rand(count, length, generator=generator) > 0.2).double()
    return ids[:, :-1], ids[:, 1:], mask


def _run(task: Task, mesh: Mesh) -> Outcome:
    config = task.config
    decoder = build_decoder(config, mesh, Traffic())
    policy = make_policy(config, mesh)
    codings = config.wire(World(mesh.world_size, mesh.grid.ranks_per_node)).codings
    policy = replace(policy, block=max([LEAST_BLOCK, *(coding.block for coding in codings)]))
    if task.exact:
        policy = replace(policy, codecs=zero.Codecs())
    engine = shard_decoder(decoder, config, mesh, policy=policy)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    decoder.train()
    checkpoint = replace(config.checkpoint, save=task.save and task.save[1], load=task.load)
    stored = replace(config, checkpoint=checkpoint)
    checkpointing = Checkpointing(stored, mesh, engine, decoder.placements(), "")
    origin = find_origin(stored, mesh)
    checkpointing.load(origin)
    assert origin.progress.iteration == task.start, (origin.progress, task)
    sizes = schedule(config, mesh.dp_size)
    consumed = sizes.consumed_after(task.start)
    stages = tuple(stage.index for stage in pipeline.own)
    outcome = Outcome(mesh.tp.index, mesh.dp_rank, mesh.pp.index, pipeline.loss_rank == pipeline.rank, stages)
    with faults.applied(task.fault, engine, pipeline, mesh, config) as outcome.fault_applied:
        watch = Watch(decoder, engine, pipeline)
        for step in range(task.start, task.stop):
            size = sizes.batch_size(consumed)
            batches, divisor = _micro_batches(config, mesh, step, size)
            end = config.quantized_gradients_end
            engine.exact_gradients = end is not None and step >= end
            watch.open(batches)
            engine.begin_step(len(batches), divisor, pipeline.program(len(batches)))
            loss = pipeline.step(batches).item()
            outcome.steps.append(watch.close(loss / divisor, engine.step().grad_norm))
            consumed += size
            if task.save and task.save[0] == step:
                checkpointing.save(Progress(step + 1, consumed, "verify"))
                engine.traffic.take()  # of no step
    outcome.final, outcome.rounded = slices(engine, lambda unit: unit.master), watch.rounded
    return outcome


def _micro_batches(config: RunConfig, mesh: Mesh, step: int, size: int) -> tuple[list[MicroBatch], float]:
    """This rank's micro-batches, dealt as the sampler deals them, and the tokens of the whole batch that count."""
    tokens, labels, mask = tokens_of(config, step, size)
    micro, dtype = config.batch.micro_batch_size or 1, DTYPES[config.precision.params_dtype]
    dropout = max(config.model.attention_dropout, config.model.hidden_dropout) > 0
    batches = []
    for first in range(mesh.dp_rank * micro, size, micro * mesh.dp_size):
        rows = slice(first, first + micro)
        key = _dropout_key(config.training.seed, step, first) if dropout else None
        batches.append(MicroBatch(tokens[rows], labels[rows], mask[rows].to(dtype), key))
    return batches, float(mask.sum())


def _dropout_key(seed: int, step: int, sample: int) -> int:
    text = f"{seed}/{step}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def fresh_folder(parent: str, name: str) -> str:
    path = Path(parent) / name
    path.mkdir()
    return str(path)
