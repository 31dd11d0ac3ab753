"""The one executor of pipeline schedules: it runs F, B, I and W of this rank's stages, and their messages.

There are three reasons not to use torch.distributed.pipelining's runtime (measured: docs/results/pipeline.md). The
W of its split backward walks the graph again for every group of parameters, which computes a recomputed Llama layer
nine more times, and it assigns gradients past the engine's hooks. Its schedules are made for one number of
micro-batches, while ours follow a ramp-up. Its failures name no action.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.comm.lane import CommunicationError
from megazero.comm.timing import Label, no_label
from megazero.pp.links import Links
from megazero.pp.partition import StageSpec
from megazero.pp.schedules import Action, Kind, Message, make_evaluation, make_schedule, sends
from megazero.pp.timeline import Span, post_after

# (stage, what the stage before returned or None, micro-batch) -> activations, or the summed loss of the last stage
StageForward = Callable[[StageSpec, Tensor | None, Any], Tensor]


class ShardedParameters(Protocol):
    """The executor's view of the ZeRO engine: it reports which stage computes, and passes deferred gradients."""

    def segment(self, kind: str, part: int, micro_batch: int) -> AbstractContextManager[None]: ...
    def weight_gradients(self, part: int, micro_batch: int, pairs: Iterable[tuple[Any, Tensor]]) -> None: ...
    def poll(self) -> bool: ...


class WeightGradients(Protocol):
    """Defers the gradients of weights and computes them later (tp.DeferredGradients)."""

    def recording(self, key: Any) -> AbstractContextManager[None]: ...
    def compute(self, key: Any) -> Iterable[tuple[Any, Tensor]]: ...
    def discard(self) -> None: ...


class ActivationSlice(Protocol):
    """Which part of an activation travels between stages, and how the whole is reassembled.

    ``fit`` takes the size of a step's activations from a micro-batch, and returns the shape of their messages.
    """

    def fit(self, micro_batch: Any) -> Sequence[int]: ...
    def pack(self, x: Tensor) -> Tensor: ...
    def unpack(self, x: Tensor) -> Tensor: ...


class _Plan(NamedTuple):
    actions: tuple[Action, ...]
    incoming: Mapping[int, tuple[Message, ...]]
    after: Mapping[Message, int]


