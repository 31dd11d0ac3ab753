"""The reference: one rank of plain torch with a whole decoder, autograd, torch.optim and clip_grad_norm_.

It computes in fp64, so that a difference is the ranks' own rounding and not the sum of two roundings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megazero.config import RunConfig
from megazero.config.layout.batch_sizes import BatchSizeRampup
from megazero.config.options.sections import OuterConfig
from megazero.models import Decoder
from megazero.train.parallelize import MicroBatch, matrix_traits, optimizer_factory
from megazero.verify.training_run import documents_of, replica_rows, tokens_of
from megazero.zero.by_matrix import MATRIX

Tensors = dict[str, np.ndarray]  # whole parameters of one rank's shapes, by name, fp64


@dataclass(frozen=True)
class Curve:
    """A run of the reference's own. losses: the loss of each step. initial: the weights it began with."""

    losses: list[float]
    initial: Tensors


class Reference:
    """The configuration's model and optimizer on one rank, in place of an outer replica (or of all ranks).

    The batch is dealt over ``data_parallel`` ranks, those of all replicas.
    """

    def __init__(self, config: RunConfig, data_parallel: int, replica: int = 0, replicas: int = 1) -> None:
        self.config, self.data_parallel, self.replica, self.replicas = (
            config,
            data_parallel,
            replica,
            replicas,
        )
        whole = replace(config.model, attention_dropout=0.0, hidden_dropout=0.0)
        self.decoder = Decoder(whole, z_loss=config.training.z_loss_strength, dtype=torch.float64)
        self.decoder.initialize(config.training.seed)
        sizes = BatchSizeRampup.of(config, data_parallel)
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
        plain, apart = self.decoder.no_weight_decay(), self.decoder.embedding_and_head()
        rate, matrices = self.config.optimizer.decoupled_lr, matrix_traits(self.decoder, self.config)
        return [
            {"params": [p]}
            | ({MATRIX: True} if name in matrices else {})
            | ({"weight_decay": 0.0} if name in plain else {})
            | ({"lr": rate} if rate is not None and name in apart else {})
            for name, p in named.items()
        ]

    def gradients(self, weights: Mapping[str, np.ndarray], step: int, without_last: bool = False) -> Tensors:
        """Return the gradients (fp64) of a step's mean loss at these weights.

        without_last: each rank's last micro-batch is left out.
        """
        self.load(weights)
        self.decoder.zero_grad()
        self._backward(step, without_last)
        return _arrays({n: p.grad for n, p in self.decoder.named_parameters() if p.grad is not None})

    def micro_batches(self, step: int) -> int:
        return self._sizes[step] // (self.data_parallel * self.config.batch.micro_batch_size)

    def _backward(self, step: int, without_last: bool = False) -> float:
        batch, micro = tokens_of(self.config, step, self._sizes[step]), self.config.batch.micro_batch_size
        tokens, labels, mask = (each[self._rows(step)] for each in batch)
        packed = MicroBatch(tokens, labels, mask, None, **documents_of(self.config, tokens)).documents
        losses = self.decoder(tokens, labels, documents=packed) * mask
        if without_last:
            losses = losses[: -self.data_parallel // self.replicas * micro]
        total = losses.sum() / mask.sum()
        total.backward()
        return total.item()

    def _rows(self, step: int) -> torch.Tensor:
        micro = self.config.batch.micro_batch_size
        return replica_rows(self._sizes[step], micro, self.data_parallel, self.replica, self.replicas)

    def share(self, step: int) -> float:
        """Return the share of the step's tokens that this replica has."""
        mask = tokens_of(self.config, step, self._sizes[step])[2]
        return float(mask[self._rows(step)].sum() / mask.sum())


class OuterReference:
    """The outer optimizer, one of torch's over whole parameters (DiLoCo, arXiv 2311.08105, algorithm 1)."""

    def __init__(self, outer: OuterConfig, anchor: Tensors) -> None:
        """Begin with these weights, fp64."""
        self.anchor = {name: torch.from_numpy(w.copy()).requires_grad_() for name, w in anchor.items()}
        momentum = outer.outer_momentum
        rule: dict[str, Any] = {"lr": outer.outer_lr, "momentum": momentum}
        rule["nesterov"] = outer.outer_optimizer == "nesterov" and momentum > 0
        if outer.outer_optimizer == "average":
            rule = {"lr": 1.0}
        self.optimizer = torch.optim.SGD(self.anchor.values(), **rule)

    def meet(self, replicas: Sequence[Tensors], anchor: Tensors | None = None) -> Tensors:
        """Take the outer step of replicas with these weights. Returns the new anchor, fp64.

        anchor: the old one, by default that of the last call.
        """
        for name, theta in self.anchor.items():
            if anchor is not None:
                theta.detach().copy_(torch.from_numpy(anchor[name]))
            every = torch.stack([torch.from_numpy(weights[name]) for weights in replicas])
            theta.grad = theta.detach() - every.mean(0)
        self.optimizer.step()
        return _arrays(self.anchor)


def train_together(references: Sequence[Reference], steps: int) -> list[Curve]:
    """Train replicas that meet as their configuration says. Returns the curve of each."""
    outer, initial = references[0].config.outer, [each.weights for each in references]
    together, running = OuterReference(outer, initial[0]), [each.train(steps) for each in references]
    losses: list[list[float]] = [[] for _ in references]
    for step in range(steps):
        for own, run in zip(losses, running, strict=True):
            own.append(next(run))
        if len(references) > 1 and (step + 1) % outer.outer_interval == 0:
            anchor = together.meet([each.weights for each in references])
            for each in references:
                each.load(anchor)
    return [Curve(own, weights) for own, weights in zip(losses, initial, strict=True)]


def _arrays(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: t.detach().double().numpy().copy() for name, t in tensors.items()}


def global_norm(gradients: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(g**2) for g in gradients.values())))


def relative_errors(got: Tensors, want: Tensors, noisy: Sequence[str]) -> dict[str, float]:
    """Return ||difference|| / max(||g||, floor x global norm) of each parameter.

    noisy: parameters whose exact gradient is zero, so that the computed one is rounding noise.
    """
    total = global_norm(want)
    return {
        name: float(np.linalg.norm(got[name] - g))
        / max(float(np.linalg.norm(g)), (FLOOR_OF_NOISE if name in noisy else FLOOR) * total)
        for name, g in want.items()
    }


# Smallest norm that counts, as a share of the global norm. A key bias without rotary positions shifts all scores of a
# query alike: its gradient is noise of 1e-10 to 1e-9 of the global norm in fp32, on one rank as on many.
FLOOR, FLOOR_OF_NOISE = 1e-6, 1e-2
