"""The optimizer over slices: any elementwise torch optimizer, fp32 (at least) master weights, a global norm.

A run is a contiguous stretch of a unit's compact OS slice whose parameters share optimizer options and
replication. For the optimizer it is one leaf tensor: a view of the master, with .grad a view of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from megazero.kernels.adamw import NOTHING, Refresh
from megazero.zero.elementwise import (
    OptimizerFactory,
    make_state,
    refuse_unless_elementwise,
    refuse_unless_from_zeros,
)
from megazero.zero.one_pass import OnePassAdamW, best_adamw
from megazero.zero.unit import Unit


@dataclass(frozen=True)
class Traits:
    """What decides which run a parameter belongs to.

    options: the optimizer options of its group, as sorted items (weight_decay 0, for example).
    replicated: several tensor-parallel ranks hold it, and the norm counts it once.
    partial: its gradient is a partial sum over these ranks. frozen: it has no gradient and no update.
    span: how many tensor-parallel ranks in a row hold the same; 0 means all of them.
    """

    options: tuple[tuple[str, Any], ...] = ()
    replicated: bool = False
    partial: bool = False
    frozen: bool = False
    span: int = 0

    def holders(self, rank: int, size: int) -> range:
        """Return the tensor-parallel ranks of ``size`` that hold what ``rank`` holds; the first counts and saves
        it."""
        span = (self.span or size) if self.replicated else 1
        first = rank // span * span
        return range(first, first + span)


@dataclass(frozen=True)
class Run:
    """Covers [start, stop) of the unit's compact OS slice. SliceOptimizer sets ``leaf`` and ``leaf.grad``."""

    unit: Unit
    traits: Traits
    start: int
    stop: int
    grad_start: int
    leaf: nn.Parameter

    @property
    def grad(self) -> torch.Tensor:
        assert self.unit.grad is not None
        return self.unit.grad[self.grad_start : self.grad_start + self.stop - self.start]


def make_runs(unit: Unit, traits: Mapping[str, Traits]) -> list[Run]:
    """Cut the OS slice where traits change. Padding goes to the run before it (it stays zero)."""
    layout, levels = unit.layout, unit.levels
    runs = []
    for piece, in_grad in zip(layout.pieces(levels.os), layout.within(levels.os, levels.g), strict=True):
        cuts: list[tuple[int, Traits]] = []
        for slot, _, _, at in layout.ranges_of(piece):
            if not cuts or cuts[-1][1] != traits[slot.name]:
                cuts.append((at, traits[slot.name]))
        ends = [*(start for start, _ in cuts[1:]), piece.compact + piece.numel]
        for (start, mine), stop in zip(cuts, ends, strict=False):  # an all-padding piece has no cut
            if not mine.frozen:
                leaf = nn.Parameter(unit.master[start:stop])
                runs.append(Run(unit, mine, start, stop, in_grad.start + start - piece.compact, leaf))
    return runs


def default_adamw(**options: Any) -> OptimizerFactory:
    """Return a factory of AdamW in the fastest implementation that there is for the weights' device and dtype."""
    return partial(best_adamw, **options)