class Pipeline:
    """This rank's part of one pipeline.

    ``stages`` are all virtual stages. ``schedule`` is a name of schedules.py. A pipeline of one stage is a plain
    loop. It is collective over the pipeline. A pipeline of several stages takes no other step after a step or an
    evaluation that raised.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        schedule: str,
        forward: StageForward,
        engine: ShardedParameters,
        links: Links,
        carrier: ActivationSlice,
        deferred: WeightGradients | None = None,
    ) -> None:
        self.stages, self.schedule, self.forward = stages, schedule, forward
        self.engine, self.links, self.carrier, self.deferred = engine, links, carrier, deferred
        self.mesh = links.mesh
        self.rank, self.size = self.mesh.pp.index, self.mesh.pp.size
        self.own = [stage for stage in stages if stage.rank == self.rank]
        self.saved: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = {}
        self.loss_factor = 1.0  # of the step
        self.spans: list[Span] | None = None  # a list records what every action took
        self.label: Label = no_label  # a profiler's, while it records
        self.plan = lru_cache(maxsize=8)(self._plan)
        links.connect((a.rank, b.rank) for a, b in pairwise(stages))

    @property
    def loss_rank(self) -> int:
        """The pipeline rank that computes the loss."""
        return self.stages[-1].rank

    def program(self, micro_batches: int) -> list[tuple[str, int]]:
        """Return kind and part of every action of this rank, for ``engine.begin_step``."""
        return [(a.kind.value, self._part(a)) for a in self.plan(micro_batches).actions]

    def step(self, micro_batches: Sequence[Any], loss_factor: float = 1.0) -> Tensor:
        """Run a step's forwards and backwards. Returns this rank's summed loss, fp64 (0 without the last stage).

        loss_factor: Backwards multiply the loss by it (a loss scale). The loss that is returned is without it.
        """
        self.loss_factor = loss_factor
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for loss in self._run_plan(self.plan(len(micro_batches)), self._run, micro_batches):
            total += loss
        return total

    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor | None:
        """Run forwards only. Returns what the last stage makes of the micro-batches, losses [k] say, in fp64; None on
        ranks without it."""
        plan = self._of_rank(make_evaluation(self.size, len(self.own), len(micro_batches)))
        losses = self._run_plan(plan, self._evaluate, micro_batches)
        return torch.stack(losses).double() if losses else None

    # -- actions ---------------------------------------------------------------------------------

    def _run_plan(
        self, plan: _Plan, run: Callable[[Action, Any], Tensor | None], micro_batches: Sequence[Any]
    ) -> list[Tensor]:
        """Run every action and its messages. Returns the losses that ``run`` gives."""
        losses: list[Tensor] = []
        self.links.open(self.carrier.fit(micro_batches[0]), plan.incoming, plan.after)
        try:
            for action in plan.actions:
                with self._naming(action):
                    loss = run(action, micro_batches[action.micro_batch])
                    self.links.advance()
                if loss is not None:
                    losses.append(loss)
            self.links.close()
        except BaseException:
            self._abort()
            raise
        return losses

    def _evaluate(self, action: Action, micro_batch: Any) -> Tensor | None:
        """Run a forward of an evaluation. Returns the loss if it is the last stage's, else None."""
        stage = self.stages[action.stage]
        y = self.forward(stage, self._receive_activation(action), micro_batch)
        if stage.head:
            return y
        self._send("activation", action, y, action.stage + 1)
        return None

    def _run(self, action: Action, micro_batch: Any) -> Tensor | None:
        """Run one action. Returns the detached loss if it is a last stage's forward, else None."""
        if action.kind == Kind.FORWARD:
            return self._forward(action, micro_batch)
        if action.kind == Kind.WEIGHT:
            assert self.deferred is not None
            with self._measured(action):
                pairs = self.deferred.compute((action.stage, action.micro_batch))
                self.engine.weight_gradients(self._part(action), action.micro_batch, pairs)
        else:
            self._backward(action)
        return None

    def _forward(self, action: Action, micro_batch: Any) -> Tensor | None:
        stage = self.stages[action.stage]
        x = self._receive_activation(action)
        if x is not None:
            x.requires_grad_()
        with self._measured(action), self._segment(action):
            y = self.forward(stage, x, micro_batch)
        key = action.stage, action.micro_batch
        if stage.head:
            self.saved[key] = x, y
            return y.detach()
        # The backward needs the edge into the graph, not the values: they go when they are sent.
        self.saved[key] = x, get_gradient_edge(y)
        self._send("activation", action, y.detach(), action.stage + 1)
        return None

    def _backward(self, action: Action) -> None:
        x, root = self.saved.pop((action.stage, action.micro_batch))
        grad = None
        if self.stages[action.stage].head:
            if self.loss_factor != 1.0:
                assert isinstance(root, Tensor)
                grad = torch.full_like(root, self.loss_factor)
        else:
            grad = self._receive("gradient", action, action.stage + 1)
        with self._measured(action), self._segment(action):
            if action.kind == Kind.INPUT:
                assert self.deferred is not None
                with self.deferred.recording((action.stage, action.micro_batch)):
                    torch.autograd.backward(root, grad)
            else:
                torch.autograd.backward(root, grad)
        if x is not None:
            assert x.grad is not None
            self._send("gradient", action, x.grad, action.stage - 1)

    # -- messages --------------------------------------------------------------------------------

    def _receive_activation(self, action: Action) -> Tensor | None:
        return None if action.stage == 0 else self._receive("activation", action, action.stage - 1)

    def _receive(self, kind: str, action: Action, source: int) -> Tensor:
        message = Message(kind, source, action.stage, action.micro_batch)
        with self._blaming(f"the {kind} did not come from", source):
            packed = self.links.receive(message, self.stages[source].rank)
        return self.carrier.unpack(packed)

    def _send(self, kind: str, action: Action, tensor: Tensor, target: int) -> None:
        with self._blaming(f"the {kind} did not go to", target):
            self.links.send(self.carrier.pack(tensor).contiguous(), self.stages[target].rank)

    @contextmanager
    def _blaming(self, what: str, stage: int) -> Iterator[None]:
        try:
            yield
        except CommunicationError:  # of a chain that moved on during the wait: it says what failed
            raise
        except RuntimeError as error:
            peer = self.mesh.pp.ranks[self.stages[stage].rank]
            raise CommunicationError(f"{what} stage {stage} (rank {peer}): {error}") from error

    # -- parts -----------------------------------------------------------------------------------

    def _plan(self, micro_batches: int) -> _Plan:
        return self._of_rank(make_schedule(self.schedule, self.size, len(self.own), micro_batches))

    def _of_rank(self, schedule: Sequence[Sequence[Action]]) -> _Plan:
        every = sends(schedule, self.size)
        incoming = {source: m for (source, target), m in every.items() if target == self.rank and m}
        return _Plan(tuple(schedule[self.rank]), incoming, post_after(schedule, self.size))

    def _part(self, action: Action) -> int:
        """Return the engine's number of a stage, which is its place among this rank's stages."""
        return action.stage // self.size

    def _segment(self, action: Action) -> AbstractContextManager[None]:
        return self.engine.segment(action.kind.value, self._part(action), action.micro_batch)

    @contextmanager
    def _measured(self, action: Action) -> Iterator[None]:
        """Label the action's compute. If its span was asked for, note that too (by the host clock, after waiting for
        CUDA)."""
        if self.spans is None:
            with self.label("compute", str(action)):
                yield
            return
        self._settle()
        start = time.perf_counter()
        yield
        self._settle()
        self.spans.append(Span(self.rank, action, start, time.perf_counter()))

    def _settle(self) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    @contextmanager
    def _naming(self, action: Action) -> Iterator[None]:
        try:
            yield
        except CommunicationError as error:
            raise CommunicationError(
                f"rank {self.mesh.rank}, pipeline rank {self.rank} of {self.size}, {action}: {error}"
            ) from error

    def _abort(self) -> None:
        self.saved.clear()
        self.links.abort()
        if self.deferred is not None:
            self.deferred.discard()
