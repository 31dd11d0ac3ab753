"""Pipelines whose stages sleep instead of compute: the real executor, messages and ranks, and times that are known.

A stage's time then does not depend on how many ranks share a core, so a measured timeline can be compared with its
schedule's theory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from megazero.comm.hops import Traffic
from megazero.comm.timing import Waits
from megazero.mesh.mesh import Mesh, create_mesh
from megazero.pp.executor import Pipeline
from megazero.pp.links import Links
from megazero.pp.partition import StageSpec, partition
from megazero.pp.timeline import Span, Times

SHAPE = (4, 4)  # of a message, fp32


@dataclass
class Activations:
    """How many forwards are held, now and at most: their backward, both halves, has not ended."""

    now: int = 0
    peak: int = 0

    def take(self) -> int:
        """Return the most since the last take."""
        peak, self.peak = self.peak, self.now
        return peak


class Held:
    """Stands for what a forward keeps for its backward; counted for as long as somebody refers to it."""

    def __init__(self, activations: Activations) -> None:
        self.activations = activations
        activations.now += 1
        activations.peak = max(activations.peak, activations.now)

    def __del__(self) -> None:
        self.activations.now -= 1


@dataclass
class SleepingWeights:
    """Stands for tp.DeferredGradients: W of a key sleeps."""

    seconds: float
    owed: dict[Any, Held] = field(default_factory=dict)
    key: Any = None

    @contextmanager
    def recording(self, key: Any) -> Iterator[None]:
        self.key = key
        try:
            yield
        finally:
            self.key = None

    def compute(self, key: Any) -> Iterable[tuple[Any, Tensor]]:
        time.sleep(self.seconds)
        del self.owed[key]
        return ()

    def discard(self) -> None:
        self.owed.clear()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepingStage) -> Tensor:
        ctx.stage, ctx.held = stage, Held(stage.activations)
        time.sleep(stage.times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        times, deferred = ctx.stage.times, ctx.stage.deferred
        time.sleep(times.backward_input)
        if deferred.key is None:
            time.sleep(times.backward_weight)
        else:
            deferred.owed[deferred.key] = ctx.held
        return grad, None


@dataclass
class SleepingStage:
    """Forward of any stage, for the executor. times: of one virtual stage, in seconds."""

    times: Times
    deferred: SleepingWeights
    activations: Activations = field(default_factory=Activations)

    def __call__(self, stage: StageSpec, x: Tensor | None, micro_batch: Any) -> Tensor:
        y = _Sleep.apply(torch.zeros(SHAPE, requires_grad=True) if x is None else x, self)
        return y.sum() if stage.head else y


class NoEngine:
    """There are no parameters."""

    def segment(self, kind: str, part: int, micro_batch: int) -> nullcontext[None]:
        return nullcontext()

    def weight_gradients(self, part: int, micro_batch: int, pairs: Iterable[tuple[Any, Tensor]]) -> None:
        for _ in pairs:
            pass

    def poll(self) -> None:
        pass


class Whole:
    """Messages are the activations as they are."""

    def fit(self, micro_batch: None) -> tuple[int, ...]:
        return SHAPE

    def pack(self, x: Tensor) -> Tensor:
        return x

    def unpack(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Case:
    """times: of a rank's whole work on a micro-batch; ``virtual`` stages share it."""

    schedule: str
    pp: int
    virtual: int
    micro_batches: int
    times: Times

    @property
    def of_stage(self) -> Times:
        t, v = self.times, self.virtual
        return Times(t.forward / v, t.backward_input / v, t.backward_weight / v)


def sleeping_pipeline(case: Case, mesh: Mesh) -> tuple[Pipeline, SleepingStage]:
    """Return this rank's part of the case, and its stage."""
    deferred = SleepingWeights(case.of_stage.backward_weight)
    stage, engine = SleepingStage(case.of_stage, deferred), NoEngine()
    links = Links(mesh, torch.float32, Traffic(), engine.poll, Waits())
    stages = partition(case.pp * case.virtual, case.pp, case.virtual)
    return Pipeline(stages, case.schedule, stage, engine, links, Whole(), deferred), stage


@dataclass(frozen=True)
class Run:
    """One step. spans: of all ranks. held: by rank, the most forwards held at a time."""

    spans: tuple[Span, ...]
    held: tuple[int, ...]


def one_step(case: Case, pipeline: Pipeline, stage: SleepingStage) -> Run:
    pipeline.spans = []
    stage.activations.take()
    dist.barrier()
    pipeline.step([None] * case.micro_batches)
    every: list[Any] = [None] * case.pp
    dist.all_gather_object(every, (pipeline.spans, stage.activations.take()))
    return Run(tuple(span for spans, _ in every for span in spans), tuple(held for _, held in every))


def take_turns(cases: list[Case], rounds: int) -> list[list[Run]]:
    """Return the runs of each case, on a rank. The cases have one pp, and each its own schedule."""
    mesh = create_mesh(pp=cases[0].pp)
    turns = {case.schedule: partial(one_step, case, *sleeping_pipeline(case, mesh)) for case in cases}
    return list(harness.take_turns(turns, rounds).values())
