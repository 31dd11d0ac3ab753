"""The reference: one rank of plain torch with a whole decoder, autograd, torch.optim and clip_grad_norm_.

It computes in fp64, so that a difference is the ranks' own rounding and not the sum of two roundings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megazero.config import RunConfig
from megazero.config.schedule.batch_sizes import BatchSizes
from megazero.models import Decoder
from megazero.models.experts import MixtureOfExperts
from megazero.models.multi_token import further_tokens
from megazero.moe import Decision, Router
from megazero.moe.balance import move_bias
from megazero.products import make_product
from megazero.tp import TensorParallel
from megazero.train.expert_balance import balance_losses
from megazero.train.parallelize import MicroBatch, is_matrix, optimizer_factory, own_rates
from megazero.verify.training_run import documents_of, tokens_of
from megazero.zero.by_matrix import MATRIX

FLOOR = 1e-6  # smallest norm that counts, as a share of the global norm
Tensors = dict[str, np.ndarray]  # whole parameters of one rank's shapes, by name, fp64


@dataclass(frozen=True)
class Curve:
    """A run of the reference's own. losses: the loss of each step. initial: the weights it began with."""

    losses: list[float]
    initial: Tensors


class Reference:
    """The configuration's model and optimizer on one rank, in place of all ranks.

    The batch is dealt over ``data_parallel`` ranks. routed, plain: of each step the experts
    of its tokens by layer, [s, samples, k], which it takes as they are; beyond the last it chooses itself. regret: by
    how much a score that was so taken was at most below the k-th largest of its token, in the last ``gradients``.
    """

    def __init__(self, config: RunConfig, data_parallel: int, dtype: torch.dtype = torch.float64) -> None:
        self.config, self.data_parallel = config, data_parallel
        whole = replace(config.model, attention_dropout=0.0, hidden_dropout=0.0)
        product = make_product(config.precision.product, **config.precision.product_options)
        self.decoder = Decoder(
            whole,
            TensorParallel(product=product),
            z_loss=config.training.z_loss_strength,
            balance=balance_losses(config, together=data_parallel),
            mtp_loss_scaling_factor=config.training.mtp_loss_scaling_factor,
            dtype=dtype,
        )
        self.decoder.initialize(config.training.seed)
        self.routed: Sequence[Mapping[int, np.ndarray]] = ()
        self.plain: Sequence[Mapping[int, np.ndarray]] = ()
        self.regret = 0.0
        for module in self.decoder.modules():
            if isinstance(module, MixtureOfExperts):
                module.register_forward_pre_hook(self._judge)
        sizes = BatchSizes.of(config, data_parallel)
        self._sizes = [sizes.batch_size(sizes.consumed_after(step)) for step in range(100)]

    def train(self, steps: int) -> Iterator[float]:
        """Train from the initial weights. Yields the loss of each step after its update."""
        clip, named = self.config.optimizer.clip_grad, dict(self.decoder.named_parameters())
        optimizer = optimizer_factory(self.config)(self._groups(named))
        for step in range(steps):
            optimizer.zero_grad()
            loss = self._backward(step)
            if clip:
                torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), clip)
            optimizer.step()
            yield loss

    def curve(self, steps: int) -> Curve:
        """Train from the initial weights."""
        initial = self.weights
        return Curve([*self.train(steps)], initial)

    @property
    def weights(self) -> Tensors:
        """A copy of the weights."""
        return _arrays(dict(self.decoder.named_parameters()))

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, p in self.decoder.named_parameters():
                p.copy_(torch.from_numpy(weights[name]))

    def _groups(self, named: Mapping[str, torch.nn.Parameter]) -> list[dict[str, Any]]:
        """Return a group for each parameter, with the options that are its own."""
        plain, specs = self.decoder.no_weight_decay(), self.decoder.specs
        return [
            {"params": [p]}
            | ({MATRIX: True} if is_matrix(specs[name], self.config) else {})
            | ({"weight_decay": 0.0} if name in plain else {})
            | own_rates(specs[name], self.config)
            for name, p in named.items()
        ]

    def loss(self, weights: Mapping[str, np.ndarray], step: int) -> float:
        """Return the mean loss of a step at these weights."""
        self.load(weights)
        return self._backward(step)

    def gradients(self, weights: Mapping[str, np.ndarray], step: int) -> Tensors:
        """Return the gradients (fp64) of a step's mean loss at these weights."""
        self.load(weights)
        self.decoder.zero_grad()
        self.regret = 0.0
        self._backward(step)
        return _arrays({n: p.grad for n, p in self.decoder.named_parameters() if p.grad is not None})

    def rounding(self, every: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Return how far one rank of fp32 is from the gradients here, in the worst step of each parameter.

        every: the weights of each step. A gradient whose parts nearly cancel is as far on one rank as on many.
        """
        coarse = Reference(self.config, self.data_parallel, torch.float32)
        coarse.routed, coarse.plain = self.routed, self.plain
        worst: dict[str, float] = {}
        for step, weights in enumerate(every):
            own = relative_errors(coarse.gradients(weights, step), self.gradients(weights, step))
            worst = {name: max(error, worst.get(name, 0.0)) for name, error in own.items()}
        return worst

    def _backward(self, step: int) -> float:
        tokens, labels, mask = tokens_of(self.config, step, self._sizes[step])
        packed = MicroBatch(tokens, labels, mask, None, **documents_of(self.config, tokens)).documents
        self.take_biases(step)
        for balance in self.decoder.balances().values():
            balance.clear()
        decisions = {n: Decision(experts) for n, experts in _chosen(self.routed, step).items()}
        for n, experts in _chosen(self.plain, step).items():
            decisions[n].plain = experts
        count = mask.sum()
        self.decoder.balance_losses.scale = count.item
        ahead = self.config.model.mtp_num_layers
        total = self.decoder(
            *(tokens, labels),
            documents=packed,
            loss_weights=mask,
            decisions=decisions,
            further=further_tokens(labels, mask, ahead) if ahead else None,
        )
        total.backward()  # as ranks begin, since fp8 rounds a multiple otherwise
        for p in self.decoder.parameters():
            if p.grad is not None:
                p.grad /= count
        return (total / count).item()

    def take_biases(self, step: int) -> dict[str, torch.Tensor]:
        """Give the routers the biases that the steps before ``step`` left, by the tokens that these routed. Return
        them by name."""
        biases, rate = dict(self.decoder.named_buffers()), self.config.training.moe_router_bias_update_rate
        for bias in biases.values():
            bias.zero_()
        for before in range(min(step, len(self.routed)) if biases else 0):
            for n, experts in _chosen(self.routed, before).items():
                held = self.decoder.router_bias(n)
                assert held is not None
                move_bias(held, experts.flatten().bincount(minlength=len(held)), rate)
        return biases

    def loads(self, step: int) -> np.ndarray:
        """Return how many of the step's routed tokens each expert got, [layers with experts, experts]."""
        count = self.config.model.num_experts or 0
        routed = sorted(_chosen(self.routed, step).items())
        return torch.stack([experts.flatten().bincount(minlength=count) for _, experts in routed]).numpy()

    @property
    def balance(self) -> tuple[float, float]:
        """The balance loss and the z loss of the last step, means over layers."""
        every = [each.values for each in self.decoder.balances().values()]
        balance, z = torch.stack(every).mean(0).tolist() if every else (0.0, 0.0)
        return balance, z

    def _judge(self, mixture: torch.nn.Module, given: tuple[torch.Tensor, Decision]) -> None:
        """Compare scores that were chosen elsewhere with the largest ones here. Choosing one twice is no choice."""
        x, decision = given
        assert isinstance(mixture, MixtureOfExperts)
        if decision.experts is None:
            return
        chosen, router = decision.experts.long(), mixture.router
        logits = F.linear(x.flatten(0, 1), router.weight, router.bias).detach()
        ranks = mixture.choice.ranks(logits, router.e_score_correction_bias, mixture.even(x.shape[1]))
        least = mixture.choice.regret(ranks, chosen)
        twice = (chosen.sort().values.diff() == 0).any()
        self.regret = math.inf if twice else max(self.regret, float(least.max()))
        if decision.plain is not None:
            plain = decision.plain.long()
            self.regret = max(self.regret, float(Router(plain.shape[1]).regret(logits, plain).max()))


def _chosen(routed: Sequence[Mapping[int, np.ndarray]], step: int) -> dict[int, torch.Tensor]:
    """Return the experts of a step's tokens by layer, [T, k]; nothing where no run chose."""
    layers = routed[step] if step < len(routed) else {}
    return {n: torch.from_numpy(experts).flatten(0, 1) for n, experts in layers.items()}


def _arrays(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: t.detach().double().numpy().copy() for name, t in tensors.items()}


def global_norm(gradients: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(g**2) for g in gradients.values())))


def relative_errors(got: Tensors, want: Tensors) -> dict[str, float]:
    """Return ||difference|| / max(||g||, FLOOR x global norm) of each parameter."""
    least = FLOOR * global_norm(want)
    return {
        name: float(np.linalg.norm(got[name] - g)) / max(float(np.linalg.norm(g)), least)
        for name, g in want.items()
    }
