"""The reference: one rank of plain torch with a whole decoder, autograd, torch.optim and clip_grad_norm_.

It computes in fp64, so that a difference is the ranks' own rounding and not the sum of two roundings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from megazero.config import RunConfig
from megazero.config.layout.batch_sizes import BatchSizeRampup
from megazero.models import Decoder
from megazero.train.parallelize import MicroBatch, matrix_traits, optimizer_factory
from megazero.verify.training_run import documents_of, tokens_of
from megazero.zero.by_matrix import MATRIX

Tensors = dict[str, np.ndarray]  # whole parameters of one rank's shapes, by name, fp64


@dataclass(frozen=True)
class Curve:
    """A run of the reference's own. losses: the loss of each step. initial: the weights it began with."""

    losses: list[float]
    initial: Tensors


class Reference:
    """The configuration's model and optimizer on one rank. The batch is dealt over ``data_parallel`` ranks."""

    def __init__(self, config: RunConfig, data_parallel: int) -> None:
        self.config, self.data_parallel = config, data_parallel
        whole = replace(config.model, attention_dropout=0.0, hidden_dropout=0.0)
        self.decoder = Decoder(whole, z_loss=config.training.z_loss_strength, dtype=torch.float64)
        self.decoder.initialize(config.training.seed)
        sizes = BatchSizeRampup.of(config, data_parallel)
        self._sizes = [sizes.batch_size(sizes.consumed_after(step)) for step in range(100)]

    def train(self, steps: int) -> Curve:
        """Train for ``steps`` steps from the initial weights."""
        clip, named = self.config.optimizer.clip_grad, dict(self.decoder.named_parameters())
        optimizer = optimizer_factory(self.config)(self._groups(named))
        initial, losses = _arrays(named), list[float]()
        for step in range(steps):
            optimizer.zero_grad()
            losses.append(self._backward(step))
            if clip:
                torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), clip)
            optimizer.step()
        return Curve(losses, initial)

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
        with torch.no_grad():
            for name, p in self.decoder.named_parameters():
                p.copy_(torch.from_numpy(weights[name]))
        self.decoder.zero_grad()
        self._backward(step, without_last)
        return _arrays({n: p.grad for n, p in self.decoder.named_parameters() if p.grad is not None})

    def micro_batches(self, step: int) -> int:
        return self._sizes[step] // (self.data_parallel * self.config.batch.micro_batch_size)

    def _backward(self, step: int, without_last: bool = False) -> float:
        tokens, labels, mask = tokens_of(self.config, step, self._sizes[step])
        packed = MicroBatch(tokens, labels, mask, None, **documents_of(self.config, tokens)).documents
        losses = self.decoder(tokens, labels, documents=packed) * mask
        if without_last:
            losses = losses[: -self.data_parallel * self.config.batch.micro_batch_size]
        total = losses.sum() / mask.sum()
        total.backward()
        return total.item()


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
