"""Layers behind the last one that predict further tokens in training (DeepSeek-AI 2024, arXiv 2412.19437, 2.2).

Layer k of them (k = 1, 2, ...) takes the output of the layer before it, behind that one's norm, and the embeddings of
the tokens k further on. Embedding and head are the model's. What it predicts are the labels, k tokens further on in
the sample, whose last k tokens predict nothing. Names and the order of the projection's input are those of published
weights: embedding first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.config.model.section import ModelConfig
from megazero.models.dropout import NO_DROPOUT, LayerDropout
from megazero.models.experts import Linear
from megazero.models.layer import DecoderLayer
from megazero.models.norm import make_norm
from megazero.models.positions import LayerTables
from megazero.moe import Decision


class Further(NamedTuple):
    """Of each layer that predicts a further token the labels, int [b, s, layers], and the weights of their losses."""

    labels: Tensor
    weights: Tensor


def further_tokens(labels: Tensor, weights: Tensor, layers: int) -> Further:
    """Return labels and weights of whole samples [b, s], k tokens further on for layer k = 1, 2, ... of ``layers``.

    Behind a sample's end are zeros (Megatron's roll_tensor), and what still counts of the sample counts as much as
    the whole: a layer's loss is a mean over its own tokens, as in Megatron.
    """
    steps = range(1, layers + 1)
    ahead, counting = (torch.stack([F.pad(x[:, k:], (0, k)) for k in steps], -1) for x in (labels, weights))
    whole, left = weights.sum(1)[:, None, None], counting.sum(1, keepdim=True)
    return Further(ahead, counting * (whole / left.clamp(min=1)))


class FurtherLosses:
    """Adds the losses of further tokens to what is trained on, and not to the loss that is told.

    weight: of one layer's. sums: fp64 [2], their weighted losses and what the weights were of, since ``take``.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.sums = torch.zeros(2, dtype=torch.float64, device="cpu")

    def add(self, loss: Tensor, own: Tensor, tokens: Tensor) -> Tensor:
        """Return ``loss`` with the gradient of a layer's weighted loss ``own``, a sum over so many tokens, in which
        ``own`` has the weight."""
        self.sums = self.sums.to(own.device) + torch.stack([own.detach().double(), tokens.double()])
        return loss + (own - own.detach())

    def take(self) -> Tensor:
        """Return the sum of losses, without their weight, and of tokens, and begin anew."""
        taken, self.sums = self.sums, torch.zeros_like(self.sums)
        return taken / taken.new_tensor([self.weight, 1.0])


class FurtherLayer(DecoderLayer):
    """A decoder layer between a projection of two norms' outputs, and one more norm.

    Each tensor-parallel rank projects its own tokens: under sequence parallel there is nothing to gather.
    """

    def __init__(self, config: ModelConfig, *args: Any, **factory: Any) -> None:
        super().__init__(config, *args, **factory)
        h = config.hidden_size
        self.enorm, self.hnorm = make_norm(config, **factory), make_norm(config, **factory)
        self.eh_proj = Linear(h, 2 * h, bias=False, **factory)
        self.output_norm = make_norm(config, **factory)

    def forward(  # type: ignore[override]
        self,
        given: tuple[Tensor, Tensor],
        tables: LayerTables,
        dropout: LayerDropout = NO_DROPOUT,
        decision: Decision | None = None,
    ) -> Tensor:
        """``given``: embeddings, and the output of the layer before, each as ``DecoderLayer.forward`` takes x. They
        are one argument: of several the engine would take the first gradient for the end of the layer's backward.
        """
        return self._perhaps_again("full", self._predicted, *given, tables, dropout, decision)

    def _predicted(
        self,
        embedded: Tensor,
        x: Tensor,
        tables: LayerTables,
        dropout: LayerDropout,
        decision: Decision | None,
    ) -> Tensor:
        both = torch.cat((self.enorm(embedded), self.hnorm(x)), -1)
        return self.output_norm(self._layer(F.linear(both, self.eh_proj.weight), tables, dropout, decision))
