"""Reading an engine from outside: full gradients and weights by name, on every rank (tests only)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megazero.zero import StepPart


def local_slices(engine, level_buffer):
    """[(name, first flat element, values)] of this rank's OS slices; ``level_buffer(unit, compact a, b)``."""
    out = []
    for unit in engine.units:
        for slot, low, high, at in unit.layout.ranges(unit.axes.os):
            values = level_buffer(unit, at, at + high - low)
            if values is not None:
                out.append((slot.name, low, values.clone()))
    return out


def _grad_slice(unit, a, b):
    if unit.gradients.grad is None:
        return None
    inside = unit.layout.within(unit.axes.os, unit.axes.g)
    for piece in inside:
        if piece.compact <= a < piece.compact + piece.numel:
            start = piece.start + a - piece.compact
            return unit.gradients.grad[start : start + b - a]
    raise AssertionError


class Capture(StepPart):
    """Puts every step's divided, unclipped gradients, as slices, into ``store['slices']``."""

    def __init__(self, engine, store: dict):
        self.engine, self.store = engine, store

    def read(self, rows, sums):
        slices = local_slices(self.engine, _grad_slice)
        self.store["slices"] = [(n, low, v / self.engine.divisor) for n, low, v in slices]
        return {}


def capture_gradients(engine, store: dict):
    """Make the next steps put their divided, unclipped gradients, as slices, into ``store['slices']``."""
    engine.join(Capture(engine, store))


def assemble(slices, shapes: dict) -> dict:
    """Full tensors by name from every rank's slices; every element must have been given."""
    every = [slices]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, slices)
    full = {
        n: torch.full((torch.Size(s).numel(),), torch.nan, dtype=torch.float64) for n, s in shapes.items()
    }
    for part in every:
        for name, low, values in part:
            full[name][low : low + values.numel()] = values.double()
    return {n: t.view(shapes[n]) for n, t in full.items()}


def weights(engine) -> dict:
    """Master weights by name, full tensors (one tensor-parallel rank)."""
    shapes = {s.name: s.shape for u in engine.units for s in u.layout.slots}
    return assemble(local_slices(engine, lambda u, a, b: u.master.value[a:b]), shapes)
