"""The optimizer over slices: any elementwise torch optimizer, or one by matrix (by_matrix.py), with fp32 (at least)
master weights and a global norm.

A run is a contiguous stretch of a unit's compact OS slice whose parameters share optimizer options and
replication. For the optimizer it is one leaf tensor: a view of the master, with .grad a view of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megazero.kernels.noise import Noise
from megazero.zero.by_matrix import MATRIX, ByMatrix
from megazero.zero.elementwise import OnePassAdamW, OptimizerFactory, Probe, make_state
from megazero.zero.rounding import Rounding
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class Traits:
    """What decides which run a parameter belongs to.

    options: the optimizer options of its group, as sorted items (weight_decay 0, for example).
    replicated: several tensor-parallel ranks hold it, and the norm counts it once.
    partial: its gradient is a partial sum over these ranks. frozen: it has no gradient and no update.
    span: how many tensor-parallel ranks in a row hold the same; 0 means all of them.
    matrix: an optimizer by matrix steps it as one. split: the dimension that tensor-parallel ranks cut, if they step
    the whole matrix together; None if each steps what it holds.
    used: the first so many elements take part in the training (None: all). The others, rows that pad a vocabulary,
    stay zero, as no checkpoint holds them. It decides no run: ranks that pad have the runs of the others.
    rounded: messages may round it though it is replicated, as experts are, which are most of a mixture's bytes. There
    is one copy, or its gradients are partial: their sum in rank order is the same bits on every copy.
    """

    options: tuple[tuple[str, Any], ...] = ()
    replicated: bool = False
    partial: bool = False
    frozen: bool = False
    span: int = 0
    matrix: bool = False
    split: int | None = None
    rounded: bool = False
    used: int | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> tuple[tuple[str, Any], ...]:
        """Return the options of its parameter group."""
        return (*self.options, (MATRIX, True)) if self.matrix else self.options

    @property
    def exact(self) -> bool:
        """Whether messages never round it."""
        return self.replicated and not self.rounded

    def shards(self, size: int) -> int:
        """Return how many different parts of the matrix ``size`` tensor-parallel ranks hold."""
        return 1 if self.split is None else size // max(self.span, 1)

    def holders(self, rank: int, size: int) -> range:
        """Return the tensor-parallel ranks of ``size`` that hold what ``rank`` does. The first counts and saves."""
        span = (self.span or size) if self.replicated else 1
        first = rank // span * span
        return range(first, first + span)


@dataclass(frozen=True)
class Run:
    """Covers [start, stop) of the unit's compact OS slice. SliceOptimizer sets ``leaf`` and ``leaf.grad``.

    origin: the region that it lies in, and where it begins there, which is the same in every layout.
    """

    unit: Unit
    traits: Traits
    start: int
    stop: int
    grad_start: int
    origin: tuple[int, int]
    leaf: nn.Parameter

    @cached_property
    def grad(self) -> torch.Tensor:
        """The run's part of the unit's ``grad``, which stays the same buffer."""
        assert self.unit.gradients.grad is not None
        return self.unit.gradients.grad[self.grad_start : self.grad_start + self.stop - self.start]


def make_runs(unit: Unit, traits: Mapping[str, Traits]) -> list[Run]:
    """Cut the OS slice where traits change. Padding goes to the run before it (it stays zero)."""
    layout, axes = unit.layout, unit.axes
    runs = []
    pieces = zip(layout.pieces(axes.os), layout.within(axes.os, axes.g), strict=True)
    for region, (piece, in_grad) in enumerate(pieces):
        for start, stop, mine in layout.runs_of(piece, traits):
            if not mine.frozen:
                inside, leaf = start - piece.compact, nn.Parameter(unit.master.value[start:stop])
                origin = region, piece.start + inside - layout.regions[region][0]
                runs.append(Run(unit, mine, start, stop, in_grad.start + inside, origin, leaf))
    return runs


def scale_gradients(runs: Sequence[Run], factor: float) -> None:
    """Multiply the runs' gradients by ``factor``."""
    if factor != 1.0 and runs:
        torch._foreach_mul_([run.grad for run in runs], factor)


