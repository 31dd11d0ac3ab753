"""A parameter that the first and the last pipeline stage share (tied embeddings): it is summed once per step.

Each end holds it in a unit of its own, with the same name and layout, and reduces its own gradients as any
unit's. Then the ends exchange their OS slices. Both add up the same decoded messages, so masters, moments and
what refreshes send (noise goes by name and element) stay the same bits at both.
"""

from __future__ import annotations

from megazero.comm.codec import Identity, decoded, encoded
from megazero.comm.hops import start_gather
from megazero.comm.lane import Chain, Leg
from megazero.mesh.mesh import Axis
from megazero.zero.context import Context, leg
from megazero.zero.layout import Slice
from megazero.zero.rounding import GRADIENTS
from megazero.zero.unit import Unit


def tied_legs(ends: Axis) -> tuple[Leg, ...]:
    """Return the one collective of ``sum_ends``."""
    return (leg("reduce", ends),)


def sum_ends(unit: Unit, ends: Axis, exact: bool, context: Context) -> Chain:
    """Sum both ends into this rank's OS slice of ``grad``, in the codec of gradients for the ends' link."""
    assert unit.grad is not None
    codec = (None if exact else unit.codecs.gradients(ends.link)) or Identity(unit.sum_dtype)
    rounding = context.rounding
    rows = Slice(unit.layout, unit.grad, unit.levels.g).rows(unit.levels.os, 1)
    start = unit.layout.pieces(unit.levels.os)[0].start
    # By end, not by rank: replicas of an end hold the same sum and must send the same bits.
    noise = rounding.noise(unit, f"end {ends.index}", start)
    with context.frame() as frame:
        own = encoded(codec, rows, frame.take, noise)
        rounding.measure(unit, codec, GRADIENTS, rows[0], lambda take: decoded(codec, own, rows, take)[0])
        both = frame.take(2 * own.numel(), own.dtype).view(2, -1)
        yield start_gather(ends, both.view(-1), own.reshape(-1), "reduce", context.traffic)
        first, *rest = (r.view(-1) for r in rows)
        codec.decode_sum(both, first, False, *rest)
