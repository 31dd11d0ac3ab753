"""The wire formats that the planner may choose, by their effect on the loss.

The figures are those of docs/loss.md: a small Llama over 400 steps, in percent of the loss of exact messages, with
95% bounds where the page has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class FormatChoice:
    """A choice of formats. values: options of the ZeRO section. loss: what docs/loss.md measured of it.

    weights, gradients: whether it quantises them. delta: it needs resident parameter shards, P < OS. once: it needs
    gradients that cross nodes once per step, G within a node.
    """

    name: str
    loss: str
    values: Mapping[str, Any] = field(default_factory=dict)
    weights: bool = False
    gradients: bool = False
    delta: bool = False
    once: bool = False


_INT8 = {"zero_quantized_weights": True}
_DELTA = {"zero_quantized_weights_delta": True}
_INT4 = {"zero_quantized_gradients": True}
_INT2 = {**_INT4, "zero_gradient_bits": 2, "zero_gradient_rounding": "feedback"}
_INSIDE = {**_INT4, "zero_gradient_bits_intra_node": 8}

EXACT = FormatChoice("exact", "0")
ZEROPP = (
    EXACT,
    FormatChoice("weights INT8", "-0.10 (-0.14 to -0.07)", _INT8, weights=True),
    FormatChoice("weights INT4 of differences", "0.000, of one master", _DELTA, weights=True, delta=True),
    FormatChoice("gradients INT4", "-0.08 (-0.41 to +0.25)", _INT4, gradients=True),
    FormatChoice("weights INT8, gradients INT4", "-0.12 (-0.34 to +0.10)", {**_INT8, **_INT4}, True, True),
    FormatChoice(
        "weights INT4 of differences, gradients INT4",
        "-0.09 (-0.24 to +0.07)",
        {**_DELTA, **_INT4},
        weights=True,
        gradients=True,
        delta=True,
    ),
)
AGGRESSIVE = (
    *ZEROPP,
    FormatChoice("gradients INT8 inside nodes, INT4 across", "not measured", _INSIDE, gradients=True),
    FormatChoice("gradients INT2 with feedback", "+0.25 (no bounds)", _INT2, gradients=True, once=True),
    FormatChoice(
        "weights INT4 of differences, gradients INT2 with feedback",
        "not measured together",
        {**_DELTA, **_INT2},
        weights=True,
        gradients=True,
        delta=True,
        once=True,
    ),
)
LOSS_POLICIES: Mapping[str, tuple[FormatChoice, ...]] = MappingProxyType(
    {"exact": (EXACT,), "zeropp": ZEROPP, "aggressive": AGGRESSIVE}
)