class SliceOptimizer:
    """Owns the runs and the torch optimizer over their leaves, and updates the runs that are no matrices.

    torch: what the factory made, with the groups and the state of all runs. matrices: the same, if it is an optimizer
    by matrix, whose matrices ``MatrixUpdates`` steps; else None. elementwise: it, or the one that steps its rest.
    """

    def __init__(
        self, units: Sequence[Unit], traits: Mapping[str, Traits], factory: OptimizerFactory
    ) -> None:
        self.runs = [run for unit in units for run in make_runs(unit, traits)]
        self._by_slice = [run for run in self.runs if not run.traits.matrix]
        groups: dict[tuple, dict[str, Any]] = {}
        for each in traits.values():  # every rank has every group, even one it holds no slice of
            if not each.frozen:
                groups.setdefault(each.group, {"params": [], **dict(each.group)})
        self._probe: Probe | None = None
        probed = [group for group in groups if (MATRIX, True) not in group]
        if units and probed:
            self._probe = Probe(factory, probed, units[0].sum_dtype, units[0].device)
            self._probe.refuse_unless_elementwise()
        for run in self.runs:
            groups[run.traits.group]["params"].append(run.leaf)
        if not groups:
            groups[()] = {"params": []}
        if not self.runs:  # torch refuses an optimizer without parameters
            next(iter(groups.values()))["params"].append(nn.Parameter(torch.zeros(0)))
        self.torch = factory(list(groups.values()))
        self.matrices = self.torch if isinstance(self.torch, ByMatrix) else None
        self.elementwise = self.torch if self.matrices is None else self.matrices.rest
        marked = next((name for name, each in traits.items() if each.matrix), None)
        if marked is not None and self.matrices is None:
            raise ValueError(
                f"traits say matrix=True of {marked!r}, and {type(self.torch).__name__} is elementwise: leave it "
                "out, or take an optimizer by matrix (zero.Muon)"
            )

    def update(self, factor: float, rounding: Rounding) -> None:
        """Update the master weights that are no matrices, by the gradients times ``factor``.

        An update in one pass multiplies as it goes. rounding: gives the noise that moments in bf16 are rounded with.
        """
        for run in self._by_slice:
            run.leaf.grad = run.grad
        if isinstance(self.elementwise, OnePassAdamW):
            noise: dict[torch.Tensor, Noise] = {}
            if self.elementwise.rounds:
                noise = {
                    r.leaf: rounding.noise(r.unit, f"moments {r.origin[0]}", r.origin[1])
                    for r in self._by_slice
                }
            self.elementwise.step(scale=factor, noise=noise)
        else:
            scale_gradients(self._by_slice, factor)
            self.elementwise.step()
        for run in self._by_slice:
            run.leaf.grad = None

    # -- state, for checkpoints --------------------------------------------------------------------

    def ensure_state(self) -> None:
        """Create the optimizer's state tensors before its first step, without changing weights."""
        if all(self.torch.state.get(r.leaf) for r in self.runs):
            return
        if self._probe is not None:
            self._probe.refuse_unless_from_zeros()
        make_state(self.elementwise)
        if self.matrices is not None:
            self.matrices.make_state()

    def elementwise_state(self, unit: Unit, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the state tensors of the compact OS range [start, stop), which one run holds, by torch's names.

        Nothing is returned where no run holds all of it.
        """
        for run in self.runs:
            if run.unit is unit and run.start <= start and stop <= run.stop:
                own, state = slice(start - run.start, stop - run.start), self.torch.state[run.leaf]
                return {name: value[own] for name, value in state.items() if self._is_elementwise(run, value)}
        return {}

    @staticmethod
    def _is_elementwise(run: Run, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == run.leaf.shape

    def scalars(self) -> dict[str, float]:
        """Return the scalar state (Adam's step count), which is equal over all slices."""
        out: dict[str, float] = {}
        for run in self.runs:
            for name, value in self.torch.state.get(run.leaf, {}).items():
                if not self._is_elementwise(run, value):
                    out.setdefault(name, float(value))
                    assert out[name] == float(value), (name, out[name], float(value))
        for group in self._counting_groups():
            out.setdefault("step", float(group["step"]))
        return out

    def load_scalars(self, scalars: Mapping[str, float]) -> None:
        for run in self.runs:
            state = self.torch.state[run.leaf]
            for name, value in scalars.items():
                if isinstance(state.get(name), torch.Tensor):
                    state[name].fill_(value)
                elif name in state:
                    state[name] = type(state[name])(value)
        for group in self._counting_groups() if "step" in scalars else ():
            group["step"] = type(group["step"])(scalars["step"])

    def _counting_groups(self) -> list[dict[str, Any]]:
        """Return the groups that count steps themselves, as apex's do."""
        return [group for group in self.torch.param_groups if "step" in group]
