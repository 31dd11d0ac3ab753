"""What loss.py compares: shard factors and wire formats by name. A new candidate is one more line."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.comm.codec import Blockwise, Codec
from megazero.zero import Codecs

BASELINE = "zero3"


@dataclass(frozen=True)
class Variant:
    """shards: P, G, OS as letters, d for all data-parallel ranks and h for those of a node.

    target: the most by which the mean loss may lie above the baseline's, in percent, at the upper 95% bound; 0: bit
    for bit the same weights; None: reported only.
    """

    shards: str
    codecs: Codecs
    target: float | None = None

    def factors(self, ranks: int, node: int) -> tuple[int, int, int]:
        p, g, os = ({"d": ranks, "h": node}[letter] for letter in self.shards)
        return p, g, os

    @property
    def quantised(self) -> bool:
        return self.codecs != Codecs()


def _crossing(codec: Codec, feedback: bool = False) -> Variant:
    """Exact weights; gradients exact inside a node, in ``codec`` across nodes, once per step."""
    return Variant("hhd", Codecs(gradients_inter=codec, feedback=feedback))


INT8, INT4 = Blockwise(8), Blockwise(4)
VARIANTS: dict[str, Variant] = {
    BASELINE: Variant("ddd", Codecs()),
    "hpz": Variant("hdd", Codecs(), target=0.0),
    "qwz": Variant("hdd", Codecs(weights=INT8), target=0.3),
    "qgz": _crossing(INT4),
    "zeropp-int8": Variant("hhd", Codecs(weights=INT8, gradients_inter=INT4), target=0.5),
    "zeropp": Variant("hhd", Codecs(weights=INT4, gradients_inter=INT4, delta=True), target=0.5),
    # Candidates for the gradients' crossing; qgz is the first of them: INT4 to nearest.
    "int4-stochastic": _crossing(Blockwise(4, stochastic=True)),
    "int4-clip": _crossing(Blockwise(4, clip=8)),
    "int4-feedback": _crossing(INT4, feedback=True),
    "int2": _crossing(Blockwise(2)),
    "int2-clip": _crossing(Blockwise(2, clip=8)),
    "int2-feedback": _crossing(Blockwise(2), feedback=True),
}
DEFAULT = (BASELINE, "hpz", "qwz", "qgz", "zeropp-int8", "zeropp")

# Refresh of one trained master, for the table that is free of run noise.
WEIGHT_CODECS: dict[str, Codecs] = {
    "bf16": Codecs(),
    "INT8": Codecs(weights=INT8),
    "INT4": Codecs(weights=INT4),
    "INT4, searched clip": Codecs(weights=Blockwise(4, clip=8)),
    "INT4, stochastic": Codecs(weights=Blockwise(4, stochastic=True)),
    "2 bits": Codecs(weights=Blockwise(2)),
    "2 bits, searched clip": Codecs(weights=Blockwise(2, clip=8)),
    "delta, INT8": Codecs(weights=INT8, delta=True),
    "delta, INT4": Codecs(weights=INT4, delta=True),
    "delta, INT4, searched clip": Codecs(weights=Blockwise(4, clip=8), delta=True),
    "delta, 2 bits": Codecs(weights=Blockwise(2), delta=True),
    "delta, 2 bits, searched clip": Codecs(weights=Blockwise(2, clip=8), delta=True),
}
