"""Error feedback (Seide et al. 2014): what rounding of a unit's gradients lost is added to the next step's.

A sender keeps what its messages across nodes lost, and adds it before it encodes the next step's. The loss of a step
becomes the residual only when the update is made. Until then it waits in rows of ``grad`` whose sums are not needed
here (or, with replicas, in ``lost``). So a skipped step leaves residuals as they were, without a second buffer.

Glossary (n: elements of the unit; "compact" is explained in layout.py)
--------
residual  Compact, at least fp32, of level ``axes.crossing``, in units of the divided gradient. Other ranks' rows hold
          the rounding error of this rank's messages across nodes. Own rows, of which nothing is lost, are zero.
lost      As ``residual``, but only with replicas. This step's errors until the step is known to be good. Without
          replicas other ranks' rows of ``grad`` hold them.
carry     Compact [n/OS]. Residuals of another layout, summed over senders, from a load. Replicas hold the same. It is
          added to the next step's sum.
"""

from __future__ import annotations

import torch

from megazero.mesh.grid import INTER
from megazero.zero.form import Form
from megazero.zero.gradients import Gradients
from megazero.zero.layout import Slice


class Feedback:
    """Holds what the rounding of one unit's gradients lost."""

    def __init__(self, form: Form, gradients: Gradients) -> None:
        self.form, self.gradients = form, gradients
        self.residual: torch.Tensor | None = None
        self.lost: torch.Tensor | None = None
        self.carry: torch.Tensor | None = None

    def begin(self, carry: torch.Tensor | None) -> None:
        """Start anew, with a carry if there is one."""
        self.residual = self.lost = None
        self.carry = carry

    def restore(self, residual: torch.Tensor) -> None:
        """Take this rank's own residual, from a load on the layout that saved it."""
        self.open_residual().copy_(residual)
        self.carry = None

    def add_to(self, source: Slice, divisor: float) -> None:
        """Add the residual to the gradients that are about to be encoded for the hop across nodes."""
        crossing = self._crossing
        held = Slice(self.form.layout, self.open_residual(), crossing).rows(crossing, 1)
        for rows, residual in zip(source.rows(crossing, 1), held, strict=True):
            rows.add_(residual, alpha=divisor)

    def pay(self, sums: Slice, divisor: float) -> None:
        """Add the carry to the step's sum."""
        if self.carry is None:
            return
        level = self.form.axes.os
        carried = Slice(self.form.layout, self.carry, level).rows(level, 1)
        for rows, extra in zip(sums.rows(level, 1), carried, strict=True):
            rows.add_(extra, alpha=divisor)

    def errors(self) -> Slice:
        """Return where a step's errors wait for its end: at least fp32, compact.

        These are other ranks' rows of ``grad``, whose sums are not needed here. With replicas the way back fills
        those rows, so it is ``lost``.
        """
        axes = self.form.axes
        if axes.all == axes.os:
            return self.gradients.slice
        if self.lost is None:
            self.lost = torch.empty_like(self.open_residual())
        return Slice(self.form.layout, self.lost, self._crossing)

    def commit(self, divisor: float, exact: bool, updates: int) -> None:
        """After an update, the ``updates``-th, take the step's errors, divided as the gradients were, into the
        residual.

        exact: codecs were off in this step. Then, and after a fallback, the residual has been sent: nothing is kept,
            and raw gradients may travel in their own dtype again.
        """
        codecs, axes = self.gradients.codecs, self.form.axes
        self.carry = None
        if exact or codecs.gradients_inter is None:
            self.residual = self.lost = None
        if self.residual is None:
            return
        if codecs.feedback_reset and updates % codecs.feedback_reset == 0:
            self.residual.zero_()
            return
        errors, residual = self.errors(), Slice(self.form.layout, self.residual, self._crossing)
        for level in range(self._crossing + 1, axes.all + 1):
            axis = axes.axis(level)
            if axis.link != INTER:
                continue
            lost, kept = errors.rows(level - 1, axis.size), residual.rows(level - 1, axis.size)
            for new, old in zip(lost, kept, strict=True):
                for others in (slice(axis.index), slice(axis.index + 1, None)):
                    # A weight of 1 gives the new value to the bit.
                    old[others].lerp_(new[others].div_(divisor), 1.0 - codecs.feedback_beta)
        residual.clear_padding()  # as a checkpoint has it

    @property
    def _crossing(self) -> int:
        assert self.form.axes.crossing is not None
        return self.form.axes.crossing

    def open_residual(self) -> torch.Tensor:
        """Return the residual, which starts as zeros."""
        if self.residual is None:
            numel = self.form.layout.level_numel(self._crossing)
            self.residual = torch.zeros(numel, dtype=self.form.sum_dtype, device=self.form.device)
        return self.residual
