"""The ZeRO engine: when units are gathered, reduced and updated. The table of DESIGN section 1 as code.

One step of the user's loop::

    engine.begin_step(micro_batches, divisor)
    for each micro-batch: module(...).sum().backward()     # summed losses, not averaged
    info = engine.step()

State is explicit (begin_step, step, evaluation); hooks only say "this unit is needed now" and "this gradient
is there". The order of collectives is fixed: gathers by the recorded order of use, reductions by the reverse of
the forward's order of first use; both are hashed and compared across ranks at every step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megazero.comm.lane import Lane, Ticket
from megazero.comm.traffic import Traffic
from megazero.mesh.collectives import all_gather_flat
from megazero.mesh.mesh import Mesh
from megazero.zero.build import Plan
from megazero.zero.movement import gather, gather_plan, reduce, reduce_plan
from megazero.zero.optimizer import SliceOptimizer, Traits, clip_factor
from megazero.zero.order import Order, OrderHash
from megazero.zero.policy import Policy
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class StepInfo:
    """grad_norm: global norm of the divided gradients before clipping. skipped: it was not finite."""

    grad_norm: float
    skipped: bool


class Engine:
    """Made by ``zero.shard``; owns the module's parameters from then on."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        policy: Policy,
        plan: Plan,
        traits: Mapping[str, Traits],
        optimizer: SliceOptimizer,
        clip_norm: float | None,
        timed: Callable[[str], Any],
        traffic: Traffic,
    ) -> None:
        self.module, self.mesh, self.policy, self.traits = module, mesh, policy, traits
        self.units, self.optimizer, self.clip_norm, self.timed = plan.units, optimizer, clip_norm, timed
        self.traffic = traffic
        self.gathers = Lane("gather", mesh.device, mesh.rank, timed)
        self.reductions = Lane("reduce", mesh.device, mesh.rank, timed)
        self.axes = mesh.data_axes
        self.orders = {"train": Order(), "eval": Order()}
        self.order_hash = OrderHash()
        self.mode = "train"
        self.micro_batches = 0  # of the step that is open; 0: none is
        self.divisor = 1.0
        self._index = {u: i for i, u in enumerate(self.units)}
        self._ahead: set[Unit] = set()  # gathered or on the way before use
        self._forward_uses: list[Unit] = []
        self._reduce_queue: deque[Unit] = deque()
        self._complete: set[Unit] = set()
        self._reducing: deque[Ticket] = deque()
        self._backward_open = False
        self._done_backwards = 0
        self._install_hooks(plan)

    # -- the user's verbs ------------------------------------------------------------------------

    def begin_step(self, micro_batches: int = 1, divisor: float = 1.0) -> None:
        """Open a step of ``micro_batches`` backwards per rank; gradients are divided by ``divisor`` once."""
        if micro_batches < 1 or not divisor > 0:
            raise ValueError(
                f"begin_step needs micro_batches >= 1 and divisor > 0, got {micro_batches} and {divisor}"
            )
        if self.micro_batches:
            raise RuntimeError("begin_step was called twice: call step() after the step's last backward")
        self.micro_batches, self.divisor, self._done_backwards = micro_batches, float(divisor), 0
        for unit in self.units:
            unit.begin_step()
        self._begin_pass()
        self._prefetch()

    def step(self) -> StepInfo:
        """Finish the reductions, take the global norm, clip, update the master weights.

        A norm that is not finite skips the update on every rank. Raises RuntimeError if the number of
        backwards is not what begin_step was told.
        """
        self._check_backwards()
        self._wait_reductions()
        with self.timed("optimizer"):
            self._sum_partial()
            norm = self._global_norm()
            skipped = not math.isfinite(norm)
            if not skipped:
                self.optimizer.scale(clip_factor(norm, self.clip_norm, self.divisor))
                self.optimizer.update()
        self._end_step(updated=not skipped)
        return StepInfo(norm, skipped)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forwards without gradient, between steps; training goes on bit for bit as if it had not been."""
        if self.micro_batches:
            raise RuntimeError("evaluation() inside a step: call step() first")
        self.mode = "eval"
        self._begin_pass()
        try:
            with torch.no_grad():
                yield
        finally:
            self.mode = "train"
            self._drop_gathered()
            self._begin_pass()

    @contextmanager
    def gathered(self, module: nn.Module | None = None, write: bool = False) -> Iterator[None]:
        """Full parameters (of ``module``'s units; default all) to read, or with ``write`` to change, between steps.

        Collective. Each rank must write the same values: its slices of them become the master weights. Clone what
        is to outlive the block; a numpy view of a parameter would pin its storage, which is then freed.
        """
        if self.micro_batches:
            raise RuntimeError("gathered() inside a step: call step() first")
        wanted = {id(p) for p in (module or self.module).parameters()}
        units = [u for u in self.units if any(id(p) in wanted for p in u.params.values())]
        for unit in units:
            self._ensure(unit)
        try:
            yield
            if write:
                for unit in units:
                    self._take_written(unit)
        finally:
            self._drop_gathered()

    def invalidate(self) -> None:
        """The master weights were changed from outside (a checkpoint was loaded): every copy is stale."""
        for unit in self.units:
            unit.master_version += 1

    # -- hooks -----------------------------------------------------------------------------------

    def _install_hooks(self, plan: Plan) -> None:
        for module, needs in plan.needs:
            module.register_forward_pre_hook(lambda m, a, needs=needs: self._pre_forward(needs))
            module.register_forward_hook(
                lambda m, a, out, needs=needs: self._post_forward(needs, out),
                always_call=True,  # a forward that raised has stopped using its parameters, too
            )
        for unit in self.units:
            for name in unit.trainable:
                unit.params[name].register_post_accumulate_grad_hook(
                    lambda p, unit=unit, name=name: self._grad_ready(unit, name, p)
                )
        self.module.register_state_dict_pre_hook(self._guard_state_dict)

    def _guard_state_dict(self, *_: Any) -> None:
        if not all(u.full_present for u in self.units):
            raise RuntimeError(
                "the module's parameters are sharded: use `with engine.gathered(): module.state_dict()`, or save "
                "a sharded checkpoint"
            )

    def _pre_forward(self, needs: list[Unit]) -> None:
        recompute = torch._C._current_graph_task_id() != -1
        for unit in needs:
            if recompute:
                self._ensure(unit)
                continue
            if unit not in self._forward_uses:
                self._forward_uses.append(unit)
            unit.active += 1
            self._use(unit)

    def _post_forward(self, needs: list[Unit], output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        for unit in needs:
            unit.active -= 1
            self._release(unit)
        self._poll()
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda grad, needs=needs: self._pre_backward(needs))

    def _pre_backward(self, needs: list[Unit]) -> None:
        self._open_backward()
        for unit in needs:
            if not unit.in_backward:
                unit.in_backward = True
                self._use(unit)
        self._poll()

    def _grad_ready(self, unit: Unit, name: str, param: nn.Parameter) -> None:
        self._open_backward()
        if name not in unit.pending:
            raise RuntimeError(
                f"{name} got a second gradient in one micro-batch: call backward once for each"
            )
        unit.stage(name, param)
        unit.pending.discard(name)
        if not unit.pending:
            self._complete.add(unit)
            if len(unit.trainable) == len(unit.params):
                # Whatever used these parameters has run backward, or a gradient would be missing. Frozen ones
                # give no such sign: their unit stays gathered to the end of the backward.
                self._end_use(unit)
            self._submit_complete()
        self._poll()

    def _open_backward(self) -> None:
        if self._backward_open:
            return
        if self._done_backwards >= self.micro_batches:
            raise RuntimeError(
                f"backward number {self._done_backwards + 1} in a step of {self.micro_batches} micro-batches: "
                "call begin_step(micro_batches) with the right number before the step's first forward"
            )
        self._backward_open = True
        used = [u for u in reversed(self._forward_uses) if u.trainable]
        self._reduce_queue.extend(
            [*used, *(u for u in self.units if u.trainable and u not in self._forward_uses)]
        )
        torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)  # type: ignore[attr-defined]

    def _close_backward(self) -> None:
        """End of one micro-batch's backward: units that still lack gradients contribute zeros."""
        self._complete.update(self._reduce_queue)
        self._submit_complete()
        self._backward_open = False
        self._done_backwards += 1
        for unit in self.units:
            self._end_use(unit)
        self._begin_pass()

    # -- gathers ---------------------------------------------------------------------------------

    @property
    def _order(self) -> Order:
        return self.orders[self.mode]

    @property
    def _more_passes(self) -> bool:
        return self._done_backwards + int(self._backward_open) < self.micro_batches

    def _begin_pass(self) -> None:
        self._order.begin()
        self._forward_uses.clear()

    def _use(self, unit: Unit) -> None:
        """The unit is needed now: note it, start what comes next, return when it is gathered."""
        self._order.use(self._index[unit])
        self._ahead.discard(unit)
        if not unit.ready and unit.ticket is None:
            self._launch(unit)
        self._prefetch()
        self._ensure(unit)

    def _ensure(self, unit: Unit) -> None:
        if unit.ready:
            return
        if unit.ticket is None:
            self._launch(unit)
        if unit.ticket is not None:
            self.gathers.wait(unit.ticket)
            unit.ticket = None
        assert unit.ready, f"unit {unit.name}: copy {unit.copy_version}, master {unit.master_version}"

    def _launch(self, unit: Unit) -> None:
        plan = gather_plan(unit, self.axes)
        chain = gather(unit, self.axes, self.traffic)
        self.order_hash.add(f"g{self._index[unit]}")
        if plan:
            unit.ticket = self.gathers.submit(unit.name, plan, chain)
        else:
            deque(chain, maxlen=0)

    def _prefetch(self) -> None:
        budget = self.policy.prefetch_bytes - sum(u.full.nbytes for u in self._ahead)
        for index in self._order.upcoming(wrap=self._more_passes):
            unit = self.units[index]
            if unit.ready or unit.ticket is not None:
                continue
            budget -= unit.full.nbytes
            if budget < 0:
                return
            self._launch(unit)
            self._ahead.add(unit)

    def _release(self, unit: Unit) -> None:
        """Drop the gathered parameters unless someone uses them now or next."""
        if not unit.levels.p or unit.active or unit.in_backward or unit.ticket is not None:
            return
        keep = self.policy.keep_gathered and self.mode == "train" and self._more_passes
        if not keep and not self._order.next_is(self._index[unit], self._more_passes):
            unit.drop_full()

    def _end_use(self, unit: Unit) -> None:
        if unit.in_backward:
            unit.in_backward = False
            self._release(unit)

    def _drop_gathered(self) -> None:
        self.gathers.drain()
        self._ahead.clear()
        for unit in self.units:
            unit.ticket = None
            if unit.levels.p:
                unit.drop_full()

    def _take_written(self, unit: Unit) -> None:
        for slot, low, high, at in unit.layout.ranges(unit.levels.os):
            values = unit.full[slot.start + low : slot.start + high]
            unit.master[at : at + high - low].copy_(values)
        unit.master_version += 1

    # -- reductions ------------------------------------------------------------------------------

    def _submit_complete(self) -> None:
        while self._reduce_queue and self._reduce_queue[0] in self._complete:
            unit = self._reduce_queue.popleft()
            self._complete.discard(unit)
            self._submit_reduction(unit)

    def _submit_reduction(self, unit: Unit) -> None:
        first, last = unit.backwards == 0, unit.backwards == self.micro_batches - 1
        if unit.levels.g and unit.pending or not unit.levels.g and last:
            unit.fill_missing()
        staging, unit.staging = unit.staging, None
        unit.pending = set(unit.trainable)
        unit.backwards += 1
        plan = reduce_plan(unit, last, self.axes)
        single = self.micro_batches == 1
        chain = reduce(unit, staging, first, last, single, self.axes, self.traffic)
        self.order_hash.add(f"r{self._index[unit]}{last}")
        if not plan:
            deque(chain, maxlen=0)
            return
        keep = () if staging is None else (staging,)
        self._reducing.append(self.reductions.submit(unit.name, plan, chain, keep))
        while len(self._reducing) > self.policy.pending_reductions:
            self.reductions.wait(self._reducing.popleft())

    def _wait_reductions(self) -> None:
        while self._reducing:
            self.reductions.wait(self._reducing.popleft())
        self.reductions.drain()

    def _poll(self) -> None:
        self.gathers.poll()
        self.reductions.poll()

    def _check_backwards(self) -> None:
        if not self.micro_batches:
            raise RuntimeError("step() without begin_step()")
        if self._done_backwards != self.micro_batches:
            raise RuntimeError(
                f"step() after {self._done_backwards} backwards of {self.micro_batches}: every micro-batch that "
                "begin_step() announced needs one backward"
            )

    # -- the update ------------------------------------------------------------------------------

    def _sum_partial(self) -> None:
        """Sum over tp, in rank order, of gradients that are partial there (norms under sequence parallel)."""
        runs = [r for r in self.optimizer.runs if r.traits.partial]
        tp = self.mesh.tp
        if tp.size == 1 or not runs:
            return
        own = torch.cat([r.grad for r in runs])
        every = own.new_empty(tp.size * own.numel())
        self.traffic.add("tp", tp.link, (tp.size - 1) * own.nbytes)
        all_gather_flat(every, own, group=tp.gather_group)
        rows = every.view(tp.size, -1).unbind(0)
        total = rows[0].clone()
        for row in rows[1:]:
            total.add_(row)
        for run, part in zip(runs, total.split([r.stop - r.start for r in runs]), strict=True):
            run.grad.copy_(part)

    def _global_norm(self) -> float:
        """Norm over unique slices; ranks also compare the hash of what they issued."""
        counts = not self.mesh.is_replica
        square = self.optimizer.squared_norm(count_replicated=self.mesh.tp.index == 0)
        row = torch.stack(
            [square.cpu() * 1.0, torch.tensor(float(self.order_hash.take()), dtype=torch.float64)]
        )
        if not counts:
            row[0] = 0.0
        rows = self.mesh.gather_rows(row.to(self.mesh.device)).cpu()
        self.traffic.add("scalar", self._world_link, (self.mesh.world_size - 1) * row.nbytes)
        if len(set(rows[:, 1].tolist())) > 1:
            raise RuntimeError(
                f"ranks issued different collectives in this step (hashes {rows[:, 1].tolist()}): the modules "
                "must be called in the same order on every rank"
            )
        return math.sqrt(rows[:, 0].sum().item()) / self.divisor if rows[:, 0].isfinite().all() else math.nan

    @property
    def _world_link(self) -> str:
        inter = self.mesh.grid.ranks_per_node < self.mesh.world_size
        return "inter_node" if inter else "intra_node"

    def _end_step(self, updated: bool) -> None:
        self._drop_gathered()
        for unit in self.units:
            if unit.lifetime == "step":
                unit.drop_copy()
            if updated:
                unit.master_version += 1
        self.micro_batches = 0
