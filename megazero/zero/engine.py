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

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from megazero.comm.hops import Traffic
from megazero.comm.lane import Lane
from megazero.comm.timing import Waits
from megazero.kernels.arena import Arena
from megazero.mesh.mesh import Mesh
from megazero.zero.axes import DataAxes
from megazero.zero.build import UnitPlan
from megazero.zero.context import Context
from megazero.zero.gather import Gatherer
from megazero.zero.grad_norm import OWN, Rows, StepScalars, sum_partial
from megazero.zero.hooks import Hooks
from megazero.zero.matrix_updates import MatrixUpdates
from megazero.zero.optimizer import SliceOptimizer, Traits, clip_factor
from megazero.zero.outer import Met, OuterSteps
from megazero.zero.policy import Policy
from megazero.zero.program import BACKWARD, EVALUATION, FORWARD, Agreement, IssueHash, Segment
from megazero.zero.reduce import Reducer
from megazero.zero.rounding import GRADIENTS, KINDS, WEIGHTS, Rounding, commit_residual, unit_names
from megazero.zero.unit import Unit

WRITING = "write inside `with engine.gathered(write=True)`, the same values on every rank"


@dataclass(frozen=True)
class StepInfo:
    """grad_norm: global norm of the divided gradients before clipping. skipped: it was not finite.
        Both are those of this rank's outer replica.

    sampled: the name of the unit whose rounding was measured. errors: ||sent - exact|| / ||exact|| over all ranks
        of its 'weights' and 'gradients', each only if it was sent quantised. fallbacks: one line for each unit
        whose error was above the policy's bound. It sends exactly from the next step on. scalars: what every rank
        gave to ``step``, by rank. replica_norms: the norms of all outer replicas. outer_norm, outer_drift: after an
        outer step, those of ``outer.Met``.
    """

    grad_norm: float
    skipped: bool
    sampled: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    scalars: Rows = ()
    replica_norms: tuple[float, ...] = ()
    outer_norm: float | None = None
    outer_drift: float | None = None

    @property
    def mean_norm(self) -> float:
        """The mean of the replicas' norms, the same on all ranks; not finite if one of them is not."""
        return sum(self.replica_norms) / len(self.replica_norms)

    @property
    def updated_norm(self) -> float | None:
        """The mean of the norms of those replicas that made an update; None if none did."""
        finite = [norm for norm in self.replica_norms if math.isfinite(norm)]
        return sum(finite) / len(finite) if finite else None

    @property
    def skips(self) -> int:
        """How many replicas made no update."""
        return sum(not math.isfinite(norm) for norm in self.replica_norms)


