"""Formulas of the bytes that leave a node in a step, for all of its ranks, without headers and padding. In the
comparison padding is at most 0.012%; without it megazero's counters equal these numbers to the byte.

N elements, Y nodes, h ranks on each, d = Y h; a hop over the nodes moves (Y - 1) / Y of what it gathers or reduces.
Rings over all d ranks, in node order, leave a node at one rank: (d - 1) / d of the message for a gather, twice that
for an all-reduce. gloo makes a reduce-scatter out of an all-reduce; NCCL's would send half of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.comm.codec import Codec
from megazero.mesh.levels import INTER
from megazero.plan.communication import OF_ROUNDING, SCALARS
from megazero.zero import Codecs
from tests.bytes_across import Llama

BF16, FP32 = 2.0, 4.0  # bytes


@dataclass(frozen=True)
class Case:
    """modules: elements of the embedding, each layer and the head. small: of parameters that quantised messages leave
    exact. experts: of experts that the ranks of a node share, so that only ranks of different nodes hold the same.
    model: what it is, for the tests' arithmetic."""

    modules: tuple[int, ...]
    micro_batches: int
    nodes: int
    ranks_per_node: int
    small: int = 0
    experts: int = 0
    model: Llama | None = None

    @property
    def elements(self) -> int:
        return sum(self.modules)

    @property
    def ends(self) -> tuple[int, int]:
        """Elements of the first and the last module, which stay gathered between two uses in a row."""
        return self.modules[0], self.modules[-1]

    @property
    def hop(self) -> float:
        return (self.nodes - 1) / self.nodes

    @property
    def ring(self) -> float:
        ranks = self.nodes * self.ranks_per_node
        return (ranks - 1) / ranks


def bytes_per_element(codec: Codec | None, exact: float, case: Case) -> float:
    """Return the bytes of an element, averaged over the model, with scales. Small parameters take ``exact`` bytes;
    without a codec all do."""
    if codec is None:
        return exact
    n = 1 << 20
    coded = codec.message_numel(n) * codec.wire_dtype.itemsize / n
    return coded + (exact - coded) * case.small / case.elements


def scalars(case: Case, told: int = SCALARS) -> int:
    """Return the bytes of the scalars of a step, ``told`` bytes of each rank: megazero sends every row to each other
    node once."""
    return case.ranks_per_node * (case.nodes - 1) * told


def megazero(shards: tuple[int, int, int], codecs: Codecs, case: Case) -> float:
    """Return the bytes of (P, G, OS), each within a node or over all ranks, with bf16 parameters and several ranks on
    a node (so that exact gradients cross nodes as fp32 sums)."""
    p, g, os = (factor > case.ranks_per_node for factor in shards)  # crosses nodes
    weights = bytes_per_element(codecs.weights, BF16, case)
    codec = codecs.gradients.get(INTER)
    # Nobody in the node adds to the gradient of shared experts, so what crosses with one micro-batch is no sum. Coded
    # messages have no experts among what they leave exact.
    plain = case.experts / case.elements if codec is None and (case.micro_batches == 1 or g) else 0.0
    gradients = bytes_per_element(codec, FP32 + (BF16 - FP32) * plain, case)
    n, m, (first, last) = case.elements, case.micro_batches, case.ends
    gathered = 2 * m * n - m * last - (m - 1) * first if p else n if os else 0
    reduced = m * n if g else n if os else 2 * n
    told = SCALARS + OF_ROUNDING * (not codecs.exact)
    return case.hop * (gathered * weights + reduced * gradients) + scalars(case, told)


def fsdp2(case: Case, once: bool, keep: bool) -> float:
    """Return FSDP2's bytes, which shards shared experts over the nodes. The root's unit, first and last layer, stays
    gathered from forward to backward.
    """
    root, m = sum(case.ends), case.micro_batches
    gathers, reductions = 1 if keep else 2 * m, 2 * (1 if once else m)
    gathered = gathers * case.elements - (0 if keep else m * root)
    of_experts = (gathers + reductions) * case.experts  # their rings are over the nodes
    others = gathered + reductions * case.elements - of_experts
    return BF16 * (case.ring * others + case.hop * of_experts)


def hsdp(case: Case, once: bool) -> float:
    """Return HSDP's bytes: shards are all-reduced between replicas, and gathers stay inside a node."""
    return 2 * case.hop * BF16 * case.elements * (1 if once else case.micro_batches)


def hfsdp(case: Case) -> float:
    """Return HFSDP's bytes, once per step: sums are scattered between replicas; new weights are gathered in the first
    forward and again in its backward, but for the root's, which stay."""
    return case.hop * BF16 * (4 * case.elements - sum(case.ends))


def patched(codecs: Codecs, case: Case, hybrid: bool) -> float:
    """Return the bytes of FSDP2 under fsdp2_patch, once per step. hybrid: shares of the sums go between replicas and
    back; else sums and weights go to the ranks of the same place."""
    if hybrid:
        return 2 * case.hop * case.elements * bytes_per_element(codecs.gradients.get(INTER), BF16, case)
    each = bytes_per_element(codecs.weights, BF16, case) + bytes_per_element(
        codecs.gradients.get(INTER), FP32, case
    )
    return case.hop * case.elements * each


def ddp(case: Case, once: bool) -> float:
    return 2 * case.ring * BF16 * case.elements * (1 if once else case.micro_batches)


def deepspeed_zero1(case: Case) -> float:
    """Return ZeRO-1's bytes: gradients are all-reduced and weights gathered once per step."""
    return 3 * case.ring * BF16 * case.elements


def deepspeed_zero3(case: Case) -> float:
    """Return ZeRO-3's bytes: two gathers and one reduce-scatter with every micro-batch."""
    return 3 * case.ring * BF16 * case.elements * case.micro_batches
