"""What one node sends per step, from formulas: bytes that leave it for all of its ranks. Headers and padding are left
out; of the comparison padding is at most 0.012%, and without it megazero's counters are these numbers to the byte.

N elements, Y nodes, h ranks on each, d = Y h; a hop over the nodes moves (Y - 1) / Y of what it gathers or reduces.
Rings over all d ranks, in node order, leave a node at one rank: (d - 1) / d of the message for a gather, twice that
for an all-reduce. gloo makes a reduce-scatter out of an all-reduce; NCCL's would send half of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.comm.codec import Codec
from megazero.plan.communication import SCALARS
from megazero.zero import Codecs

BF16, FP32 = 2.0, 4.0  # bytes


@dataclass(frozen=True)
class Case:
    """elements: of the model; first, last: of its first and last unit, which stay gathered between two uses in a
    row; small: of parameters that quantised messages leave exact."""

    elements: int
    first: int
    last: int
    micro_batches: int
    nodes: int
    ranks_per_node: int
    small: int = 0

    @property
    def hop(self) -> float:
        return (self.nodes - 1) / self.nodes

    @property
    def ring(self) -> float:
        ranks = self.nodes * self.ranks_per_node
        return (ranks - 1) / ranks


def bytes_per_element(codec: Codec | None, exact: float, case: Case) -> float:
    """On average over the model, scales included: ``exact`` of small parameters, and of all without a codec."""
    if codec is None:
        return exact
    n = 1 << 20
    coded = codec.message_numel(n) * codec.wire_dtype.itemsize / n
    return coded + (exact - coded) * case.small / case.elements


def scalars(case: Case) -> int:
    """What ranks tell each other of a step, as megazero counts it: on several nodes all of it."""
    ranks = case.nodes * case.ranks_per_node
    return case.ranks_per_node * (ranks - 1) * SCALARS


def megazero(shards: tuple[int, int, int], codecs: Codecs, case: Case) -> float:
    """Of (P, G, OS), each within a node or over all ranks, with bf16 parameters and more than one rank on a node (so
    that gradients cross nodes as fp32 sums, if exact)."""
    p, g, os = (factor > case.ranks_per_node for factor in shards)  # crosses nodes
    weights = bytes_per_element(codecs.weights, BF16, case)
    gradients = bytes_per_element(codecs.gradients_inter, FP32, case)
    n, m = case.elements, case.micro_batches
    gathered = 2 * m * n - m * case.last - (m - 1) * case.first if p else n if os else 0
    reduced = m * n if g else n if os else 2 * n
    return case.hop * (gathered * weights + reduced * gradients) + scalars(case)


def fsdp2(case: Case, once: bool, keep: bool) -> float:
    """The root's unit, first and last layer, stays gathered from forward to backward."""
    root, m = case.first + case.last, case.micro_batches
    gathered = case.elements if keep else m * (2 * case.elements - root)
    return case.ring * BF16 * (gathered + 2 * case.elements * (1 if once else m))


def hsdp(case: Case, once: bool) -> float:
    """All-reduce of shards between replicas; gathers stay inside a node."""
    return 2 * case.hop * BF16 * case.elements * (1 if once else case.micro_batches)


def patched(codecs: Codecs, case: Case, hybrid: bool) -> float:
    """FSDP2 under fsdp2_patch, once per step: between replicas (``hybrid``) shares of the sums there and back, else
    sums and weights to the ranks of the same place."""
    if hybrid:
        return 2 * case.hop * case.elements * bytes_per_element(codecs.gradients_inter, BF16, case)
    each = bytes_per_element(codecs.weights, BF16, case) + bytes_per_element(
        codecs.gradients_inter, FP32, case
    )
    return case.hop * case.elements * each


def ddp(case: Case, once: bool) -> float:
    return 2 * case.ring * BF16 * case.elements * (1 if once else case.micro_batches)


def deepspeed_zero1(case: Case) -> float:
    """Gradients are all-reduced and weights gathered, once per step."""
    return 3 * case.ring * BF16 * case.elements


def deepspeed_zero3(case: Case) -> float:
    """Two gathers and one reduce-scatter with every micro-batch."""
    return 3 * case.ring * BF16 * case.elements * case.micro_batches
