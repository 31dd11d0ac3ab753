"""What the hops send: the quantised formats of a run on its world.

They follow ZeRO++ (Wang et al. 2023, sections 3.1 and 3.3). Weights are encoded once per step, by their owner, and
travel as they were encoded. So they have one format for every hop, which is in use where some hop crosses nodes.
Gradients have a format for the hops over each class of link: inside a node, across nodes, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megazero.comm.wire import DEFAULT_BLOCK, Codecs, Coding
from megazero.config.layout.shards import QUANTISED, Shards, weights_cross
from megazero.config.options.sections import ZeroConfig
from megazero.mesh.levels import INTRA, links_of

# The options that say how messages are coded.
OF_WEIGHTS = ("zero_weight_bits",)
OF_GRADIENTS = ("zero_gradient_bits", "zero_gradient_bits_intra_node", "zero_gradient_transform")
OF_BOTH = ("zero_block_size", "zero_exact_numel")
WEIGHT_BITS, DELTA_BITS, GRADIENT_BITS = 8, 4, 4
# 1% of the columns hold half of a trained model's squared gradients, and in AdamW all elements count alike. INT4 of
# SmolLM2-135M's gradients errs by 0.17 of their norm, with a transform by 0.09; INT8 by 0.02 without one.
TRANSFORM, MOST_TRANSFORMED_BITS = "hadamard", 4
PLAIN = (
    "gradients of 4 bits or fewer are sent without a transform, which would take no more bytes. Published gaps of "
    "INT4 gradients in the loss: +2.07% at 350M (ZeRO++); +0.47, +0.40 and +1.19% at 125M, 350M and 1.3B, with a "
    "Hadamard transform +0.06, +0.09 and +0.19% (SDP4Bit)"
)
EXACT_NUMEL = 16384
MIXED = 128  # the most elements that a Hadamard transform mixes, of kernels/hadamard.py
ALIGNMENT = 64  # elements that parameters are aligned to where nothing is quantised


@dataclass(frozen=True)
class Wire(Codecs[Coding]):
    """The formats of a run's messages, and which parameters they are for.

    Parameters with at most ``exact_numel`` elements are never quantised. Slices are whole multiples of
    ``least_block`` elements, whatever is sent.
    """

    exact_numel: int = 0
    least_block: int = ALIGNMENT

    @property
    def block(self) -> int:
        """Return how many elements the layout aligns parameters and slices to: whole blocks of every format."""
        return max([self.least_block, *(coding.block for coding in self.codings)])


def quantizes_weights(zero: ZeroConfig) -> bool:
    """Tell whether quantised weights are asked for, whether or not some hop exists to send them."""
    asked = zero.zero_quantized_weights
    return (
        zero.zero_preset in QUANTISED or bool(zero.zero_quantized_weights_delta) if asked is None else asked
    )


def quantizes_changes(zero: ZeroConfig) -> bool:
    """Tell whether the refresh is to send differences (delta refresh).

    It is zeropp's default by measurement, see docs/results/loss.md.
    """
    asked, lifetime = zero.zero_quantized_weights_delta, zero.zero_params_lifetime
    if asked is not None:
        return asked
    return (
        zero.zero_preset in QUANTISED
        and quantizes_weights(zero)
        and lifetime in (None, "resident", "gathered")
    )


def quantizes_gradients(zero: ZeroConfig) -> bool:
    asked = zero.zero_quantized_gradients
    return zero.zero_preset in QUANTISED if asked is None else asked


def transform(zero: ZeroConfig) -> str:
    """Return the transform of quantised gradients: 'none' or 'hadamard'.

    By default they are transformed where some hop sends them in few bits.
    """
    return zero.zero_gradient_transform or (TRANSFORM if few_bits(zero) else "none")


def is_plain(zero: ZeroConfig) -> bool:
    """Tell whether gradients are asked for in few bits and without a transform."""
    return quantizes_gradients(zero) and few_bits(zero) and transform(zero) == "none"


def few_bits(zero: ZeroConfig) -> bool:
    """Tell whether quantised gradients have so few bits on some hop that they are transformed by default."""
    bits = (*(zero.zero_gradient_bits or (GRADIENT_BITS,)), zero.zero_gradient_bits_intra_node)
    return any(each and each <= MOST_TRANSFORMED_BITS for each in bits)


def asked_for(zero: ZeroConfig, links: Sequence[str] = links_of()) -> Wire:
    """Return the formats that are asked for, as if every hop over these links existed."""
    weights, gradients = None, dict[str, Coding]()
    if quantizes_weights(zero):
        bits = zero.zero_weight_bits or (DELTA_BITS if quantizes_changes(zero) else WEIGHT_BITS)
        weights = _coding(zero, bits)
    if quantizes_gradients(zero):
        codings = {link: _coding(zero, bits) for link, bits in _gradient_bits(zero, links).items()}
        gradients = _mixed(codings, transform(zero))
    exact = EXACT_NUMEL if zero.zero_exact_numel is None else zero.zero_exact_numel
    return Wire(weights, gradients, quantizes_changes(zero), exact_numel=exact)


def resolve_wire(zero: ZeroConfig, shards: Shards, d: int, near: Sequence[int]) -> Wire:
    """Return the formats in use on d data-parallel ranks: those asked for whose hops exist.

    near: how many of them share each level below the whole, first a node.
    """
    links = links_of(len(near) - 1)
    asked, refresh = asked_for(zero, links), weights_cross(shards.os, near[0])
    used = [link for link, (low, high) in zip(links, pairwise((1, *near, d)), strict=True) if low < high]
    wire = replace(
        asked,
        weights=asked.weights if refresh else None,
        gradients={link: coding for link, coding in asked.gradients.items() if link in used},
        delta=asked.delta and refresh,
    )
    return wire if wire.codings else Wire()


def _coding(zero: ZeroConfig, bits: int) -> Coding:
    return Coding(bits, zero.zero_block_size or 0)


def _gradient_bits(zero: ZeroConfig, links: Sequence[str]) -> dict[str, int]:
    """Return the bits of a quantised gradient over each link; those over others are exact."""
    *given, last = zero.zero_gradient_bits or (GRADIENT_BITS,)
    across = zip(links[1:], [*given, *[last] * len(links)], strict=False)  # the last is for all further links
    inside = zero.zero_gradient_bits_intra_node
    return {**({INTRA: inside} if inside else {}), **dict(across)}


def _mixed(codings: Mapping[str, Coding], by: str) -> dict[str, Coding]:
    """Return the formats of successive hops, by link, with their transform.

    It mixes the smallest of their blocks (the larger the better, see docs/results/loss.md), so that it is the
    same on all hops and nothing is transformed between them.
    """
    size = min(MIXED, *(c.block for c in codings.values())) if by == "hadamard" else 0
    return {link: replace(c, hadamard=size) for link, c in codings.items()}


def dispatch_coding(way: str, hidden: int) -> Coding | None:
    """Return the format of rows of ``hidden`` elements that go to experts at other nodes; None: they are exact.

    way: of --moe-dispatch-across-nodes. A row is whole blocks, and there is none of two rows.
    """
    return Coding(8, min(DEFAULT_BLOCK[8], hidden & -hidden)) if way == "int8" else None
