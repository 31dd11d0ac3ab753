"""What balances experts: losses of the router, the tokens that experts got, and the bias that follows these.

A loss is a mean over blocks of consecutive samples that every layout has, so no layout changes it. It is attached to
the probabilities by an identity whose backward adds the loss's own gradient: the loss that is reported is without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.comm.peers import Peers
from megazero.moe.routing import Decision, Routed, Router


@dataclass(eq=False)
class BalanceLosses:
    """The losses of all routers of a model.

    over_samples, over_micro_batches, over_step, z: their weights in what is trained on. The first three weigh a
    token's likelihoods by the experts of its sample, of its micro-batch, and of the step up to its round, which is a
    micro-batch of each rank. even: in training each micro-batch's tokens choose experts evenly (routing.py: evened).
    samples: of a micro-batch. together: how many micro-batches of a round one forward here has; others: who has the
    others. scale: returns the gradient that the mean over a forward's blocks gets, so that after the step's divisor a
    step has the mean over all of its blocks.
    """

    over_samples: float = 0.0
    over_micro_batches: float = 0.0
    over_step: float = 0.0
    z: float = 0.0
    even: bool = False
    samples: int = 1
    together: int = 1
    others: Sequence[Peers] = ()
    scale: Callable[[], float] = lambda: 1.0

    @property
    def weight(self) -> float:
        """Return the weight of those that balance experts together."""
        return self.over_samples + self.over_micro_batches + self.over_step


class Balance:
    """The balance of one layer's experts in a step, as far as this rank's first forwards have gone.

    load: int64 [experts], how many tokens each got. values: fp64 [2], sums over forwards of what this rank adds to
    the balance losses' mean by weight, and to the z loss without its weight. rounds, seen: how many were counted for
    the loss over the step, and the tokens of each expert in them, int64 [experts].
    """

    def __init__(self, losses: BalanceLosses, router: Router, experts: int) -> None:
        self.losses, self.router = losses, router
        self.load = torch.zeros(experts, dtype=torch.int64, device="cpu")
        self.values = torch.zeros(2, dtype=torch.float64, device="cpu")
        self.rounds, self.seen = 0, torch.zeros_like(self.load)

    def clear(self) -> None:
        """Begin a step."""
        self.load.zero_()
        self.values.zero_()
        self.seen.zero_()
        self.rounds = 0

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
        if not losses.weight and not losses.z:
            return routed.probabilities
        values = [routed.logits.new_zeros(())] * 2
        if losses.weight:
            assert decision.counts is not None
            shares = self.router.shares(routed.logits).unflatten(0, (-1, samples))
            values[0] = balance_loss(shares, decision.counts, self.router.topk, length)
        if losses.z:
            values[1] = routed.logits.logsumexp(-1).square().sum() / (length * samples)
        if first:
            self.values += torch.stack(values).detach()
        weighted = losses.weight * values[0] + losses.z * values[1]
        return _Attached.apply(routed.probabilities, weighted, losses.scale())

    @torch.no_grad()
    def _count(
        self, routed: Routed, decision: Decision, samples: int, summed: Callable[[Tensor], Tensor]
    ) -> None:
        """Count the decision's tokens."""
        if self.load.device != routed.logits.device:
            device = routed.logits.device
            self.load, self.values, self.seen = (x.to(device) for x in (self.load, self.values, self.seen))
        count = len(self.load)
        decision.counts = counted(routed.experts, 1, 1, count)
        self.load += decision.counts[0]
        if not self.losses.weight:
            return
        chosen = routed.experts
        if not self.router.plain:
            if decision.plain is None:
                decision.plain = routed.logits.topk(self.router.topk).indices.to(torch.int32)
            chosen = decision.plain.long()
        decision.counts = self._usual(chosen, samples, summed).to(routed.logits.dtype)

    def _usual(self, chosen: Tensor, samples: int, summed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the tokens of each expert by which the losses go: means over samples, weighted as the losses are.

        The result is fp64 [blocks, experts]; blocks are consecutive samples, of one or of a micro-batch each.
        """
        losses, experts = self.losses, len(self.load)
        size = 1 if losses.over_samples else losses.samples
        own = summed(counted(chosen, samples // size, samples, experts).to(torch.int32))
        micro_batches = own.unflatten(0, (-1, losses.samples // size)).sum(1)
        wide = losses.over_micro_batches * micro_batches.double()
        if losses.over_step:
            wide += losses.over_step * self._so_far(micro_batches)
        wide = (wide / losses.samples).repeat_interleave(losses.samples // size, 0)
        return (losses.over_samples * own.double() + wide) / losses.weight

    def _so_far(self, micro_batches: Tensor) -> Tensor:
        """Return the mean over all micro-batches of the step up to each one's round, fp64 [micro-batches, experts].

        micro_batches: the tokens of each expert in those of this forward, int64 [micro-batches, experts].
        """
        together, others = self.losses.together, self.losses.others
        tokens = micro_batches.unflatten(0, (-1, together)).sum(1)
        for peers in others:
            if peers.size > 1:
                tokens = peers.start_sum(tokens).wait()
        tokens = self.seen + tokens.cumsum(0)
        rounds = torch.arange(1, len(tokens) + 1, device=tokens.device) + self.rounds
        self.seen, self.rounds = tokens[-1], self.rounds + len(tokens)
        ranks = together * prod(peers.size for peers in others)
        return (tokens.double() / (rounds * ranks).unsqueeze(1)).repeat_interleave(together, 0)


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
    """Return the mean over samples of E / (k T^2) sum_i n_i sum_x p_i(x) (Fedus et al. 2022), which is Megatron's
    aux_loss / coefficient: 1 if every expert gets as many tokens, and has the same share of each.

    shares: p, [s, b, E], of this rank's tokens. counts: n, [blocks, E], of a sample's tokens, means over blocks of
    samples. topk: k. length: T, tokens of a sample.
    """
    blocks, experts = counts.shape
    sums = shares.unflatten(1, (blocks, -1)).sum((0, 2))
    return (sums * counts).sum() * (experts / (topk * length * length * shares.shape[1]))


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
