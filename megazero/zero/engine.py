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
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megazero.comm.lane import Lane
from megazero.comm.traffic import Traffic
from megazero.mesh.collectives import all_gather_flat
from megazero.mesh.mesh import Mesh
from megazero.zero.build import Plan
from megazero.zero.gathering import Gathering
from megazero.zero.optimizer import SliceOptimizer, Traits, clip_factor
from megazero.zero.order import OrderHash
from megazero.zero.policy import Policy
from megazero.zero.reducing import Reducing
from megazero.zero.reduction import commit_residual
from megazero.zero.rounding import GRADIENTS, KINDS, WEIGHTS, Rounding, relative_errors
from megazero.zero.unit import Unit


def _grad_arrived(engine: weakref.ref[Engine], index: int, name: str, param: nn.Parameter) -> None:
    alive = engine()
    if alive is not None:
        alive._grad_ready(alive.units[index], name, param)


@dataclass(frozen=True)
class StepInfo:
    """grad_norm: global norm of the divided gradients before clipping. skipped: it was not finite.

    sampled: name of the unit whose rounding was measured; errors: ||sent - exact|| / ||exact|| of its 'weights' and
    'gradients' (those that were sent quantised), over all ranks. fallbacks: a line for each unit whose error
    exceeded the policy's bound and which sends exactly from the next step on.
    """

    grad_norm: float
    skipped: bool
    sampled: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()


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
        self.issued = OrderHash()
        self.rounding = Rounding(policy.seed, mesh.rank, mesh.device, self.units)
        self.exact_gradients = False  # set between steps: gradient codecs are off from the next step on
        axes = mesh.data_axes
        self.gathering = Gathering(
            self.units,
            axes,
            policy,
            self.gathers,
            self.rounding,
            traffic,
            self.issued,
            lambda: self._more_passes,
        )
        self.reducing = Reducing(
            self.units, axes, policy, self.reductions, self.rounding, traffic, self.issued
        )
        self.micro_batches = 0  # of the step that is open; 0: none is
        self.divisor = 1.0
        self._forward_uses: list[Unit] = []
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
            raise RuntimeError(
                "begin_step was called twice: call step() after the step's last backward, or abort_step()"
            )
        self._check_frozen()
        self.micro_batches, self.divisor, self._done_backwards = micro_batches, float(divisor), 0
        self.reducing.micro_batches, self.reducing.exact = micro_batches, self.exact_gradients
        self.rounding.divisor = self.divisor
        for unit in self.units:
            unit.begin_step()
        self._begin_pass()
        self.gathering.prefetch()

    def step(self) -> StepInfo:
        """Finish the reductions, take the global norm, clip, update the master weights.

        A norm that is not finite skips the update on every rank. Raises RuntimeError if the number of
        backwards is not what begin_step was told.
        """
        self._check_backwards()
        self.reducing.wait()
        if self.mesh.device.type == "cuda":
            # The norm is read by the host below: standing here instead keeps the reductions' tail out of the
            # optimizer's time.
            torch.cuda.current_stream().synchronize()
        with self.timed("optimizer"):
            self._sum_partial()
            norm, errors = self._exchange()
            skipped = not math.isfinite(norm)
            if not skipped:
                self.optimizer.scale(clip_factor(norm, self.clip_norm, self.divisor))
                self.optimizer.update()
        sampled = self.rounding.sampled
        assert sampled is not None
        self._end_step(updated=not skipped)
        return StepInfo(norm, skipped, sampled.name, errors, tuple(self._fall_back(sampled, errors)))

    def abort_step(self) -> None:
        """Give the open step up, on every rank alike (after an exception): no update, gradients are forgotten."""
        self.reducing.abort()
        self._backward_open = False
        for unit in self.units:
            unit.active, unit.in_backward = 0, False
        self._end_step(updated=False)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forwards without gradient, between steps; training goes on bit for bit as if it had not been."""
        if self.micro_batches:
            raise RuntimeError("evaluation() inside a step: call step() first")
        self.gathering.mode = "eval"
        self._begin_pass()
        try:
            with torch.no_grad():
                yield
        finally:
            self.gathering.mode = "train"
            self.gathering.drop_all()
            self._begin_pass()

    @contextmanager
    def gathered(self, module: nn.Module | None = None, write: bool = False) -> Iterator[None]:
        """Full parameters (of ``module``'s units; default all) to read, or with ``write`` to change, between steps.

        Collective. Each rank must write the same values: its slices of them become the master weights; of a
        parameter that was written in part, the rest, too, where the weights are rounded. Clone what is to outlive
        the block; a numpy view of a parameter would pin its storage, which is then freed.
        """
        if self.micro_batches:
            raise RuntimeError("gathered() inside a step: call step() first")
        wanted = {id(p) for p in (module or self.module).parameters()}
        units = [u for u in self.units if any(id(p) in wanted for p in u.params.values())]
        for unit in units:
            self.gathering.ensure(unit)
            unit.pinned += 1
        # Rounded weights do not tell which of the masters behind them were written.
        seen = [unit.full.clone() if write and unit.codecs.weights else None for unit in units]
        try:
            yield
            if write:
                for unit, before in zip(units, seen, strict=True):
                    self._take_written(unit, before)
        finally:
            for unit in units:
                unit.pinned -= 1
            self.gathering.drop_all()

    def invalidate(self) -> None:
        """The master weights were changed from outside (a checkpoint was loaded): every copy is stale.

        Under the delta refresh R was loaded with them (``state.load_records``) and goes on from there.
        """
        for unit in self.units:
            unit.master_version += 1
            if unit.delta:
                unit.copy_version = unit.master_version

    def refresh(self) -> None:
        """Bring every P copy up to date now, not at the next use. Collective, between steps.

        Under the delta refresh this comes before a save: R is what a checkpoint holds as the weights.
        """
        if self.micro_batches:
            raise RuntimeError("refresh() inside a step: call step() first")
        for unit in self.units:
            if unit.copy_version != unit.master_version:
                self.gathering.ensure(unit)
        self.gathering.drop_all()

    def state(self) -> dict[str, Any]:
        """What else a checkpoint keeps: counters that noise depends on, units that fell back. JSON types."""
        fallen = {
            unit.name: [kind for kind in KINDS if kind in unit.fallen] for unit in self.units if unit.fallen
        }
        return {"updates": self.rounding.updates, "fallen_back": fallen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.rounding.updates = int(state["updates"])
        for unit in self.units:
            for kind in state["fallen_back"].get(unit.name, ()):
                unit.send_exactly(kind)

    # -- hooks -----------------------------------------------------------------------------------

    def _install_hooks(self, plan: Plan) -> None:
        for module, needs in plan.needs:
            module.register_forward_pre_hook(lambda m, a, needs=needs: self._pre_forward(needs))
            module.register_forward_hook(
                lambda m, a, out, needs=needs: self._post_forward(needs, out),
                always_call=True,  # a forward that raised has stopped using its parameters, too
            )
        # Python's collector does not see into these hooks: a strong reference would keep the engine, its buffers and
        # the mesh's communicators for ever.
        engine = weakref.ref(self)
        for index, unit in enumerate(self.units):
            for name in unit.trainable:
                unit.params[name].register_post_accumulate_grad_hook(partial(_grad_arrived, engine, index, name))
        owner = {id(p): unit for unit in self.units for p in unit.params.values()}
        for module in self.module.modules():
            held = list(dict.fromkeys(owner[id(p)] for p in module.parameters() if id(p) in owner))
            module.register_state_dict_pre_hook(
                lambda *_, held=held: self._guard(held, "state_dict", "gathered()")
            )
            module.register_load_state_dict_pre_hook(
                lambda *_, held=held: self._guard(held, "load_state_dict", "gathered(write=True)")
            )

    def _guard(self, held: list[Unit], call: str, inside: str) -> None:
        """Outside of ``gathered`` parameters may be absent, stale, or overwritten from the master weights."""
        if not all(u.pinned for u in held):
            raise RuntimeError(
                f"the module's parameters are sharded: use `with engine.{inside}: module.{call}(...)`, or a sharded "
                "checkpoint"
            )

    def _check_frozen(self) -> None:
        for unit in self.units:
            now = [n for n, p in unit.params.items() if p.requires_grad]
            if now != unit.trainable:
                changed = sorted(set(now) ^ set(unit.trainable))
                raise RuntimeError(
                    f"requires_grad of {changed[0]} changed after zero.shard: freeze parameters before, or shard anew"
                )

    def _pre_forward(self, needs: list[Unit]) -> None:
        recompute = torch._C._current_graph_task_id() != -1
        for unit in needs:
            if recompute:
                self.gathering.ensure(unit)
                continue
            if unit not in self._forward_uses:
                self._forward_uses.append(unit)
            unit.active += 1
            self.gathering.use(unit)

    def _post_forward(self, needs: list[Unit], output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        for unit in needs:
            unit.active -= 1
            self.gathering.release(unit)
        self._poll()
        if torch.is_grad_enabled() and output is not None:
            self._watch_backward(needs, output)

    def _watch_backward(self, needs: list[Unit], output: Any) -> None:
        """The units are needed again when a gradient reaches the module's output."""
        tensors = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: self._pre_backward(needs))
        if not tensors and any(u.levels.p for u in needs):
            raise TypeError(
                f"a module of unit {needs[0].name!r} returned a {type(output).__name__}, in which the engine sees "
                "no tensors: return tensors, tuples, lists or dicts, or register the class as a pytree node"
            )

    def _pre_backward(self, needs: list[Unit]) -> None:
        self._open_backward()
        for unit in needs:
            if not unit.in_backward:
                unit.in_backward = True
                self.gathering.use(unit)
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
            if len(unit.trainable) == len(unit.params):
                # Whatever used these parameters has run backward, or a gradient would be missing. Frozen ones
                # give no such sign: their unit stays gathered to the end of the backward.
                self._end_use(unit)
            self.reducing.completed(unit)
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
        self.reducing.open(self._forward_uses)
        torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)  # type: ignore[attr-defined]

    def _close_backward(self) -> None:
        """End of one micro-batch's backward: units that still lack gradients contribute zeros."""
        self.reducing.close()
        self._backward_open = False
        self._done_backwards += 1
        for unit in self.units:
            self._end_use(unit)
        self._begin_pass()

    def _end_use(self, unit: Unit) -> None:
        if unit.in_backward:
            unit.in_backward = False
            self.gathering.release(unit)

    def _begin_pass(self) -> None:
        self.gathering.order.begin()
        self._forward_uses.clear()

    @property
    def _more_passes(self) -> bool:
        return self._done_backwards + int(self._backward_open) < self.micro_batches

    def _poll(self) -> None:
        self.gathers.poll()
        self.reductions.poll()

    def _take_written(self, unit: Unit, seen: torch.Tensor | None) -> None:
        """seen: ``full`` before the writes, where it is not what the master rounds to."""
        for slot, low, high, at in unit.layout.ranges(unit.levels.os):
            whole = slice(slot.start, slot.start + slot.numel)
            if seen is not None and torch.equal(unit.full[whole], seen[whole]):
                continue
            values = unit.full[slot.start + low : slot.start + high]
            own = unit.master[at : at + high - low]
            # What was not written keeps its bits below the parameters' precision.
            own.copy_(torch.where(values == own.to(unit.dtype), own, values.to(own.dtype)))
        if unit.delta and unit.levels.p:  # with P = 1, R is full itself
            for slot, low, high, at in unit.layout.ranges(unit.levels.p):
                unit.copy[at : at + high - low].copy_(unit.full[slot.start + low : slot.start + high])
        unit.master_version += 1

    # -- the update ------------------------------------------------------------------------------

    def _check_backwards(self) -> None:
        if not self.micro_batches:
            raise RuntimeError("step() without begin_step()")
        if self._done_backwards != self.micro_batches:
            raise RuntimeError(
                f"step() after {self._done_backwards} backwards of {self.micro_batches}: every micro-batch that "
                "begin_step() announced needs one backward"
            )

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

    def _exchange(self) -> tuple[float, dict[str, float]]:
        """Norm over unique slices, and the sampled rounding errors; ranks compare the hash of what they issued."""
        counts = not self.mesh.is_replica
        square = self.optimizer.squared_norm(count_replicated=self.mesh.tp.index == 0)
        square = square.cpu() * 1.0 if counts else torch.zeros((), dtype=torch.float64)
        hashed = torch.tensor(float(self.issued.take()), dtype=torch.float64)
        row = torch.cat([torch.stack([square, hashed]), self.rounding.take().cpu()])
        rows = self.mesh.gather_rows(row.to(self.mesh.device)).cpu()
        self.traffic.add("scalar", self._world_link, (self.mesh.world_size - 1) * row.nbytes)
        if len(set(rows[:, 1].tolist())) > 1:
            raise RuntimeError(
                f"ranks issued different collectives in this step (hashes {rows[:, 1].tolist()}): the modules "
                "must be called in the same order on every rank"
            )
        finite = rows[:, 0].isfinite().all()
        norm = math.sqrt(rows[:, 0].sum().item()) / self.divisor if finite else math.nan
        return norm, relative_errors(rows[:, 2:].sum(0))

    def _fall_back(self, unit: Unit, errors: Mapping[str, float]) -> Iterator[str]:
        """All ranks have the same errors, so all decide alike."""
        bounds = {WEIGHTS: self.policy.weight_error_bound, GRADIENTS: self.policy.gradient_error_bound}
        for kind, error in errors.items():
            bound = bounds[kind]
            if bound is not None and error > bound and kind not in unit.fallen:
                unit.send_exactly(kind)
                yield (
                    f"{kind} of unit {unit.name!r}: relative rounding error {error:.3g} is above the bound "
                    f"{bound:g}; exact from the next step on"
                )

    @property
    def _world_link(self) -> str:
        inter = self.mesh.grid.ranks_per_node < self.mesh.world_size
        return "inter_node" if inter else "intra_node"

    def _end_step(self, updated: bool) -> None:
        self.gathering.drop_all()
        for unit in self.units:
            if unit.lifetime == "step":
                unit.drop_copy()
            if updated:
                unit.master_version += 1
                commit_residual(unit, self.mesh.data_axes, self.divisor)
        self.rounding.updates += int(updated)
        self.micro_batches = 0
