"""The ZeRO engine: when units are gathered, reduced and updated.

One step of the user's loop::

    engine.begin_step(micro_batches, divisor)
    for each micro-batch: module(...).sum().backward()     # summed losses, not averaged
    info = engine.step()

State is explicit (begin_step, step, evaluation); hooks (hooks.py) only say "this unit is needed now" and "this
gradient is there". The order of collectives is fixed: gathers by the recorded order of use, reductions by the
reverse of the forward's order of first use; both are hashed and compared across ranks at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from megazero.comm.hops import Traffic
from megazero.comm.lane import Lane
from megazero.comm.timing import Waits
from megazero.mesh.mesh import Mesh, all_gather_flat
from megazero.mesh.waiting import waiting
from megazero.zero.agreement import Agreement, IssueHash, unlike
from megazero.zero.build import MadeUnits
from megazero.zero.context import Context
from megazero.zero.gather import Gatherer
from megazero.zero.grad_norm import GlobalNorm, clip_factor, counted, sum_partial
from megazero.zero.hooks import Hooks
from megazero.zero.matrix_updates import MatrixUpdates
from megazero.zero.optimizer import SliceOptimizer, Traits
from megazero.zero.outer import OuterSteps
from megazero.zero.policy import Policy
from megazero.zero.program import BACKWARD, EVALUATION, FORWARD, Segment
from megazero.zero.reduce import Reducer
from megazero.zero.rounding import Observer, Rounding, unit_names
from megazero.zero.scalars import StepInfo, StepPart, StepScalars
from megazero.zero.slices import Slice
from megazero.zero.unit import Unit

Part = TypeVar("Part", bound=StepPart)
WRITING = "write inside `with engine.gathered(write=True)`, the same values on every rank"


class Engine:
    """``zero.shard`` makes an engine. It owns the module's parameters from then on."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        policy: Policy,
        made: MadeUnits,
        traits: Mapping[str, Traits],
        optimizer: SliceOptimizer,
        clip_norm: float | None,
        timed: Callable[[str], Any],
        traffic: Traffic,
    ) -> None:
        self.module, self.mesh, self.policy, self.traits = module, mesh, policy, traits
        self.units, self.optimizer, self.clip_norm, self.timed = made.units, optimizer, clip_norm, timed
        self.traffic = traffic
        self.gathers = Lane("gather", mesh.device, mesh.rank, timed)
        self.reductions = Lane("reduce", mesh.device, mesh.rank, timed)
        self.arena = made.arena
        names = unit_names(mesh, self.units)
        self.rounding = Rounding(policy, mesh, names)
        self.waits = Waits(mesh.device, timed)
        self.issued = IssueHash(self.units)
        context = Context(traffic, self.arena, mesh.device, policy, self.rounding, self.issued)
        needing = sum(bool(units) for _, units in made.needs)
        self.gatherer = Gatherer(self.units, needing, context, self.gathers)
        self.reducer = Reducer(self.units, context, self.reductions)
        self.hooks = Hooks(module, made, self.gatherer, self.reducer)
        self.exact_gradients = False  # set between steps: gradient codecs are off from the next step on
        self.reduced = False  # the open step's sums are complete
        self.matrices = [
            MatrixUpdates(
                optimizer.matrices, optimizer.runs, units, traits, mesh.tp, context, self.reductions
            )
            for units in by_axes(self.units)
            if optimizer.matrices is not None
        ]
        self._take_parts(context)

    def _take_parts(self, context: Context) -> None:
        """Make the parts of a step, in the order in which they are told."""
        runs = counted(self.optimizer.runs, self.mesh)
        self.norm = GlobalNorm(runs, self.mesh)
        self.agreement = Agreement(self.mesh, self.issued)
        self.outer: OuterSteps | None = None
        if self.policy.outer is not None:
            self.outer = OuterSteps(self.units, self.policy.outer, self.mesh, context, self.reductions, runs)
        self.parts: list[StepPart] = []
        self.scalars = StepScalars(self.mesh, self.waits, self.parts)
        self.gathers.overdue = self.reductions.overdue = self.agreement.check
        for part in (self.rounding, self.agreement, self.norm):
            self.join(part)

    # -- the user's verbs ------------------------------------------------------------------------

    def begin_step(
        self, micro_batches: int = 1, divisor: float = 1.0, program: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Open a step of ``micro_batches`` backwards per rank; gradients are divided by ``divisor`` once.

        divisor: includes the loss scale, where losses are scaled; the norm sees divided gradients.
        program: the (kind, part) pairs that the step will run, in order; the kinds F, B, I, W are in program.py.
            Gathers run ahead by it. By default each micro-batch has a forward and a backward of the whole module,
            all parts.
        Raises ValueError unless micro_batches >= 1 and divisor > 0, RuntimeError if a step is open.
        """
        if micro_batches < 1 or not divisor > 0:
            raise ValueError(
                f"begin_step needs micro_batches >= 1 and divisor > 0, got {micro_batches} and {divisor}"
            )
        if self.hooks.micro_batches:
            raise RuntimeError(
                "begin_step was called twice: call step() after the step's last backward, or abort_step()"
            )
        self._check_parameters()
        self.norm.divisor = float(divisor)
        self.reducer.micro_batches, self.reducer.exact = micro_batches, self.exact_gradients
        for unit in self.units:
            unit.gradients.begin_step()
        self.hooks.open_step(micro_batches, [Segment(*s) for s in program] or self._plain_loop(micro_batches))
        self.gathers.follow()
        self.gatherer.prefetch()

    def segment(self, kind: str, part: int, micro_batch: int) -> AbstractContextManager[None]:
        """Mark one of the program's forwards (F), backwards (B) or backwards of the input alone (I), run inside."""
        return self.hooks.segment(kind, part, micro_batch)

    def weight_gradients(
        self, part: int, micro_batch: int, pairs: Iterable[tuple[nn.Parameter, torch.Tensor]]
    ) -> None:
        """Run a W of the program: take the gradients that I deferred, as pairs (parameter, its whole gradient in the
        same shape)."""
        self.hooks.weight_gradients(part, micro_batch, pairs)

    def poll(self) -> bool:
        """Advance the chains in flight while the caller waits for something else. True if some remain."""
        self.hooks.poll()
        return any(lane.busy for lane in self.hooks.lanes)

    def step(self) -> StepInfo:
        """Finish the reductions, take the global norm, clip, and update the master weights.

        A non-finite norm skips the update on every rank. Raises RuntimeError if the number of backwards differs from
        begin_step's.
        """
        self._reduce("step()")
        with self.timed("optimizer"):
            self._sum_partial()
            self.scalars.write()
        # Not in the optimizer's time: here ranks wait for slower ones, and on CUDA the host for the backward's end.
        self.scalars.exchange(self.traffic)
        info = StepInfo(**self.scalars.read())
        if not info.skipped:
            with self.timed("optimizer"):
                self._update(clip_factor(info.grad_norm, self.clip_norm, self.divisor))
        self._end_step()
        for part in self.parts:
            part.updated(not info.skipped)
        return info

    def join(self, part: StepPart) -> None:
        """Let a part take part in every step from now on. It is told of each moment before the parts that are there.

        Every rank joins the same parts in the same order, between steps: their columns are those of every rank's row.
        """
        self.parts.insert(0, part)

    def part(self, kind: type[Part]) -> Part | None:
        """Return the part of this class that takes part in every step, if there is one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def combine(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Combine numbers over all ranks as ``Mesh.combine``, as a part of the exchange of a step. Collective."""
        for link, sent in self.mesh.grid.added_up(x.nbytes).items():
            if sent:
                self.traffic.add("scalar", link, sent)
        with self.waits(self.exchange_hop):
            return self.mesh.combine(x, op)

    def scale_rows(self, name: str, factors: torch.Tensor) -> None:
        """Multiply a parameter by ``factors`` of its rows on this rank, in the master weights. For parts of a step,
        when it was updated: every rank that holds a part of these rows gives the same factors."""
        for unit in self.units:
            if name in unit.slots:
                unit.master.scale_rows(name, factors)
                unit.weights.outdate()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the whole gradient of every trained parameter, between the last backward and step().

        A gradient is summed over the step's micro-batches and over all ranks, divided by begin_step's divisor, and
        not yet clipped. It has the parameter's shape on this rank and at least fp32; the caller may keep it. One unit
        is gathered at a time. This is collective: every rank takes all of them. Raises RuntimeError at other times.
        """
        self._reduce("gradients()")
        self._sum_partial()
        for unit in self.units:
            if unit.trainable:
                whole = self._whole_gradient(unit)
                for name in unit.trainable:
                    slot = unit.slots[name]
                    yield name, whole[slot.start : slot.start + slot.numel].view(slot.shape).clone()

    def abort_step(self) -> None:
        """Abort the open step on every rank (after an exception). Its gradients are discarded."""
        self.reducer.abort()
        self.gatherer.drop_all()
        self.hooks.abort()
        for part in self.parts:
            part.aborted()
        self._end_step()

    @contextmanager
    def evaluation(self, anchor: bool = True) -> Iterator[None]:
        """Run forwards without gradient between steps. Training continues bit for bit as without them.

        Every rank runs the same modules as often: who has fewer texts to generate goes on with an input of no
        consequence. Raises RuntimeError, which names the unit, where ranks differ.

        anchor: with outer steps the parameters are the anchor, else this replica's own.
        """
        self._between_steps("evaluation()")
        program = self.gatherer.program
        with self.outer.reading() if self.outer is not None and anchor else nullcontext():
            program.open(())
            program.enter(Segment(EVALUATION))
            try:
                with torch.no_grad():
                    yield
                self.agreement.end_evaluation()
            finally:
                program.leave()
                self.gatherer.drop_all()

    @contextmanager
    def gathered(self, module: nn.Module | None = None, write: bool = False) -> Iterator[None]:
        """Gather full parameters (of ``module``'s units; by default all) between steps, to read or, with ``write``,
        to write.

        This is collective, and each rank must write the same values: its slices of them become the master weights.
        With ``write``, writes are kept, also through ``.data``, and if the block then raises. If a parameter with
        rounded weights is written in part, the rest of its rounded values becomes master weights too. Each end of
        such a block takes one pass over the values and no memory of their size. Without ``write`` a write through
        ``.data`` is not seen, and is lost on some layouts. Clone values that must outlive the block: a numpy view of
        a parameter would pin its storage, which is then freed. Raises RuntimeError when the block ends, for a write
        without ``write`` (``begin_step`` is then refused until a block with it has ended), for ranks that wrote
        different values, and for a parameter that got other data. With outer steps nothing can be written: the next
        one would pull it back.
        """
        self._between_steps("gathered()")
        if write and self.policy.outer is not None:
            raise RuntimeError(
                "gathered(write=True) with outer steps: the next one would pull the weights back to the "
                "anchor; write before zero.shard, or load a checkpoint"
            )
        wanted = {id(p) for p in (module or self.module).parameters()}
        units = [u for u in self.units if any(id(p) in wanted for p in u.params.values())]
        held: list[Unit] = []
        try:
            for unit in units:
                if not unit.weights.pinned:
                    self.gatherer.ensure(unit)
                unit.weights.pin(write)
                held.append(unit)
            yield
        finally:
            for unit in held:
                unit.weights.unpin(write)
            self.gatherer.drop_all()
        self._check_written(units, write)

    def invalidate(self, anchored: bool = False) -> None:
        """Make every copy stale: the master weights were changed from outside (a checkpoint was loaded).

        Under the delta refresh R was loaded with the weights (``records.load_records``) and continues from there.
        anchored: the outer steps' state was loaded with them; else these begin anew from the master weights.
        """
        for unit in self.units:
            unit.weights.outdate()
            if unit.delta:
                unit.weights.refreshed()
        if self.outer is not None and not anchored:
            self.outer.begin()

    def refresh(self) -> None:
        """Bring every P copy up to date now, not at the next use. This is collective, between steps.

        Under the delta refresh call this before a save: checkpoints hold R as the weights.
        """
        self._between_steps("refresh()")
        for unit in self.units:
            if unit.weights.stale:
                self.gatherer.ensure(unit)
                self.gatherer.drop_all()  # one unit's full parameters at a time

    def state(self) -> dict[str, Any]:
        """Return the rest of a checkpoint's state, in JSON types: counters."""
        return {name: value for part in self.parts for name, value in part.state().items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore ``state`` after the weights were loaded."""
        for part in self.parts:
            part.load_state(state)

    # -- what it tells ---------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups. Set ``group["lr"]`` (or its weight decay) on every rank alike, between steps."""
        return self.optimizer.torch.param_groups

    @property
    def divisor(self) -> float:
        """The divisor of the gradients of the last step that was opened."""
        return self.norm.divisor

    @property
    def by_matrix(self) -> bool:
        """Whether the optimizer steps whole matrices."""
        return self.optimizer.matrices is not None

    @property
    def micro_batches(self) -> int:
        """How many micro-batches the last step had that was opened."""
        return self.reducer.micro_batches

    @property
    def lanes(self) -> Sequence[Lane]:
        """The lanes on which chains move data, by priority."""
        return self.hooks.lanes

    @property
    def exchange_hop(self) -> str:
        """The name of the waits in the one exchange of a step."""
        return self.scalars.hop

    @property
    def segment_now(self) -> Segment | None:
        """The segment that runs now."""
        return self.gatherer.program.current

    @property
    def units_now(self) -> list[str]:
        """The names of the units that a forward uses now."""
        return [unit.name for unit in self.units if unit.weights.active]

    @property
    def position(self) -> tuple[int, int]:
        """A value that changes with every module that runs: the place in the step's program and in the segment."""
        return self.gatherer.program.position

    def observe_rounding(self, observer: Observer | None) -> None:
        """Show every unit's quantised messages to the observer from now on. It keeps none of the tensors."""
        self.rounding.observer = observer

    # -- parts of them ---------------------------------------------------------------------------

    def _plain_loop(self, micro_batches: int) -> list[Segment]:
        parts = range(len(self.hooks.parts))
        once = [Segment(FORWARD, part) for part in parts] + [
            Segment(BACKWARD, part) for part in reversed(parts)
        ]
        return once * micro_batches

    def _between_steps(self, call: str) -> None:
        """Raise RuntimeError inside a step. Gathers wait for changes of the weights since the last step."""
        if self.hooks.micro_batches:
            raise RuntimeError(f"{call} inside a step: call step() first")
        self.gathers.follow()

    def _check_parameters(self) -> None:
        # They are hidden: a look at each takes a tenth of the time so.
        with torch._C.DisableTorchFunctionSubclass():
            for unit in self.units:
                for binding in unit.weights.bindings:
                    binding.check_place()
                unit.weights.check_unwritten("since the last step", WRITING)
                now = tuple(n for n, p in unit.params.items() if p.requires_grad)
                if now != unit.trainable:
                    changed = sorted(set(now) ^ set(unit.trainable))
                    raise RuntimeError(
                        f"requires_grad of {changed[0]} changed after zero.shard: freeze parameters before, or shard "
                        "anew"
                    )

    def _check_written(self, units: Sequence[Unit], write: bool) -> None:
        """Raise RuntimeError if a ``gathered`` block that has ended changed these units illegally."""
        for unit in units:
            for binding in unit.weights.bindings:
                binding.check_place()
            if not unit.weights.writers:  # else a block around this one may write
                unit.weights.check_unwritten("inside gathered()", WRITING)
        for alike in by_axes(units) if write else ():
            if alike[0].axes.axes:
                self._check_written_alike(alike)

    def _check_written_alike(self, units: Sequence[Unit]) -> None:
        """Raise RuntimeError if ranks along the axes of these units, which are the same, wrote different values."""
        seen = torch.tensor([each for unit in units for each in unit.weights.seen], device=self.mesh.device)
        names = [(slot.name, unit.name) for unit in units for slot in unit.layout.slots]
        for at in unlike(self.mesh, units[0].axes, seen):
            raise RuntimeError(
                "ranks wrote different values into parameter {!r} of unit {!r} inside gathered(write=True), and each "
                "keeps its slices of its own: broadcast them, or draw them from one seed".format(*names[at])
            )

    def _reduce(self, call: str) -> None:
        """Complete the reductions of the step's gradients, once. No collective is in flight afterwards."""
        self.hooks.check_done(call)
        if self.reduced:
            return
        if self.mesh.ends is not None:
            self.reducer.join_ends(self.mesh.ends)
        self.reducer.finish()
        self.gatherer.drop_all()  # what ran ahead and was not used may still be reading the master weights

    def _sum_partial(self) -> None:
        """Complete the sums of the step's gradients over tensor-parallel ranks, once, after the reductions."""
        if not self.reduced:
            with self.arena.frame(self.mesh.device) as frame:
                sum_partial(self.optimizer.runs, self.mesh.tp, frame, self.traffic, self.waits)
        self.reduced = True

    def _whole_gradient(self, unit: Unit) -> torch.Tensor:
        """Return the unit's gradients [n], divided, in at least fp32. Collective over the axes that cut states."""
        os, layout = unit.axes.os, unit.layout
        held = torch.cat([rows.view(-1) for rows in unit.gradients.slice.rows(os, 1)])
        for axis in reversed(unit.axes.axes[:os]):  # slices nest: the innermost axis varies slowest
            own, held = held, held.new_empty(axis.size * held.numel())
            with waiting:
                all_gather_flat(held, own, group=axis.gather_group)
        whole = Slice(layout, held.new_empty(layout.numel), 0)
        slices = held.view(-1, layout.level_numel(os))
        regions = whole.rows(0, len(slices))
        for region, part in zip(regions, slices.split([r.shape[1] for r in regions], 1), strict=True):
            region.copy_(part)
        return whole.buffer.div_(self.divisor)

    def _update(self, factor: float) -> None:
        """Update the master weights by the gradients times ``factor``."""
        for each in self.matrices:
            each.step(factor)
        self.optimizer.update(factor, self.rounding)
        for unit in self.units:
            unit.weights.outdate()

    def _end_step(self) -> None:
        for unit in self.units:
            if unit.lifetime == "step":
                unit.weights.drop_copy()
        self.reduced = False
        self.hooks.close_step()


def by_axes(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return the units in groups that lie on the same axes, one unit at least in each."""
    every = dict.fromkeys(unit.axes for unit in units)
    return [[unit for unit in units if unit.axes is axes] for axes in every]
