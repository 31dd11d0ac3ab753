"""A parameter that the first and the last pipeline stage share (tied embeddings): one sum, once per step.

Each end holds it in a unit of its own, of one name and one layout, and reduces its own gradients as any unit's. Then
the ends exchange their OS slices. Both add up the same decoded messages, so masters, moments and what refreshes send
(noise goes by name and element) stay the same bits at both.
"""

from __future__ import annotations

import torch

from megazero.comm.codec import Identity
from megazero.comm.hops import start_gather
from megazero.comm.lane import Chain, Leg
from megazero.comm.traffic import Traffic
from megazero.mesh.mesh import Axis
from megazero.zero.rounding import GRADIENTS, Rounding
from megazero.zero.unit import Unit


def ends_plan(ends: Axis) -> tuple[Leg, ...]:
    return (Leg(ends.name, f"reduce_{ends.link.removesuffix('_node')}"),)


def sum_ends(unit: Unit, ends: Axis, exact: bool, rounding: Rounding, traffic: Traffic) -> Chain:
    """Both ends' sums into this rank's OS slice of ``grad``, in the codec of gradients for the ends' link."""
    assert unit.grad is not None
    codec = (None if exact else unit.codecs.gradients(ends.link)) or Identity(unit.sum_dtype)
    rows = unit.regions_of(unit.grad, unit.levels.os, unit.levels.g, 1)
    start = unit.layout.pieces(unit.levels.os)[0].start
    # By end, not by rank: replicas of an end hold the same sum and must send the same bits.
    own = codec.encode(*rows, noise=rounding.noise(unit, f"end {ends.index}", start))
    if rounding.measures(unit, codec):
        sent = [torch.empty_like(r) for r in rows]
        codec.decode(own, *sent)
        rounding.add(unit, codec, GRADIENTS, rows[0], sent[0])
    both = own.new_empty(2, own.shape[1])
    yield start_gather(ends, both.view(-1), own.reshape(-1), "reduce", traffic)
    first, *rest = (r.view(-1) for r in rows)
    codec.decode_sum(both, first, False, *rest)
