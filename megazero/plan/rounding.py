"""What rounding costs in tokens, by what others measured at size: final losses with rounded gradients and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

from megazero.comm.wire import Codecs, Coding
from megazero.mesh.levels import INTRA

# What the number of tokens adds to a loss (Hoffmann et al. 2022): DATA_TERM / tokens ** DATA_POWER nats.
DATA_TERM, DATA_POWER = 410.7, 0.28


@dataclass(frozen=True)
class PublishedLoss:
    """Losses of one model, in nats per token: of exact messages, and of others by name."""

    paper: str
    model: str
    parameters: float
    tokens: float
    exact: float
    losses: Mapping[str, float]

    def gap(self, name: str) -> float:
        """Return how far a loss is above exact, in % of it."""
        return 100 * (self.losses[name] / self.exact - 1)

    def least_speed(self, name: str) -> float:
        """Return how much faster steps must be before they gain: exact messages need so many times fewer tokens."""
        reached = DATA_TERM / self.tokens**DATA_POWER
        behind = reached + max(0.0, self.losses[name] - self.exact)
        return (behind / reached) ** (1 / DATA_POWER)


INT4, HADAMARD = "INT4 gradients", "INT4 gradients, Hadamard"
DELTA = "INT4 gradients, Hadamard; INT4 of differences"
FIRST_HALF, NO_INT4 = "INT4 gradients in the first half", "no INT4"
# Wang et al. 2023 (arXiv 2306.10209), Table 5: hpz and INT8 weights throughout.
ZEROPP = PublishedLoss(
    "ZeRO++", "350M", 350e6, 30e9, 2.121762, {INT4: 2.165584, FIRST_HALF: 2.134013, NO_INT4: 2.121653}
)
# Jia et al. 2024 (arXiv 2410.15526), Table 1, and the scripts beside it: 80,000 iterations of 256 samples of 2,048.
SDP4BIT = tuple(
    PublishedLoss("SDP4Bit", model, numel, 80_000 * 256 * 2048, exact, {INT4: a, HADAMARD: b, DELTA: c})
    for model, numel, exact, a, b, c in (
        ("125M", 125e6, 2.29392, 2.30479, 2.29528, 2.29590),
        ("350M", 350e6, 2.08719, 2.09551, 2.08912, 2.08964),
        ("1.3B", 1.3e9, 1.92774, 1.95075, 1.93134, 1.93238),
    )
)


def tokens_needed(codecs: Codecs[Coding], parameters: float) -> float | None:
    """Return how many times the tokens of exact messages a run with these needs for the same loss.

    It is that of the published model nearest in size. None: nobody published such messages at size.
    """
    nearest = min(SDP4BIT, key=lambda each: abs(log(each.parameters / parameters)))
    weights = nearest.least_speed(DELTA) / nearest.least_speed(HADAMARD) if codecs.delta else 1.0
    if codecs.weights is not None and not codecs.delta and codecs.weights.bits < 8:
        return None
    inside = codecs.gradients.get(INTRA)
    rounded = (coding for link, coding in codecs.gradients.items() if link != INTRA)
    across = min(rounded, key=lambda coding: coding.bits, default=None)
    if across is None:
        return weights if inside is None else None
    if across.bits != 4 or (inside is not None and inside.bits not in (4, 8)):
        return None
    if inside is not None and inside.bits == 4:  # both hops, as ZeRO++ rounds them
        return ZEROPP.least_speed(INT4) * weights
    return nearest.least_speed(HADAMARD if across.hadamard else INT4) * weights
