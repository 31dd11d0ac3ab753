"""The variants that a study compares: shard factors, wire formats, optimizer and outer steps, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megazero import zero
from megazero.comm.codec import Blockwise
from megazero.comm.wire import Coding
from megazero.config.options.sections import FP8_GRADIENTS
from megazero.mesh.levels import INTER, INTRA
from megazero.products import RECIPES
from megazero.zero import Codecs

BASELINE = "zero3"


class OuterRule(NamedTuple):
    """interval: steps between two. lr: of the outer optimizer."""

    interval: int
    lr: float
    steps: zero.Outer


@dataclass(frozen=True)
class Variant:
    """A new candidate is one more entry of VARIANTS.

    label: what crosses nodes, as tables say it. shards: P, G, OS as letters: d for all data-parallel ranks (of a
    replica), h for those of a node. adamw: options of AdamW that differ from the studies'. muon: matrices are
    updated by Muon. outer: each node is a replica. dispatch: all ranks share the experts; rows go to those at
    other nodes, and gradients of their outputs, in this format. product: how linears of layers multiply, a row of
    PRODUCTS, with its options.
    """

    label: str
    shards: str = "ddd"
    codecs: Codecs = Codecs()
    adamw: Mapping[str, Any] = field(default_factory=dict)
    muon: bool = False
    outer: OuterRule | None = None
    dispatch: Blockwise | None = None
    product: tuple[str, Mapping[str, Any]] = ("bf16", {})

    def factors(self, ranks: int, node: int) -> tuple[int, int, int]:
        p, g, os = ({"d": ranks, "h": node}[letter] for letter in self.shards)
        return p, g, os

    @property
    def quantised(self) -> bool:
        return self.codecs != Codecs()


INT8, INT4, HADAMARD = Blockwise(8), Blockwise(4), Blockwise(4, hadamard=64)


def _crossing(label: str, codec: Blockwise) -> Variant:
    """Make a variant with exact weights, and gradients in ``codec`` across nodes, once per step."""
    return Variant(label, "hhd", Codecs(gradients={INTER: codec}))


def _both(label: str, weights: Blockwise, gradients: Blockwise, inside: Blockwise | None = None) -> Variant:
    """Make a variant that sends differences of weights; ``inside``: the format of gradients inside a node."""
    inner = {} if inside is None else {INTRA: inside}
    codecs = Codecs(weights=weights, delta=True, gradients={**inner, INTER: gradients})
    return Variant(label, "hhd", codecs)


def _moments(bits: str) -> Variant:
    return Variant(f"exact; moments in {bits}", adamw={"exp_avg_dtype": bits, "exp_avg_sq_dtype": bits})


# Outer steps: intervals, outer optimizers (Nesterov's by their rates, with DiLoCo's momentum), and bits.
INTERVALS, RULES = (8, 32, 128), ("average", "0.4", "0.7", "1")
FORMS: Mapping[str, Coding | None] = {"": None, "-4bit": Coding(4), "-2bit": Coding(2), "-muon": None}


def _outer(interval: int, rule: str, form: str) -> Variant:
    codec = FORMS[form]
    average = rule == "average"
    steps = zero.Outer(0.0 if average else 0.9, not average, codec, feedback=float(codec is not None))
    outer = OuterRule(interval, 1.0 if average else float(rule), steps)
    said = f"every {interval} steps: {'average' if average else f'Nesterov at {rule}'}"
    said += f", differences INT{codec.bits}" if codec else ""
    return Variant(said, muon=form == "-muon", outer=outer)


VARIANTS: dict[str, Variant] = {
    BASELINE: Variant("exact"),
    "hpz": Variant("exact, hpz", "hdd"),
    "qwz": Variant("weights INT8", "hdd", Codecs(weights=INT8)),
    "qgz": _crossing("gradients INT4", INT4),
    "int4-hadamard": _crossing("gradients INT4 + H64", HADAMARD),
    "zeropp-int8": Variant(
        "gradients INT4, weights INT8", "hhd", Codecs(weights=INT8, gradients={INTER: INT4})
    ),
    # Before gradients were transformed by default; the preset is "zeropp-hadamard" now.
    "zeropp": _both("gradients INT4, differences of weights INT4", INT4, INT4),
    "zeropp-hadamard": _both("gradients INT4 + H64, differences of weights INT4", INT4, HADAMARD),
    # SDP4Bit (Jia et al. 2024): differences in blocks of 2048, gradients with 8 bits inside the node and 4 across.
    "sdp4bit": _both(
        "SDP4Bit", Blockwise(4, 2048), Blockwise(4, 128, hadamard=32), Blockwise(8, 128, hadamard=32)
    ),
    "moments-bf16": _moments("bf16"),
    "moments-int8": _moments("int8"),
    # Of mixtures of experts: blocks that divide a row.
    "dispatch-int8": Variant("rows to experts INT8", dispatch=Blockwise(8, 64)),
    **{
        f"outer-{interval}-{rule}{form}": _outer(interval, rule, form)
        for interval in INTERVALS
        for rule in RULES
        for form in FORMS
    },
}
# Products in fp8, under exact messages, and under zeropp's.
for _name, _options in (
    *((recipe, {}) for recipe in RECIPES),
    ("tensorwise", {"gradients": FP8_GRADIENTS["hybrid"]}),
):
    _label = f"{_name}, gradients in E5M2" if _options else _name
    VARIANTS["fp8-hybrid" if _options else f"fp8-{_name}"] = Variant(
        f"exact; products in fp8, {_label}", product=(f"fp8_{_name}", _options)
    )
VARIANTS["zeropp-fp8"] = replace(VARIANTS["zeropp-hadamard"], product=("fp8_tensorwise", {}))
MUON = "muon"
VARIANTS |= {
    MUON: replace(VARIANTS[BASELINE], muon=True),
    "zeropp-muon": replace(VARIANTS["zeropp"], muon=True),
}
