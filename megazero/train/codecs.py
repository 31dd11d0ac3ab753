"""The codecs of a configuration's formats. The patches of other trainers need these, and no model of megazero's."""

from __future__ import annotations

from megazero import zero
from megazero.comm.codec import Blockwise, Hadamard
from megazero.config.layout.wire import Coding, Wire


def make_codecs(wire: Wire, seed: int = 0) -> zero.Codecs:
    """Return the codecs of the configuration's formats. seed: that of the signs of transforms."""
    return zero.Codecs(
        weights=make_codec(wire.weights, seed),
        gradients_intra=make_codec(wire.gradients_intra, seed),
        gradients_inter=make_codec(wire.gradients_inter, seed),
        delta=wire.delta,
        feedback=wire.feedback,
        feedback_beta=wire.feedback_beta,
        feedback_reset=wire.feedback_reset,
    )


def make_codec(coding: Coding | None, seed: int = 0) -> Blockwise | None:
    if coding is None:
        return None
    transform = Hadamard(coding.hadamard, seed) if coding.hadamard else None
    return Blockwise(coding.bits, coding.block, coding.stochastic, transform=transform)