class SliceOptimizer:
    """Owns the runs and the torch optimizer over their leaves."""

    def __init__(
        self, units: Sequence[Unit], traits: Mapping[str, Traits], factory: OptimizerFactory
    ) -> None:
        self.runs = [run for unit in units for run in make_runs(unit, traits)]
        groups: dict[tuple, dict[str, Any]] = {}
        for each in traits.values():  # every rank has every group, even one it holds no slice of
            if not each.frozen:
                groups.setdefault(each.options, {"params": [], **dict(each.options)})
        self._probe = [(factory, list(groups), unit.sum_dtype, unit.device) for unit in units[:1]]
        for probe in self._probe:
            refuse_unless_elementwise(*probe)
        for run in self.runs:
            groups[run.traits.options]["params"].append(run.leaf)
        if not groups:
            groups[()] = {"params": []}
        if not self.runs:  # torch refuses an optimizer without parameters
            next(iter(groups.values()))["params"].append(nn.Parameter(torch.zeros(0)))
        self.torch = factory(list(groups.values()))
        self._norms = [torch.empty((), dtype=r.leaf.dtype, device=r.leaf.device) for r in self.runs]
        device = units[0].device if units else None
        self._squares = torch.empty(len(self.runs), dtype=torch.float64, device=device)
        self._factor = 1.0  # of the gradients, for an optimizer that scales them as it updates
        self._whole = {unit: runs for unit in units if (runs := self._covering(unit))}

    def _covering(self, unit: Unit) -> list[Run]:
        """Return the runs of the first region of a unit's OS slice, none if they leave something out (frozen)."""
        end = unit.layout.pieces(unit.levels.os)[0].numel
        runs = [run for run in self.runs if run.unit is unit and run.start < end]
        return runs if sum(run.stop - run.start for run in runs) == end else []

    def squared_norm(self, tp: tuple[int, int], count_tied: bool, out: torch.Tensor) -> None:
        """Write the sum of squares of this rank's gradient slices to ``out``, an fp64 scalar.

        tp: this rank's index among the tensor-parallel ranks, and their number. What they replicate counts on the
        first of them. What the pipeline's two ends share counts if ``count_tied``.
        """
        runs = [r for r in self.runs if r.traits.holders(*tp).start == tp[0]]
        runs = [r for r in runs if count_tied or not r.unit.tied]
        squares = self._squares[: len(runs)]
        for run, norm, square in zip(runs, self._norms, squares, strict=False):
            square.copy_(torch.linalg.vector_norm(run.grad, out=norm))
        torch.sum(squares.square_(), 0, out=out)

    def scale(self, factor: float) -> None:
        """Multiply the gradients by ``factor``: now, or with the update where that is one pass."""
        if isinstance(self.torch, OnePassAdamW):
            self._factor = factor
        elif factor != 1.0 and self.runs:
            torch._foreach_mul_([r.grad for r in self.runs], factor)

    def update(self) -> None:
        """Update the master weights. In one pass this also leaves what the next refreshes read (Unit.prepared)."""
        for run in self.runs:
            run.leaf.grad = run.grad
        if isinstance(self.torch, OnePassAdamW):
            self._update_in_one_pass(self.torch)
        else:
            self.torch.step()
        for run in self.runs:
            run.leaf.grad = None

    def _update_in_one_pass(self, optimizer: OnePassAdamW) -> None:
        left = {unit: unit.left_by_updates() for unit in self._whole}
        refresh: dict[torch.Tensor, Refresh] = {
            run.leaf: left[unit].part(run.start, run.stop)
            for unit, runs in self._whole.items()
            for run in runs
        }
        optimizer.step(scale=self._factor, refresh=refresh)
        for unit, each in left.items():
            if each is not NOTHING:
                unit.prepared = unit.master_version + 1

    # -- state, for checkpoints --------------------------------------------------------------------

    def ensure_state(self) -> None:
        """Create the optimizer's state tensors before its first step, without changing weights."""
        if all(self.torch.state.get(r.leaf) for r in self.runs):
            return
        for probe in self._probe:
            refuse_unless_from_zeros(*probe)
        make_state(self.torch)

    def elementwise_state(self, unit: Unit, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the state tensors of the compact OS range [start, stop), which one run holds, by torch's names."""
        run = next((r for r in self.runs if r.unit is unit and r.start <= start and stop <= r.stop), None)
        if run is None:
            return {}
        return {
            name: value[start - run.start : stop - run.start]
            for name, value in self.torch.state[run.leaf].items()
            if isinstance(value, torch.Tensor) and value.shape == run.leaf.shape
        }

    def scalars(self) -> dict[str, float]:
        """Return the scalar state (Adam's step count), which is equal over all slices."""
        out: dict[str, float] = {}
        for run in self.runs:
            for name, value in self.torch.state.get(run.leaf, {}).items():
                if not isinstance(value, torch.Tensor) or value.shape != run.leaf.shape:
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


def clip_factor(norm: float, limit: float | None, divisor: float) -> float:
    """Return what gradients are multiplied by: 1/divisor, and clip/norm where the norm is above the limit.

    norm: the norm of the divided gradients. limit: None or 0 means no clipping.
    """
    clip = min(1.0, limit / (norm + 1e-6)) if limit and math.isfinite(norm) else 1.0
    return clip / divisor
