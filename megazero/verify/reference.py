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
from megazero.config.options.sections import OuterConfig
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
from megazero.verify.training_run import documents_of, replica_rows, tokens_of
from megazero.zero.by_matrix import MATRIX

FLOOR = 1e-6  # smallest norm that counts, as a share of the global norm
Tensors = dict[str, np.ndarray]  # whole parameters of one rank's shapes, by name, fp64


@dataclass(frozen=True)
class Curve:
    """A run of the reference's own. losses: the loss of each step. initial: the weights it began with."""

    losses: list[float]
    initial: Tensors


class Reference:
    """The configuration's model and optimizer on one rank, in place of an outer replica (or of all ranks).

    The batch is dealt over ``data_parallel`` ranks, those of all replicas. routed, plain: of each step the experts
    of its tokens by layer, [s, samples, k], which it takes as they are; beyond the last it chooses itself. regret: by
    how much a score that was so taken was at most below the k-th largest of its token, in the last ``gradients``.
    """

    def __init__(
        self,
        config: RunConfig,
        data_parallel: int,
        replica: int = 0,
        replicas: int = 1,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.config, self.data_parallel = config, data_parallel
        self.replica, self.replicas = replica, replicas
        whole = replace(config.model, attention_dropout=0.0, hidden_dropout=0.0)
        product = make_product(config.precision.product, **config.precision.product_options)
        self.decoder = Decoder(
            whole,
            TensorParallel(product=product),
            z_loss=config.training.z_loss_strength,
            balance=balance_losses(config, together=data_parallel // replicas),
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
        coarse = Reference(self.config, self.data_parallel, self.replica, self.replicas, torch.float32)
        coarse.routed, coarse.plain = self.routed, self.plain
        worst: dict[str, float] = {}
        for step, weights in enumerate(every):
            own = relative_errors(coarse.gradients(weights, step), self.gradients(weights, step))
            worst = {name: max(error, worst.get(name, 0.0)) for name, error in own.items()}
        return worst

    def _backward(self, step: int) -> float:
        batch = tokens_of(self.config, step, self._sizes[step])
        tokens, labels, mask = (each[self._rows(step)] for each in batch)
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

    def _rows(self, step: int) -> torch.Tensor:
        micro = self.config.batch.micro_batch_size
        return replica_rows(self._sizes[step], micro, self.data_parallel, self.replica, self.replicas)


def _chosen(routed: Sequence[Mapping[int, np.ndarray]], step: int) -> dict[int, torch.Tensor]:
    """Return the experts of a step's tokens by layer, [T, k]; nothing where no run chose."""
    layers = routed[step] if step < len(routed) else {}
    return {n: torch.from_numpy(experts).flatten(0, 1) for n, experts in layers.items()}


class OuterReference:
    """The outer optimizer, one of torch's over whole parameters (DiLoCo, arXiv 2311.08105, algorithm 1).

    Differences may be on their way for some steps. under_way: outer gradients by parameter, by the step in which they
    arrive.
    """

    def __init__(self, config: RunConfig, anchor: Tensors) -> None:
        """Begin with these weights, fp64."""
        self.config, self.outer = config, config.outer
        self.anchor = {name: torch.from_numpy(w.copy()).requires_grad_() for name, w in anchor.items()}
        momentum = self.outer.outer_momentum
        rule: dict[str, Any] = {"lr": self.outer.outer_lr, "momentum": momentum}
        rule["nesterov"] = self.outer.outer_optimizer == "nesterov" and momentum > 0
        if self.outer.outer_optimizer == "average":
            rule = {"lr": 1.0}
        self.optimizer = torch.optim.SGD(self.anchor.values(), **rule)
        self.under_way: dict[int, dict[str, torch.Tensor]] = {}

    def meet(self, step: int, replicas: Sequence[Tensors], anchor: Tensors | None = None) -> Tensors:
        """Let what is due leave and arrive at the end of a step of replicas with these weights.

        Returns the new anchor, fp64, or nothing if none arrives. anchor: the old one, by default the last call's.
        """
        self._begin(anchor)
        if leaving(self.outer, step):
            self.under_way[step + self.outer.outer_delay] = self._gradients(replicas)
        return self._take_up(self.under_way.pop(step, {}))

    def _begin(self, anchor: Tensors | None) -> None:
        for name, w in anchor.items() if anchor is not None else ():
            self.anchor[name].detach().copy_(torch.from_numpy(w))

    def _gradients(self, replicas: Sequence[Tensors]) -> dict[str, torch.Tensor]:
        every = {
            name: torch.stack([torch.from_numpy(each[name]) for each in replicas]) for name in self.anchor
        }
        return {name: self.anchor[name].detach() - stacked.mean(0) for name, stacked in every.items()}

    def _take_up(self, gradients: Mapping[str, torch.Tensor]) -> Tensors:
        if not gradients:
            return {}
        for name, theta in self.anchor.items():
            theta.grad = gradients[name]
        self.optimizer.step()
        return _arrays(self.anchor)


def leaving(outer: OuterConfig, step: int) -> bool:
    """Tell whether replicas meet, or differences leave, at the end of a step, which is counted from 0."""
    return step >= 0 and (step + 1) % outer.outer_interval == 0


def arriving(outer: OuterConfig, step: int) -> bool:
    """Tell whether differences arrive at the end of a step."""
    return leaving(outer, step - outer.outer_delay)


def train_together(references: Sequence[Reference], steps: int) -> list[Curve]:
    """Train replicas that meet as their configuration says. Returns the curve of each."""
    config, initial = references[0].config, [each.weights for each in references]
    together, running = OuterReference(config, initial[0]), [each.train(steps) for each in references]
    losses: list[list[float]] = [[] for _ in references]
    for step in range(steps):
        for own, run in zip(losses, running, strict=True):
            own.append(next(run))
        if len(references) > 1:
            weights = [each.weights for each in references]
            arrived = together.meet(step, weights)
            for each, own_weights in zip(references, weights, strict=True):
                each.load({**own_weights, **arrived})
    return [Curve(own, weights) for own, weights in zip(losses, initial, strict=True)]


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
