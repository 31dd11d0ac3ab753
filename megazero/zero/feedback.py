"""Error feedback (Seide et al. 2014): what rounding a gradient lost is added to the next step's gradient.

A sender keeps what its messages across nodes lost (``Unit.residual``) and adds it before it encodes the next
step's. The loss of a step becomes the residual only when the update is made. Until then it waits in rows of
``grad`` whose sums are not needed here (or, with replicas, in ``Unit.lost``). So a skipped step leaves
residuals as they were, without a second buffer. Residuals are kept in units of the divided gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazero.mesh.grid import INTER
from megazero.mesh.mesh import Axis
from megazero.zero.layout import Slice
from megazero.zero.unit import Unit


def add_residual(unit: Unit, source: Slice, divisor: float) -> None:
    """Add the residual to the gradients that are about to be encoded for the hop across nodes."""
    assert unit.crossing is not None
    held = Slice(unit.layout, unit.open_residual(), unit.crossing).rows(unit.crossing, 1)
    for rows, residual in zip(source.rows(unit.crossing, 1), held, strict=True):
        rows.add_(residual, alpha=divisor)


def lost_slice(unit: Unit) -> Slice:
    """Return where a step's errors wait for its end: at least fp32, compact.

    These are other ranks' rows of ``grad``, whose sums are not needed here. With replicas the way back fills
    those rows, so it is ``unit.lost``.
    """
    assert unit.grad is not None and unit.crossing is not None
    if unit.levels.all == unit.levels.os:
        return Slice(unit.layout, unit.grad, unit.levels.g)
    if unit.lost is None:
        unit.lost = torch.empty_like(unit.open_residual())
    return Slice(unit.layout, unit.lost, unit.crossing)


def commit_residual(unit: Unit, axes: Sequence[Axis], divisor: float, exact: bool) -> None:
    """After an update, make what the step's messages lost, divided as the gradients were, the new residual.

    exact: codecs were off in this step. Then, and after a fallback, what was owed has been paid: nothing is
        kept, and raw gradients may go in their own dtype again.
    """
    unit.carry = None
    if exact or unit.codecs.gradients_inter is None:
        unit.residual = unit.lost = None
    if unit.residual is None:
        return
    assert unit.crossing is not None
    unit.residual.zero_()
    errors, residual = lost_slice(unit), Slice(unit.layout, unit.residual, unit.crossing)
    for level in range(unit.crossing + 1, unit.levels.all + 1):
        axis = axes[level - 1]
        if axis.link != INTER:
            continue
        lost, kept = errors.rows(level - 1, axis.size), residual.rows(level - 1, axis.size)
        for new, old in zip(lost, kept, strict=True):
            old.copy_(new).div_(divisor)
            old[axis.index].zero_()
