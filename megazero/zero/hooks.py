"""Hooks on the module. They only say "this unit is needed now" and "this gradient is there".

There is one Hooks per engine. A pass is one segment of the step's program (program.py). A pipeline enters and
leaves its segments itself. In a loop of plain forwards and backwards the hooks begin the segment of the part that
their unit is in. Nothing is inferred from the hooks' order but the order of use.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megazero.zero.build import MadeUnits
from megazero.zero.gather import Gatherer
from megazero.zero.parameters import guard_reads, outliving, tensors_in
from megazero.zero.program import BACKWARD, FORWARD, INPUT, WEIGHT, Segment
from megazero.zero.reduce import Reducer
from megazero.zero.unit import Unit


@dataclass
class GraphTask:
    """A graph task of autograd that uses parameters.

    creates_graph: its gradients are part of a loss (create_graph=True). counted: the parts whose backward it is;
    torch.autograd.grad counts for none. done: units that have all gradients; they may be read until the next module's
    backward.
    """

    creates_graph: bool
    counted: set[int] = field(default_factory=set)
    done: list[Unit] = field(default_factory=list)


class Hooks:
    """Counts a step's backwards and reports to gatherer and reducer what the module's hooks see.

    micro_batches: how many the open step has; 0 if none is open. backwards: how many of them are done, by part.
    """

    def __init__(self, module: nn.Module, made: MadeUnits, gatherer: Gatherer, reducer: Reducer) -> None:
        self.units, self.gatherer, self.reducer = made.units, gatherer, reducer
        self.lanes = [gatherer.lane, reducer.lane]  # by priority
        self.program = gatherer.program
        self.micro_batches = 0
        self.parts = [[u for u in made.units if u.part == part] for part in range(made.parts)]
        self.backwards = [0] * made.parts
        self._forward_uses: list[list[Unit]] = [[] for _ in self.parts]  # of each part's last forward
        self._task: GraphTask | None = None  # that runs
        self._forwards = 0  # of hooked modules that are open
        self._declared = False  # segments are entered by ``segment``, not by the hooks
        self._splits = False  # the program has backwards of the input alone
        self._micro_batch = 0
        # Gradients that arrived with the input's, by part and micro-batch: they go with the weights'.
        self._held: dict[tuple[int, int], dict[Unit, dict[str, torch.Tensor]]] = {}
        self._owner = {id(p): (u, n) for u in made.units for n, p in u.params.items()}
        register(module, made, self)
        for unit in made.units:
            unit.weights.read_by(partial(self.read, unit))

    def open_step(self, micro_batches: int, segments: Sequence[Segment]) -> None:
        self.micro_batches, self.backwards = micro_batches, [0] * len(self.parts)
        self._splits = any(segment.kind == INPUT for segment in segments)
        self._forget_backward()
        self.program.open(segments)

    def close_step(self) -> None:
        """End the step. A forward after its last backward has left its segment open; it is closed here."""
        self.micro_batches = 0
        self.program.leave()

    def check_done(self, call: str) -> None:
        """Raise RuntimeError, which names the call, unless the open step has had its backwards."""
        if not self.micro_batches:
            raise RuntimeError(f"{call} without begin_step()")
        if min(self.backwards) != self.micro_batches:
            raise RuntimeError(
                f"{call} after {min(self.backwards)} backwards of {self.micro_batches}: every micro-batch that "
                "begin_step() announced needs one backward; torch.autograd.grad is none"
            )

    def abort(self) -> None:
        """Forget an interrupted forward or backward."""
        self._forwards, self._declared = 0, False
        self._held.clear()
        self.program.open(())
        self._forget_backward()
        for unit in self.units:
            unit.weights.forget_forwards()

    def _forget_backward(self) -> None:
        """Forget a graph task that raised, or whose gradients' graph was never used: neither reports its end."""
        self._task = None
        for unit in self.units:
            unit.weights.end_backward()

    @contextmanager
    def segment(self, kind: str, part: int, micro_batch: int) -> Iterator[None]:
        """Run a forward, a backward, or a backward of the input alone of one part for one micro-batch."""
        self._enter(kind, part, micro_batch)
        self._declared = True
        try:
            yield
        finally:
            self._declared = False
            self.program.leave()

    @torch.no_grad()
    def weight_gradients(
        self, part: int, micro_batch: int, pairs: Iterable[tuple[nn.Parameter, torch.Tensor]]
    ) -> None:
        """Take the gradients that a backward of the input alone deferred, together with the others."""
        self._enter(WEIGHT, part, micro_batch)
        self._check_announced(part)
        self.reducer.open(self._reduction_order(part))
        held = self._held.pop((part, micro_batch), {})
        for param, grad in pairs:
            unit, name = self._owner[id(param)]
            param.grad = grad
            self._arrived(unit, name, param)
            if unit.gradients.pending and unit.gradients.pending == held.get(unit, {}).keys():
                self._deliver(unit, held.pop(unit))
        for unit, grads in held.items():
            self._deliver(unit, grads)
        self.reducer.close()
        self.backwards[part] += 1
        self.program.leave()

    def read(self, unit: Unit, refusal: str, operation: Callable[[], Any]) -> Any:
        """Run an operation that reads a released unit as if it were a module that needs the unit; in a backward, too.

        Raises RuntimeError with ``refusal`` outside of forward and backward, where ranks may run different code.
        """
        if torch._C._current_graph_task_id() != -1:
            self._pre_backward([unit])
            return outliving([unit.weights], operation())
        if not self._forwards:
            raise RuntimeError(refusal)
        output = None
        self.pre_forward([unit], ())
        try:
            output = operation()
        finally:
            output = self.post_forward([unit], output)
        return output

    def _deliver(self, unit: Unit, grads: dict[str, torch.Tensor]) -> None:
        for name, grad in grads.items():
            unit.params[name].grad = grad
            self._arrived(unit, name, unit.params[name])

    def _enter(self, kind: str, part: int = 0, micro_batch: int = 0) -> None:
        self.program.enter(Segment(kind, part))
        self._micro_batch = micro_batch
        if kind == FORWARD:
            self._forward_uses[part].clear()

    def _reduction_order(self, part: int) -> list[Unit]:
        """Return the units in the reverse of first use in the forward, then those that it did not use."""
        used = self._forward_uses[part]
        return [*reversed(used), *(u for u in self.parts[part] if u not in used)]

    def _check_announced(self, part: int) -> None:
        if self.backwards[part] >= self.micro_batches:
            raise RuntimeError(
                f"backward number {self.backwards[part] + 1} in a step of {self.micro_batches} micro-batches: "
                "call begin_step(micro_batches) with the right number before the step's first forward"
            )

    # -- hooks -----------------------------------------------------------------------------------

    def pre_forward(self, needs: list[Unit], args: tuple[Any, ...]) -> None:
        """Note that a module that needs these units is about to run."""
        if torch._C._current_graph_task_id() != -1:  # a recompute
            for unit in needs:
                self.gatherer.ensure(unit)
            return
        self._forwards += 1
        if not needs:
            return
        self._open_forward(needs[0].part)
        assert self.program.current is not None
        for unit in needs:
            uses = self._forward_uses[unit.part]
            if self.program.current.kind == FORWARD and unit not in uses:
                uses.append(unit)
            unit.weights.begin_forward()
        self.gatherer.use(needs)
        if self._splits and torch.is_grad_enabled():
            self._watch_input(needs, args)

    def _open_forward(self, part: int) -> None:
        current = self.program.current
        if not self.micro_batches and (current is None or current.kind == FORWARD):
            self.gatherer.lane.follow()  # outside of steps the user may have changed weights since the last forward
        if current is None or current.kind == FORWARD and current.part != part and not self._declared:
            self._enter(FORWARD, part)

    def _watch_input(self, needs: list[Unit], args: tuple[Any, ...]) -> None:
        """Watch a backward of the input alone, in which no weight's gradient marks the end of the unit's use."""

        def input_done(_: torch.Tensor) -> None:
            if self.program.current is not None and self.program.current.kind == INPUT:
                for unit in needs:
                    self._end_use(unit)

        for tensor in args:
            own = id(tensor) in self._owner  # a hook on it would stay for ever
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not own:
                tensor.register_hook(input_done)

    def post_forward(self, needs: list[Unit], output: Any) -> Any:
        """Return the module's output, copied where it lies in a buffer that is freed now."""
        if torch._C._current_graph_task_id() != -1:
            return output
        output = outliving([unit.weights for unit in needs], output)
        self._forwards -= 1
        # After a forward that raised nothing is checked: torch would warn at length about each hook that raises then.
        raised = output is None and sys.exc_info()[0] is not None
        for unit in needs:
            unit.weights.end_forward()
            if not (raised or unit.weights.pinned):  # else gathered() looks when its block ends
                cure = "write between steps, inside `with engine.gathered(write=True)`"
                # Before it is hidden: then a look takes 10 times as long.
                unit.weights.check_unwritten("in a forward", cure)
            self.gatherer.release(unit)
        if raised:
            return None
        self.poll()
        if needs and torch.is_grad_enabled() and output is not None:
            self._watch_backward(needs, output)
        return output

    def _watch_backward(self, needs: list[Unit], output: Any) -> None:
        """Ask for the units again when a gradient reaches the module's output.

        A leaf (a parameter, or an input passed through) has no backward here, and a hook on it would stay forever.
        """
        tensors = list(tensors_in(output))
        for tensor in tensors:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda grad: self._pre_backward(needs))
        if not tensors and any(u.axes.p for u in needs):
            raise TypeError(
                f"a module of unit {needs[0].name!r} returned a {type(output).__name__}, in which the engine sees "
                "no tensors: return tensors, containers or objects of them, or register the class as a pytree node"
            )

    def _pre_backward(self, needs: list[Unit]) -> None:
        if self._task is not None:
            counts = bool(self._task.counted)
        else:
            current = self.program.current
            in_backward = current is not None and current.kind in (BACKWARD, INPUT)
            counts = in_backward or brings_gradients(self._owner)
        task = self._open_backward(needs[0], counts)
        for unit in task.done:
            self._end_use(unit)
        task.done.clear()
        wanted = [unit for unit in needs if not unit.weights.in_backward]
        for unit in wanted:
            unit.weights.begin_backward()
        if counts and wanted:
            self.gatherer.use(wanted)
        for unit in needs:
            self.gatherer.ensure(unit)
        self.poll()

    def grad_ready(self, unit: Unit, name: str, param: nn.Parameter) -> None:
        """Note that autograd has accumulated a parameter's gradient."""
        self._open_backward(unit, counts=True)
        current = self.program.current
        if current is not None and current.kind == INPUT:
            if param.grad is None:  # put off, and autograd says so
                return
            held = self._held.setdefault((current.part, self._micro_batch), {}).setdefault(unit, {})
            held[name], param.grad = param.grad, None
            return
        self._arrived(unit, name, param)

    def _arrived(self, unit: Unit, name: str, param: nn.Parameter) -> None:
        if name not in unit.gradients.pending:
            raise RuntimeError(
                f"{name} got a second gradient in one micro-batch: call backward once for each"
            )
        unit.gradients.take(name, param)
        if not unit.gradients.pending:
            if self._task is not None and len(unit.trainable) == len(unit.params):
                # All gradients have arrived, so every use with gradient is over. Detached uses end before the
                # gradient leaves the module. Frozen parameters give no such sign: their unit stays gathered to the
                # end of the backward.
                self._task.done.append(unit)
            self.reducer.completed(unit)
        self.poll()

    def _open_backward(self, unit: Unit, counts: bool) -> GraphTask:
        """Note that a graph task has come to this unit and, if it counts, to its part (one part after the other)."""
        if self._task is not None and (not counts or unit.part in self._task.counted):
            return self._task
        if counts:
            current = self.program.current
            if self._declared and current is not None and current.part != unit.part:
                raise RuntimeError(
                    f"the backward of part {current.part} came to unit {unit.name!r} of part {unit.part}: give each "
                    "part its own backward inside `with engine.segment(kind, part, micro_batch):`, or use no segments"
                )
            self._check_announced(unit.part)
            if not self._declared:
                self._enter(BACKWARD, unit.part)
            assert self.program.current is not None
            if self.program.current.kind == BACKWARD:
                self.reducer.open(self._reduction_order(unit.part))
        if self._task is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)  # type: ignore[attr-defined]
            self._task = GraphTask(torch.is_grad_enabled())
        if counts:
            self._task.counted.add(unit.part)
        return self._task

    def _close_backward(self) -> None:
        """End one graph task. If it was a micro-batch's backward, units that lack gradients contribute zeros."""
        task, self._task = self._task, None
        if task is None:  # the step was given up
            return
        if task.counted:
            assert self.program.current is not None
            if self.program.current.kind == BACKWARD:
                self.reducer.close()
                for part in task.counted:
                    self.backwards[part] += 1
        if task.counted or not task.creates_graph:  # else a backward through the gradients is to come
            for unit in self.units:
                self._end_use(unit)
        if task.counted:
            self.program.leave()

    def _end_use(self, unit: Unit) -> None:
        if unit.weights.in_backward:
            unit.weights.end_backward()
            self.gatherer.release(unit)

    def poll(self) -> None:
        """Advance the chains in flight (on gloo they advance only when polled)."""
        for lane in self.lanes:
            lane.poll()