class Engine:
    """``zero.shard`` makes an engine. It owns the module's parameters from then on."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        policy: Policy,
        plan: UnitPlan,
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
        self.issued = IssueHash()
        self.arena = Arena()
        for unit in self.units:
            unit.arena = self.arena
        names = unit_names(mesh, self.units)
        self.rounding = Rounding(policy.seed, mesh.rank, mesh.device, self.arena, names)
        self.waits = Waits(mesh.device, timed)
        self.agreement = Agreement(mesh, self.units, self.issued)
        self.scalars = StepScalars(mesh, self.waits, partial(self.agreement.check, failed=True))
        self.gathers.overdue = self.reductions.overdue = self.agreement.check
        self.fallen: dict[str, list[str]] = {}  # units of all stages that send exactly, and which kinds
        self.exact_gradients = False  # set between steps: gradient codecs are off from the next step on
        context = Context(policy, self.rounding, traffic, self.issued, self.arena)
        needing = sum(bool(units) for _, units in plan.needs)
        self.gatherer = Gatherer(self.units, needing, context, self.gathers)
        self.reducer = Reducer(self.units, context, self.reductions)
        self.matrices = MatrixUpdates(self.units, traits, optimizer, mesh.tp, context, self.reductions)
        self.hooks = Hooks(module, plan, self.gatherer, self.reducer)
        self.outer: OuterSteps | None = None
        is_first_end = mesh.ends is None or mesh.ends.index == 0
        self.counted = optimizer.counted((mesh.tp.index, mesh.tp.size), is_first_end)
        if policy.outer is not None:
            self.outer = OuterSteps(
                self.units, policy.outer, mesh, context, self.reductions, self.counted, timed
            )
            self.outer.away.overdue = self.agreement.check
            self.hooks.lanes.append(self.outer.away)
        self.divisor = 1.0

    # -- the user's verbs ------------------------------------------------------------------------

    def begin_step(
        self, micro_batches: int = 1, divisor: float = 1.0, program: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Open a step of ``micro_batches`` backwards per rank; gradients are divided by ``divisor`` once.

        divisor: includes the loss scale, where losses are scaled; the norm and error feedback see divided gradients.
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
        self.divisor = self.rounding.divisor = float(divisor)
        self.reducer.micro_batches, self.reducer.exact = micro_batches, self.exact_gradients
        for unit in self.units:
            unit.begin_step()
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

    def step(self, scalars: torch.Tensor | None = None) -> StepInfo:
        """Finish the reductions, take the global norm, clip, and update the master weights.

        scalars: numbers of this rank, 1-D on the mesh's device, equally many on every rank (a loss, say). They travel
            with the norm, and StepInfo.scalars has those of all ranks. On CUDA the host waits once per step for both.

        A non-finite norm skips the update on every rank. Raises RuntimeError if the number of backwards differs from
        begin_step's.
        """
        self.hooks.check_done()
        if self.mesh.ends is not None:
            self.reducer.join_ends(self.mesh.ends)
        self.reducer.wait()
        self.gatherer.drop_all()  # what ran ahead and was not used may still be reading the master weights
        with self.timed("optimizer"):
            self._open_scalars(scalars)
        # Not in the optimizer's time: here ranks wait for slower ones, and on CUDA the host for the backward's end.
        self.scalars.exchange(self.traffic)
        whole, errors, given = self.scalars.read()
        met = Met((self.divisor,))
        if self.outer is not None:
            met, given = self.outer.read(given)
        norms = tuple(n / d for n, d in zip(whole, met.divisors, strict=True))
        norm = norms[self.mesh.replica]
        skipped = not math.isfinite(norm)
        if not skipped:
            with self.timed("optimizer"):
                self.optimizer.scale(clip_factor(norm, self.clip_norm, self.divisor))
                self.matrices.step()
                self.optimizer.update(self.rounding)
        sampled = self.rounding.sampled
        assert sampled is not None
        self._end_step(updated=not skipped)
        if self.outer is not None:
            self.outer.count()
        fallbacks = tuple(self._fall_back(sampled, errors))
        return StepInfo(norm, skipped, sampled, errors, fallbacks, given, norms, met.norm, met.drift)

    def abort_step(self) -> None:
        """Abort the open step on every rank (after an exception). Its gradients are discarded."""
        self.reducer.abort()
        self.gatherer.drop_all()
        self.hooks.abort()
        self.issued.take()  # ranks may have been broken off at different places
        self.rounding.abort()
        self._end_step(updated=False)

    @contextmanager
    def evaluation(self, anchor: bool = True) -> Iterator[None]:
        """Run forwards without gradient between steps. Training continues bit for bit as without them.

        Every rank runs the same modules as often: who has fewer texts to generate goes on with an input of no
        consequence. Raises RuntimeError, which names the unit, where ranks differ.

        anchor: with outer replicas the parameters are the anchors, else each replica's own.
        """
        self._between_steps("evaluation()")
        program = self.gatherer.program
        with (
            self.outer.evaluated() if self.outer and anchor else nullcontext(),
            self.rounding.unmeasured() if self.outer else nullcontext(),
        ):
            program.open(())
            program.enter(Segment(EVALUATION))
            try:
                with torch.no_grad():
                    yield
                self.agreement.end_evaluation(self.mesh)
            finally:
                program.leave()
                self.gatherer.drop_all()

    @contextmanager
    def gathered(self, module: nn.Module | None = None, write: bool = False) -> Iterator[None]:
        """Gather full parameters (of ``module``'s units; by default all) between steps, to read or, with ``write``,
        to write.

        This is collective, and each rank must write the same values: its slices of them become the master weights.
        Writes are kept, also through ``.data``, and also if the block then raises. If a parameter with rounded
        weights is written in part, the rest of its rounded values becomes master weights too. Each end of the block
        takes one pass over the values and no memory of their size. Clone values that must outlive the block: a numpy
        view of a parameter would pin its storage, which is then freed. Raises RuntimeError when the block ends, for a
        write without ``write`` (``begin_step`` is then refused until a block with it has ended), for ranks that wrote
        different values, and for a parameter that got other data. With outer replicas nothing can be written: the
        next outer step would pull it back.
        """
        self._between_steps("gathered()")
        if write and self.outer is not None:
            raise RuntimeError(
                "gathered(write=True) with outer replicas: the next outer step would pull the weights back to the "
                "anchor; write before zero.shard, or load a checkpoint"
            )
        wanted = {id(p) for p in (module or self.module).parameters()}
        units = [u for u in self.units if any(id(p) in wanted for p in u.params.values())]
        held: list[Unit] = []
        try:
            for unit in units:
                if unit.pinned:
                    unit.take_written()  # in a block around this one
                else:
                    self.gatherer.ensure(unit)
                    unit.note_values()
                unit.pinned += 1
                unit.writers += write
                held.append(unit)
            yield
        finally:
            for unit in held:
                unit.take_written()
                unit.pinned -= 1
                unit.writers -= write
            self.gatherer.drop_all()
        self._check_written(units, write)

    def invalidate(self, anchored: bool = False) -> None:
        """Make every copy stale: the master weights were changed from outside (a checkpoint was loaded).

        Moments that a load has filled are encoded where they are kept so. Under the delta refresh R was loaded with
        the weights (``records.load_records``) and continues from there. anchored: the outer steps' state was loaded
        with them; else these begin anew from the master weights.
        """
        self.optimizer.take_loaded()
        for unit in self.units:
            unit.outdate()
            if unit.delta:
                unit.copy_version = unit.master_version
        if self.outer is not None and anchored:
            self.outer.note_anchors()
        elif self.outer is not None:
            self.outer.begin()

    def refresh(self) -> None:
        """Bring every P copy up to date now, not at the next use. This is collective, between steps.

        Under the delta refresh call this before a save: checkpoints hold R as the weights.
        """
        self._between_steps("refresh()")
        for unit in self.units:
            if unit.stale:
                self.gatherer.ensure(unit)
                self.gatherer.drop_all()  # one unit's full parameters at a time

    def settle(self) -> None:
        """Wait for what is on its way between outer replicas, which arrives in its step all the same.

        Call this before the process group ends, if ``Outer.delay`` is above 0. It is collective, between steps.
        """
        if self.outer is not None:
            self.outer.settle()

    def state(self) -> dict[str, Any]:
        """Return the rest of a checkpoint's state, in JSON types: counters for noise, units that fell back."""
        outer = {} if self.outer is None else {"outer": self.outer.state()}
        return {"updates": self.rounding.updates, "fallen_back": self.fallen, **outer}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore ``state`` after the weights were loaded. Names of units that are not here are ignored.

        The outer steps' part is restored before (``OuterSteps.load_state``).
        """
        self.rounding.updates = int(state["updates"])
        for name, kinds in state["fallen_back"].items():
            for kind in kinds:
                self._send_exactly(name, kind)

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
        with (
            torch._C.DisableTorchFunctionSubclass()
        ):  # they are hidden: a look at each takes a tenth of the time so
            for unit in self.units:
                for binding in unit.bindings:
                    binding.check_place()
                unit.check_unwritten("since the last step", WRITING)
                now = [n for n, p in unit.params.items() if p.requires_grad]
                if now != unit.trainable:
                    changed = sorted(set(now) ^ set(unit.trainable))
                    raise RuntimeError(
                        f"requires_grad of {changed[0]} changed after zero.shard: freeze parameters before, or shard "
                        "anew"
                    )

    def _check_written(self, units: Sequence[Unit], write: bool) -> None:
        """Raise RuntimeError if a ``gathered`` block that has ended changed these units illegally."""
        for unit in units:
            for binding in unit.bindings:
                binding.check_place()
            if not unit.writers:  # else a block around this one may write
                unit.check_unwritten("inside gathered()", WRITING)
        for axes in dict.fromkeys(unit.axes for unit in units) if write else ():
            if axes.inside:
                self._check_written_alike(axes, [unit for unit in units if unit.axes is axes])

    def _check_written_alike(self, axes: DataAxes, units: Sequence[Unit]) -> None:
        """Raise RuntimeError if ranks along the axes of these units wrote different values."""
        seen = torch.tensor([each for unit in units for each in unit.seen], device=self.mesh.device)
        rows = self.mesh.gather_along(axes.inside, seen)
        names = [(slot.name, unit.name) for unit in units for slot in unit.layout.slots]
        for at in (rows != rows[0]).any(0).nonzero().flatten().tolist():
            raise RuntimeError(
                "ranks wrote different values into parameter {!r} of unit {!r} inside gathered(write=True), and each "
                "keeps its slices of its own: broadcast them, or draw them from one seed".format(*names[at])
            )

    def _open_scalars(self, extra: torch.Tensor | None) -> None:
        """Write this rank's row: norm over unique slices, hash of what was issued, rounding errors, caller's own."""
        with self.arena.frame(self.mesh.device) as frame:
            sum_partial(self.optimizer.runs, self.mesh.tp, frame, self.traffic, self.waits)
        if self.outer is not None:
            self.outer.scalars[-1].fill_(self.divisor)
        row = self.scalars.open(self.outer.scalars if self.outer else None, extra)
        self.optimizer.squared_norm(self.counted, out=row[0])
        row[1].fill_(float(self.issued.take()))
        self.rounding.take(out=row[2:OWN])

    def _send_exactly(self, name: str, kind: str) -> None:
        if name in self.rounding.names:
            kinds = {*self.fallen.get(name, ()), kind}
            self.fallen[name] = [k for k in KINDS if k in kinds]
        for unit in self.units:
            if unit.name == name:
                unit.send_exactly(kind)

    def _fall_back(self, name: str, errors: Mapping[str, float]) -> Iterator[str]:
        """Switch units above their bound to exact messages. All ranks have the same errors and decide alike."""
        bounds = {WEIGHTS: self.policy.weight_error_bound, GRADIENTS: self.policy.gradient_error_bound}
        for kind, error in errors.items():
            bound = bounds[kind]
            if bound is not None and error > bound and kind not in self.fallen.get(name, ()):
                self._send_exactly(name, kind)
                yield (
                    f"{kind} of unit {name!r}: relative rounding error {error:.3g} is above the bound "
                    f"{bound:g}; exact from the next step on"
                )

    def _end_step(self, updated: bool) -> None:
        for unit in self.units:
            if unit.lifetime == "step":
                unit.drop_copy()
            if updated:
                unit.outdate()
                exact, updates = self.reducer.exact, self.rounding.updates + 1
                commit_residual(unit, self.divisor, exact, updates)
        self.rounding.updates += int(updated)
        self.hooks.close_step()
