"""What study.py compares: shard factors and wire formats by name. A new candidate is one more line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megazero.comm.codec import Blockwise, Codec
from megazero.config.options.sections import OuterConfig
from megazero.zero import Codecs

BASELINE = "zero3"


@dataclass(frozen=True)
class Variant:
    """shards: P, G, OS as letters: d for all data-parallel ranks (of an outer replica), h for those of a node.

    target: the most by which the mean loss may lie above the baseline's, in percent, at the upper 95% bound; 0: bit
    for bit the same weights; None: reported only. adamw: options of AdamW that are not the rig's. muon: matrices are
    updated by Muon. outer: each node is an outer replica. gone: in what format its runs sent gradients, if no message
    has that any more: they are read, and none is made. dispatch: all ranks share the experts, and rows go to those at
    other nodes, and gradients of their outputs, in this format.
    """

    shards: str
    codecs: Codecs
    target: float | None = None
    adamw: Mapping[str, Any] = field(default_factory=dict)
    muon: bool = False
    outer: OuterConfig | None = None
    gone: str = ""
    dispatch: Blockwise | None = None

    def factors(self, ranks: int, node: int) -> tuple[int, int, int]:
        p, g, os = ({"d": ranks, "h": node}[letter] for letter in self.shards)
        return p, g, os

    @property
    def quantised(self) -> bool:
        return self.codecs != Codecs()


def _crossing(codec: Codec, gone: str = "") -> Variant:
    """Make a variant with exact weights, and gradients exact inside a node and in ``codec`` across nodes, once per
    step."""
    return Variant("hhd", Codecs(gradients_inter=codec), gone=gone)


def _both(
    weights: Blockwise, gradients: Blockwise, inside: Blockwise | None = None, gone: str = ""
) -> Variant:
    """Make a variant that quantises differences of weights and gradients across nodes, and with ``inside`` gradients
    in a node, too."""
    codecs = Codecs(weights=weights, delta=True, gradients_intra=inside, gradients_inter=gradients)
    return Variant("hhd", codecs, gone=gone)


def _moments(first: str, second: str, **adamw: Any) -> Variant:
    """Make the baseline with moments of these dtypes."""
    return Variant("ddd", Codecs(), adamw={"exp_avg_dtype": first, "exp_avg_sq_dtype": second, **adamw})


def mixing(codec: Blockwise, size: int | None = None) -> Blockwise:
    """Return the codec after a Hadamard transform of ``size`` elements, by default of its block."""
    return replace(codec, hadamard=size or codec.block)


INT8, INT4, INT2 = Blockwise(8), Blockwise(4), Blockwise(2)
VARIANTS: dict[str, Variant] = {
    BASELINE: Variant("ddd", Codecs()),
    "hpz": Variant("hdd", Codecs(), target=0.0),
    "qwz": Variant("hdd", Codecs(weights=INT8), target=0.3),
    "qgz": _crossing(INT4),
    "zeropp-int8": Variant("hhd", Codecs(weights=INT8, gradients_inter=INT4), target=0.5),
    # Before gradients were transformed by default; the preset is "zeropp-hadamard" now.
    "zeropp": Variant("hhd", Codecs(weights=INT4, gradients_inter=INT4, delta=True), target=0.5),
    # Moments in fewer bits, and with AdamW's default decay of the second one.
    "moments-bf16": _moments("bf16", "bf16"),
    "moments-int8": _moments("int8", "int8"),
    "0.999": _moments("fp32", "fp32", betas=(0.9, 0.999)),
    "0.999-moments-bf16": _moments("bf16", "bf16", betas=(0.9, 0.999)),
    "0.999-moments-int8": _moments("int8", "int8", betas=(0.9, 0.999)),
    # Candidates for the gradients' crossing; qgz is the first of them: INT4 to nearest.
    "int4-stochastic": _crossing(INT4, "INT4, stochastic"),
    "int4-feedback": _crossing(INT4, "INT4, error feedback"),
    "int2-feedback": _crossing(INT2, "2 bits, error feedback"),
    "int4-hadamard": _crossing(mixing(INT4)),
    "int2-hadamard-clip": _crossing(INT2, "2 bits, clip of 8 scales, Hadamard of 64"),
    "int2-hadamard-clip-feedback": _crossing(
        INT2, "2 bits, clip of 8 scales, Hadamard of 64, error feedback"
    ),
    "zeropp-hadamard": _both(INT4, mixing(INT4)),
    "zeropp-0.20": _both(INT4, INT2, gone="2 bits, Hadamard of 64, error feedback"),
    "zeropp-0.14": _both(INT2, INT2, gone="2 bits, Hadamard of 64, error feedback"),
    # SDP4Bit (Jia et al. 2024): gradients with 8 bits inside the node and 4 across, a Hadamard transform of 32
    # elements, differences in blocks of 2048. "sdp4bit-ulq" is the same without the transform.
    "sdp4bit": _both(Blockwise(4, 2048), mixing(Blockwise(4, 128), 32), mixing(Blockwise(8, 128), 32)),
    "sdp4bit-ulq": _both(Blockwise(4, 2048), Blockwise(4, 128), Blockwise(8, 128)),
    # Of mixtures of experts: blocks that divide a row.
    "dispatch-int8": Variant("ddd", Codecs(), dispatch=Blockwise(8, 64)),
}
DEFAULT = (BASELINE, "hpz", "qwz", "qgz", "zeropp-int8", "zeropp")

# Outer steps (outer.py has the study): intervals, outer optimizers (Nesterov's by their rates), and forms.
INTERVALS = (8, 32, 128)
AVERAGE = "average"
RULES = (AVERAGE, "0.4", "0.7", "1")
MUON = "muon"
FORMS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "4bit": {"outer_bits": 4},
    "2bit": {"outer_bits": 2},
    MUON: {},
}


def outer_name(interval: int, rule: str, form: str = "") -> str:
    return "-".join(["outer", str(interval), rule, *([form] if form else [])])


def _outer(interval: int, rule: str, form: str) -> Variant:
    optimizer = (
        {"outer_optimizer": AVERAGE}
        if rule == AVERAGE
        else {"outer_lr": float(rule), "outer_momentum": 0.9}  # DiLoCo's
    )
    outer = OuterConfig(outer_interval=interval, **optimizer, **FORMS[form])
    return Variant("ddd", Codecs(), muon=form == MUON, outer=outer)


OUTER_VARIANTS = {
    outer_name(interval, rule, form): _outer(interval, rule, form)
    for interval in INTERVALS
    for rule in RULES
    for form in FORMS
}
BY_MUON = {MUON: BASELINE, "zeropp-muon": "zeropp"}
EVERY = {
    **VARIANTS,
    **OUTER_VARIANTS,
    **{name: replace(VARIANTS[plain], muon=True) for name, plain in BY_MUON.items()},
}

# Refresh of one trained master, for the table that is free of run noise.
WEIGHT_CODECS: dict[str, Codecs] = {
    "bf16": Codecs(),
    "INT8": Codecs(weights=INT8),
    "INT4": Codecs(weights=INT4),
    "2 bits": Codecs(weights=Blockwise(2)),
    "delta, INT8": Codecs(weights=INT8, delta=True),
    "delta, INT4": Codecs(weights=INT4, delta=True),
    "delta, 2 bits": Codecs(weights=Blockwise(2), delta=True),
}