def register(module: nn.Module, made: MadeUnits, hooks: Hooks) -> None:
    """Watch the forwards of the hooked modules and the gradients of its parameters, and guard reads from outside."""
    handles: dict[nn.Module, list[RemovableHandle]] = {m: [] for m in module.modules()}
    for hooked, needs in made.needs:
        handles[hooked] += _watch_forward(hooked, needs, hooks)
    _watch_gradients(made.units, hooks)
    guard_reads([unit.weights for unit in made.units], handles)


def _watch_forward(module: nn.Module, needs: list[Unit], hooks: Hooks) -> list[RemovableHandle]:
    """Hook a module's forward. torch.compile runs the hooks as they are, and compiles what lies between them."""

    @torch._disable_dynamo
    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        hooks.pre_forward(needs, args)

    @torch._disable_dynamo
    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return hooks.post_forward(needs, output)

    return [
        module.register_forward_pre_hook(before),
        # Always: a forward that raised has stopped using its parameters, too.
        module.register_forward_hook(after, always_call=True),
    ]


def _watch_gradients(units: list[Unit], hooks: Hooks) -> None:
    # Python's collector does not see into these hooks: a strong reference would keep the engine, its buffers and
    # the mesh's communicators for ever.
    alive = weakref.ref(hooks)
    for unit in units:
        for name in unit.trainable:
            arrived = partial(_gradient_arrived, alive, weakref.ref(unit), name)
            unit.params[name].register_post_accumulate_grad_hook(arrived)


def _gradient_arrived(
    alive: weakref.ref[Hooks], held: weakref.ref[Unit], name: str, param: nn.Parameter
) -> None:
    hooks, unit = alive(), held()
    if hooks is not None and unit is not None:
        hooks.grad_ready(unit, name, param)


def brings_gradients(params: Container[int]) -> bool:
    """Whether autograd runs a backward, judged from the graph behind the hook.

    params: the ids of Parameters. ``torch.autograd.grad`` passes over all of them that are in the graph. A graph
        without any counts as a backward's.
    """
    passed = False
    for leaf in _leaves(torch._C._current_autograd_node()):
        if id(leaf.variable) in params:
            if _accumulates(leaf):
                return True
            passed = True
    return not passed


def _leaves(root: Any) -> Iterator[Any]:
    """Yield the graph's accumulators of gradients, nearest first."""
    seen, queue = {root}, deque([root])
    while queue:
        node = queue.popleft()
        if isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)


def _accumulates(leaf: Any) -> bool:
    """Whether autograd, as it runs now, adds to the leaf's gradient."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # what torch says of a leaf whose gradient torch.autograd.grad returns
        return False
