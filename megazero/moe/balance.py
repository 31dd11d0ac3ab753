"""What balances experts: losses of the router, the tokens that experts got, and the bias that follows these.

A loss is a mean over blocks of consecutive samples that every layout has, so no layout changes it. It is attached to
the probabilities by an identity whose backward adds the loss's own gradient: the loss that is reported is without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.moe.routing import Decision, Routed, Router

AUX, SEQUENCE_AUX = "aux_loss", "seq_aux_loss"


@dataclass(eq=False)
class BalanceLosses:
    """The losses of all routers of a model.

    kind: aux_loss, whose blocks are micro-batches of ``samples``, or seq_aux_loss, whose blocks are samples, or none.
    coefficient, z_coefficient: their weights in what is trained on. scale: returns the gradient that the mean over a
    forward's blocks gets, so that after the step's divisor a step has the mean over all of its blocks.
    """

    kind: str = "none"
    coefficient: float = 0.0
    z_coefficient: float = 0.0
    samples: int = 1
    scale: Callable[[], float] = lambda: 1.0

    @property
    def balances(self) -> bool:
        return self.kind in (AUX, SEQUENCE_AUX) and self.coefficient > 0

    def blocks(self, samples: int) -> int:
        """Return how many blocks so many samples are."""
        size = self.samples if self.balances and self.kind == AUX else 1
        assert samples % size == 0, f"{samples} samples are no blocks of {size}"
        return samples // size


class Balance:
    """The balance of one layer's experts in a step, as far as this rank's first forwards have gone.

    load: int64 [experts], how many tokens each got. values: fp64 [2], sums over forwards of what this rank adds to
    the balance loss and to the z loss, without their coefficients.
    """

    def __init__(self, losses: BalanceLosses, router: Router, experts: int) -> None:
        self.losses, self.router = losses, router
        self.load = torch.zeros(experts, dtype=torch.int64, device="cpu")
        self.values = torch.zeros(2, dtype=torch.float64, device="cpu")

    def clear(self) -> None:
        """Begin a step."""
        self.load.zero_()
        self.values.zero_()

    def attach(
        self,
        routed: Routed,
        decision: Decision,
        samples: int,
        length: int,
        summed: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the probabilities with the losses attached. Tokens of ``samples`` alternate.

        length: tokens of a whole sample, of which this rank may have a part. summed: adds up int32 tensors over the
        ranks that share samples. The first call with a decision counts; a recompute takes what that has counted.
        """
        losses, first = self.losses, decision.counts is None
        if first:
            self._count(routed, decision, samples, summed)
        z = losses.z_coefficient
        if not losses.balances and not z:
            return routed.probabilities
        values = [routed.logits.new_zeros(())] * 2
        if losses.balances:
            assert decision.counts is not None
            shares = self.router.shares(routed.logits).unflatten(0, (-1, samples))
            values[0] = balance_loss(shares, decision.counts, self.router.topk, length)
        if z:
            values[1] = routed.logits.logsumexp(-1).square().sum() / (length * samples)
        if first:
            self.values += torch.stack(values).detach()
        weighted = losses.coefficient * values[0] + z * values[1]
        return _Attached.apply(routed.probabilities, weighted, losses.scale())

    @torch.no_grad()
    def _count(
        self, routed: Routed, decision: Decision, samples: int, summed: Callable[[Tensor], Tensor]
    ) -> None:
        """Count the decision's tokens."""
        if self.load.device != routed.logits.device:
            self.load, self.values = self.load.to(routed.logits.device), self.values.to(routed.logits.device)
        count = len(self.load)
        decision.counts = counted(routed.experts, 1, 1, count)
        self.load += decision.counts[0]
        if not self.losses.balances:
            return
        chosen, blocks = routed.experts, self.losses.blocks(samples)
        if not self.router.plain:
            if decision.plain is None:
                decision.plain = routed.logits.topk(self.router.topk).indices.to(torch.int32)
            chosen = decision.plain.long()
        decision.counts = summed(counted(chosen, blocks, samples, count).to(torch.int32))


def counted(experts: Tensor, blocks: int, samples: int, count: int) -> Tensor:
    """Count the tokens of each expert in each block: int64 [blocks, count].

    experts: of each token, [T, k] int64. Tokens of ``samples`` alternate, and blocks are consecutive samples. Nothing
    waits for the device, and no order changes the result.
    """
    sample = torch.arange(len(experts), device=experts.device) % samples
    keys = (sample // (samples // blocks) * count).unsqueeze(-1) + experts
    every = torch.arange(blocks * count, device=experts.device)
    ends = torch.searchsorted(keys.flatten().sort().values, every, right=True)
    return ends.diff(prepend=ends.new_zeros(1)).view(blocks, count)


def balance_loss(shares: Tensor, counts: Tensor, topk: int, length: int) -> Tensor:
    """Return the mean over blocks of E / (k T^2) sum_i n_i sum_x p_i(x) (Fedus et al. 2022), which is Megatron's
    aux_loss / coefficient: 1 if every expert gets as many tokens, and has the same share of each.

    shares: p, [s, b, E], of this rank's tokens. counts: n, [blocks, E], of all tokens of each block. topk: k. length:
    tokens of a sample; a block has T = length x b / blocks.
    """
    blocks, experts = counts.shape
    tokens = length * shares.shape[1] // blocks
    sums = shares.unflatten(1, (blocks, -1)).sum((0, 2))
    return (sums * counts).sum() * (experts / (topk * tokens * tokens * blocks))


class _Attached(torch.autograd.Function):
    """Returns the probabilities. The loss beside them gets the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return probabilities.view_as(probabilities)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.new_full((), ctx.scale), None


@torch.no_grad()
def move_bias(bias: Tensor, load: Tensor, rate: float) -> None:
    """Move fp32 ``bias`` [experts] by ``rate``: up where an expert got fewer tokens than the mean, down where more.

    load: int64 [experts], of the whole step, compared in integers (Wang et al. 2024, arXiv 2408.15664).
    """
    bias.add_((load.sum() - len(load) * load).sign().to(bias.dtype), alpha=rate)
