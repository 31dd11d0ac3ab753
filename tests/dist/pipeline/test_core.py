"""Pipelines: connections before messages, steps that broke off, whom errors blame, what waits for the loss."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.pipeline.sleeping import Case, sleeping_pipeline
from megazero import zero
from megazero.comm.lane import CommunicationError
from megazero.config import World, make_config
from megazero.mesh.mesh import create_mesh
from megazero.pp.schedules import make_evaluation, make_schedule, sends
from megazero.pp.timeline import Times
from megazero.train import parallelize
from megazero.train.distributed import make_mesh
from megazero.zero.engine import Engine
from megazero.zero.scalars import StepScalars
from tests.dist.pool import run_ranks
from tests.dist.quantised.cases import Q8
from tests.dist.runs import train
from tests.pipeline_walk import depends
from tests.sizes import TINY

SHORT = Times(1e-3, 1e-3, 1e-3)


def posts_of_a_run(case: Case, evaluates: bool) -> tuple[int, int]:
    """Of a step's or an evaluation's receives on this rank: how many were posted too early, and how many in all."""
    pipeline, _ = sleeping_pipeline(case, create_mesh(pp=case.pp))
    done, posted, run, forward, post = [], [], pipeline._run, pipeline.forward, dist.irecv
    pipeline._run = lambda *arguments: (run(*arguments), done.append(True))[0]

    def irecv(tensor, peer, group=None):
        posted.append((peer, len(done)))
        return post(tensor, peer, group=group)

    def forwards(*arguments):
        y = forward(*arguments)
        if evaluates:
            done.append(True)  # its message is not sent yet
        return y

    pipeline.forward, dist.irecv = forwards, irecv
    try:
        batches = [None] * case.micro_batches
        with torch.set_grad_enabled(not evaluates):
            (pipeline.evaluate if evaluates else pipeline.step)(batches)
    finally:
        dist.irecv = post
    size = case.pp, case.virtual, case.micro_batches
    schedule = make_evaluation(*size) if evaluates else make_schedule(case.schedule, *size)
    needed, coming = depends(schedule, case.pp), sends(schedule, case.pp)
    queues = {source: iter(m) for (source, target), m in coming.items() if target == pipeline.rank}
    return sum(issued < needed[next(queues[peer])] for peer, issued in posted), len(posted)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("schedule, virtual", [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("gpipe", 1)])
def test_a_receive_is_posted_when_the_own_actions_that_it_depends_on_are_issued(schedule, virtual, evaluates):
    """On NCCL it occupies the device until the message comes, and those actions may wait for the whole device."""
    counts = run_ranks(3, posts_of_a_run, Case(schedule, 3, virtual, 6, SHORT), evaluates)
    kinds = 1 if evaluates else 2
    assert [early for early, _ in counts] == [0] * 3
    assert sum(posts for _, posts in counts) == kinds * 6 * (3 * virtual - 1)


def going_on(evaluates: bool) -> str:
    """A rank on which a step or an evaluation breaks off after its last message tries another."""
    pipeline, _ = sleeping_pipeline(Case("1f1b", 2, 1, 1, SHORT), create_mesh(pp=2))
    run = torch.no_grad()(pipeline.evaluate) if evaluates else pipeline.step
    good, broken = pipeline.engine.segment, pipeline.forward

    def segment(kind, part, micro_batch):
        if kind == "B" and pipeline.rank == 0:
            raise KeyError("broken off")
        return good(kind, part, micro_batch)

    def forward(stage, x, micro_batch):
        if evaluates and stage.head:
            raise KeyError("broken off")
        return broken(stage, x, micro_batch)

    pipeline.engine.segment, pipeline.forward = segment, forward
    try:
        run([None])
    except KeyError:
        pipeline.engine.segment, pipeline.forward = good, broken
        with pytest.raises(RuntimeError) as caught:
            run([None])
        return str(caught.value)
    return "done"


@pytest.mark.parametrize("evaluates", [False, True])
def test_no_step_follows_one_that_was_broken_off(evaluates):
    said = run_ranks(2, going_on, evaluates)
    assert said.pop(1 if evaluates else 0).endswith("start the ranks anew") and said == ["done"]


def blamed() -> str:
    """Rank 1 waits for rank 0, whose stage takes a while; meanwhile a gather of its own fails."""
    pipeline, _ = sleeping_pipeline(Case("1f1b", 2, 1, 1, SHORT), create_mesh(pp=2))
    forward = pipeline.forward

    def slow(*arguments):
        time.sleep(0.3)
        return forward(*arguments)

    def poll():
        raise CommunicationError("gather of unit 'layers.3' failed")

    if pipeline.rank == 0:
        pipeline.forward = slow
    else:
        pipeline.links.poll = poll
    try:
        with torch.no_grad():
            pipeline.evaluate([None])
    except CommunicationError as error:
        return str(error)
    return "nothing"


def test_a_gather_that_fails_during_a_wait_is_not_blamed_on_the_stage_before():
    first, second = run_ranks(2, blamed)
    assert first == "nothing"
    assert second == (
        "rank 1, pipeline rank 1 of 2, F(stage 1, micro-batch 0): gather of unit 'layers.3' failed"
    )


def sharded(exact_numel: int) -> str:
    """The middle stage of three has layers only, whose largest parameter has 48 x 32 elements."""
    values = {**TINY, "num_layers": 3, "pipeline_model_parallel_size": 3}
    world = World(3, 3)
    config = make_config(values, world)
    mesh = make_mesh(config, world, torch.device("cpu"))
    policy = zero.Policy(codecs=zero.Codecs(weights=Q8), exact_numel=exact_numel)
    try:
        parallelize.shard_decoder(parallelize.build_decoder(config, mesh), config, mesh, policy=policy)
    except ValueError as error:
        return str(error)
    return "made"


def test_a_threshold_above_one_stages_parameters_is_legal_and_above_all_is_refused_by_all():
    assert run_ranks(3, sharded, 1600) == ["made"] * 3  # the embedding has 52 x 32
    refused = run_ranks(3, sharded, 1664)
    assert len(set(refused)) == 1 and "the largest has 1664" in refused[0]


def in_flight(log_dir: str) -> list[int]:
    """Reductions on their way whenever the ranks exchange their losses."""
    found, step, exchange = [], Engine.step, StepScalars.exchange
    engines = []

    def stepped(self):
        engines[:] = [self]
        return step(self)

    def watched(self, traffic):
        found.append(len(engines[0].reductions.tickets))
        exchange(self, traffic)

    Engine.step, StepScalars.exchange = stepped, watched
    try:
        options = {"pipeline_model_parallel_size": 2, "zero_preset": "zero2", "ranks_per_node": 1}
        train({**options, "log_dir": log_dir})
    finally:
        Engine.step, StepScalars.exchange = step, exchange
    return found


def test_no_reduction_stands_still_while_ranks_wait_for_losses(tmp_path):
    for found in run_ranks(4, in_flight, str(tmp_path)):
        assert found == [0] * TINY["train_iters"]
