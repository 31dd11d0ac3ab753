"""The mean loss over the batches of an evaluation, of a run or of a checkpoint alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

from megazero.comm.hops import Traffic
from megazero.config import RunConfig, World, begun
from megazero.data.source import SampleSource
from megazero.log.metrics import perplexity
from megazero.mesh.launch import Launch
from megazero.mesh.waiting import waiting
from megazero.pp.executor import Pipeline
from megazero.train.data.datasets import evaluation_sets, run_tokenizer, tokenizer_info, with_vocabulary
from megazero.train.data.feeding import Feeding, own_tokens
from megazero.train.distributed import find_world, make_mesh, start_rank
from megazero.train.parallelize import MicroBatch, build_decoder, build_pipeline, shard_decoder
from megazero.train.state.checkpointing import Checkpointing
from megazero.train.state.origin import find_origin
from megazero.train.tasks import Scorer, evaluate_tasks
from megazero.zero import Engine


def mean_loss(
    engine: Engine,
    pipeline: Pipeline,
    feeding: Feeding,
    source: SampleSource,
    *,
    steps: int,
    micro_batches: int,
    interrupted: Callable[[], bool],
    anchor: bool = True,
    advance: Callable[[int, int], None] = lambda done, steps: None,
) -> float | None:
    """Return the loss over the first ``steps`` global batches of so many micro-batches on each rank. Collective.

    The batches are the first of ``source`` each time, so there is no sampling noise. interrupted: asked between two
    batches on every rank, with the same answer on all. If it says yes, the loss is None. anchor: of the weights
    that replicas share, where outer steps are taken. advance: told before each batch how many of how many are done.
    """
    mesh = feeding.mesh
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    left = 0
    source.load_state(0)
    with feeding.batches(source) as batches, engine.evaluation(anchor):
        for left in reversed(range(steps)):
            advance(steps - left - 1, steps)
            own = batches.next_step(micro_batches)
            step = [MicroBatch(**own_tokens(feeding.to_device(batch), mesh)) for batch in own]
            losses = pipeline.evaluate(step)
            if losses is not None:
                sums[0] += losses.sum()
            sums[1] += sum(batch.loss_mask.sum(dtype=torch.float64) for batch in step)
            if left and interrupted():
                break
    with waiting:  # on CUDA the host waits where it reads
        loss, tokens = mesh.stage_rows(mesh.gather_rows(sums), pipeline.loss_rank).sum(0).tolist()
    engine.traffic.take()  # of no iteration
    return loss / max(tokens, 1.0) if left == 0 else None


def evaluate_checkpoint(config: RunConfig, launch: Launch) -> list[str]:
    """Return a line for each data set and each metric of a task (train/evaluate_command.py). Collective.

    Raises ValueError, OSError or RankFailure: what a run with these flags would raise at its start.
    """
    timeout = timedelta(minutes=config.training.distributed_timeout_minutes)
    device, _ = start_rank(config.training, launch, timeout)
    config = begun(config, World(launch.world_size, launch.local_world_size or 0))
    tokenizer = tokenizer_info(config)
    config, world = find_world(with_vocabulary(config, tokenizer), launch)
    mesh = make_mesh(config, world, device, timeout)
    origin = find_origin(config, mesh)
    state = origin.saved.state if origin.saved else {}
    batch = config.batch.evaluated_per_step(mesh.batch_ranks)
    sources = evaluation_sets(config, tokenizer, batch, state.get("ordered_for", {}))
    decoder = build_decoder(config, mesh, Traffic(mesh.links))
    engine = shard_decoder(decoder, config, mesh)
    pipeline = build_pipeline(decoder, engine, config, mesh)
    Checkpointing(config, engine, decoder.placements()).load(origin)
    decoder.eval()
    feeding = Feeding(mesh, config.batch.micro_batch_size, pipeline.loss_rank, config.data.masks_loss)
    lines = [f"weights of {origin.saved.path if origin.saved else config.checkpoint.load}"]
    for split, source in sources.items():
        steps = int(min(config.training.eval_iters * batch, source.samples)) // batch
        loss = mean_loss(
            engine,
            pipeline,
            feeding,
            source,
            steps=steps,
            micro_batches=batch // (config.batch.micro_batch_size * mesh.batch_ranks),
            interrupted=lambda: False,
        )
        assert loss is not None  # nobody interrupts
        tokens = steps * batch * config.model.seq_length
        lines.append(f"{split} | loss {loss:.6f} | perplexity {perplexity(loss):.4g} | {tokens:,} tokens")
    if tasks := config.training.tasks:
        scorer = Scorer(config, mesh, decoder, engine, pipeline)
        found = evaluate_tasks(scorer, run_tokenizer(config), tasks, config.training.eval_tasks_limit)
        lines += [f"{name} | {value:.6f}" for name, value in (found or {}).items()]
    return lines
