"""A unit's gradients on their way from autograd to their sums. reduce.py moves them between ranks.

Glossary (n: elements of the unit; "compact" is explained in layout.py)
--------
arrived   Gradients of the micro-batch that wait to be staged together.
staging   [n], parameter dtype. One micro-batch's raw gradients on their way to ``grad`` if G > 1. The first gradients
          that are staged take it from the arena; waiting for its reduction frees it.
grad      Compact [n/G], at least fp32. The sum of this step's gradients. After the step's reduction its OS part holds
          the sum over all data-parallel ranks.
"""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import nn

from megazero.kernels.add_to import add_each
from megazero.kernels.arena import Arena, Frame
from megazero.zero.form import Form
from megazero.zero.slices import Slice

# Gradients of a unit wait for each other and are staged in one operation: one at a time, 9 of a small layer took 9
# launches. Large ones do not wait, so that a layer's gradients and its staging are not there at once.
STAGED_BYTES = 32 << 20


class Gradients:
    """Holds the gradients of one unit.

    staged: the frame of the staging. pending: trainable parameters without a gradient in this micro-batch. touched:
    parameters whose part of ``grad`` was written in this step. backwards: how many of this step are complete.
    """

    def __init__(self, form: Form, arena: Arena) -> None:
        self.form, self.arena = form, arena
        self.grad: torch.Tensor | None = None
        self.staging: Slice | None = None
        self.staged: Frame | None = None
        self.pending: set[str] = set()
        self.arrived: dict[str, torch.Tensor] = {}  # arrived_bytes in all
        self.arrived_bytes = 0
        self.touched: set[str] = set()
        self.backwards = 0

    @cached_property
    def slice(self) -> Slice:
        """``grad``, which stays the same buffer."""
        assert self.grad is not None
        return Slice(self.form.layout, self.grad, self.form.axes.g)

    def begin_step(self) -> None:
        """Forget the last step's gradients, and count backwards from 0."""
        form = self.form
        if self.grad is None and form.trainable:
            numel = form.layout.level_numel(form.axes.g)
            self.grad = torch.zeros(numel, dtype=form.sum_dtype, device=form.device)
        self.backwards = 0
        self._forget_arrived()
        self.touched.clear()
        self.pending = set(form.trainable)
        if self.staged is not None:  # of a step that was given up
            self.staged.close()
        self.staging = self.staged = None

    def take(self, name: str, param: nn.Parameter) -> None:
        """Take a parameter's fresh gradient [the parameter's shape and dtype].

        Gradients wait for the unit's others, then move together; ``STAGED_BYTES`` bounds what waits.
        """
        grad = param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {name!r} of unit {self.form.name!r} is {grad.layout}, and what is "
                "reduced and sharded is dense: leave sparse=True out, or give the parameter a hook first: "
                "register_hook(lambda gradient: gradient.to_dense())"
            )
        self.arrived[name], param.grad = grad, None
        self.arrived_bytes += grad.nbytes
        self.pending.discard(name)
        if not self.pending or self.arrived_bytes > STAGED_BYTES:
            self._stage()

    def close_micro_batch(self, last: bool) -> tuple[Slice, Frame] | None:
        """Return the staging of a micro-batch whose gradients have all arrived, and the arena's frame it lies in.

        Where G = 1 there is none.

        last: this is the step's last micro-batch. Afterwards the unit waits for the next micro-batch's gradients.
        """
        if self.arrived:
            self._stage()
        if self.form.axes.g or last:
            self._fill_missing()
        handed = None
        if self.staging is not None and self.staged is not None:
            handed = self.staging, self.staged
        self.staging = self.staged = None
        self.pending = set(self.form.trainable)
        self.backwards += 1
        return handed

    def _stage(self) -> None:
        """Move the gradients that have arrived into staging (G > 1), or add them to ``grad`` (G = 1)."""
        if self.form.axes.g:
            if self.staging is None:
                self.staging = self._new_staging()
                self.staging.clear_padding()
            targets = self.staging.parts
        else:
            targets = self.slice.parts
        added = [name for name in self.arrived if name in self.touched]
        copied = [name for name in self.arrived if name not in self.touched]
        if copied:
            torch._foreach_copy_([targets[n] for n in copied], [self.arrived[n] for n in copied])
        if added:
            add_each([targets[n] for n in added], [self.arrived[n] for n in added])
        if not self.form.axes.g:
            self.touched.update(copied)
        self._forget_arrived()

    def _forget_arrived(self) -> None:
        self.arrived.clear()
        self.arrived_bytes = 0

    def _new_staging(self) -> Slice:
        self.staged = self.arena.frame(self.form.device)
        make = partial(Slice, self.form.layout, level=0)
        return self.staged.bind(self.form.layout.numel, self.form.dtype, self.form.name, make)

    def _fill_missing(self) -> None:
        """Let parameters without a gradient add zeros: to staging in every micro-batch, to grad in the last."""
        slots = self.form.slots
        if self.form.axes.g:
            if self.staging is None:
                self.staging = self._new_staging()
                self.staging.buffer.zero_()
                return
            missing, buffer = self.pending | self.form.frozen, self.staging.buffer
        else:
            assert self.grad is not None
            missing, buffer = set(slots) - self.touched, self.grad
            self.slice.clear_padding()  # a block that was not finite came back so with its padding
        for name in missing:
            slot = slots[name]
            buffer[slot.start : slot.start + slot.numel].zero_()
