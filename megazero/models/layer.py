"""One transformer layer: a mixer of tokens and feed-forward, each behind a norm and added to the residual."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megazero.config.model.mixers import MIXERS
from megazero.config.model.section import ModelConfig
from megazero.cp import ContextParallel
from megazero.families.layer_kinds import NOTHING, LayerKind
from megazero.models.dropout import NO_DROPOUT, Key, LayerDropout, keyed_dropout
from megazero.models.experts import MixtureOfExperts
from megazero.models.feed_forward import FeedForward
from megazero.models.norm import make_norm, normed
from megazero.models.positions import LayerTables
from megazero.moe import BalanceLosses, Decision, ExpertParallel
from megazero.tp import TensorParallel


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap x tanh(x / cap), which lies between -cap and cap (Bello et al. 2017; Gemma Team 2024)."""
    return (x / cap).tanh() * cap


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Call ``function`` without keeping its activations; the backward calls it again.

    Randomness is keyed, so no generator state is saved.
    """
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class DecoderLayer(nn.Module):
    """Computes x + attention(norm(x)), then x + feed_forward(norm(x)).

    Parallel blocks (Wang and Komatsuzaki 2021) compute x + attention(norm(x)) + feed_forward(norm(x)), with one norm
    for both or with two. With norms of outputs it is x + norm(attention(x)), then x + norm(feed_forward(x)); with
    norms on both sides (Ding et al. 2021), x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x))).

    ``kind`` says what its attention is, a mixer of tokens (config/model/mixers), and whether a mixture of experts is
    in the place of feed_forward, which adds ``losses``. Where one of both is nothing, so is what it adds.
    ``recompute`` is as in Decoder.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        tp: TensorParallel,
        cp: ContextParallel,
        ep: ExpertParallel,
        recompute: str,
        losses: BalanceLosses,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.recompute = config, tp, recompute

        def norm(name: str) -> nn.Module | None:
            return make_norm(config, **factory) if name in config.norms_of(kind) else None

        self.input_norm = norm("input_norm")
        self.attention: nn.Module | None = None
        if kind.mixer != NOTHING:
            mixer = resolve_name(MIXERS[kind.mixer].module)
            self.attention = mixer(config, tp, cp, recompute, **factory)
        self.attention_output_norm = norm("attention_output_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp: FeedForward | MixtureOfExperts | None = None
        if kind.feed_forward != NOTHING:
            self.mlp = (
                MixtureOfExperts(config, tp, cp, ep, losses, **factory)
                if kind.experts
                else FeedForward(config, tp, **factory)
            )
        self.mlp_output_norm = norm("mlp_output_norm")

    def forward(
        self,
        x: Tensor,
        tables: LayerTables,
        dropout: LayerDropout = NO_DROPOUT,
        decision: Decision | None = None,
    ) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. The result has the same shape.

        ``tables`` are those of the layer's kind (``Positions.tables``). ``decision``: which experts the tokens go to,
        of a layer that has some.
        """
        return self._perhaps_again("full", self._layer, x, tables, dropout, decision)

    def _layer(
        self, x: Tensor, tables: LayerTables, dropout: LayerDropout, decision: Decision | None
    ) -> Tensor:
        words = (None, None) if dropout.outputs is None else dropout.outputs.unbind()
        halfway = self._attended(x, tables, dropout.attention, words[0])
        return self._perhaps_again("mlp", self._fed, *halfway, words[1], decision)

    def _attended(
        self, x: Tensor, tables: LayerTables, key: Key | None, words: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual with attention's output, and what the MLP, or the norm before it, takes."""
        if self.attention is None:
            return x, x
        inputs = normed(self.input_norm, x)
        attended = normed(self.attention_output_norm, self.attention(inputs, tables, key))
        attended = self._added(x, attended, words)
        if not self.config.parallel_block:
            return attended, attended
        return attended, inputs if self.mlp_norm is None else x

    def _fed(
        self, attended: Tensor, inputs: Tensor, words: Tensor | None, decision: Decision | None
    ) -> Tensor:
        """Return the residual ``attended`` and what the MLP makes of ``inputs``."""
        if self.mlp is None:
            return attended
        inputs = normed(self.mlp_norm, inputs)
        fed = self.mlp(inputs) if decision is None else self.mlp(inputs, decision)
        return self._added(attended, normed(self.mlp_output_norm, fed), words)

    def _perhaps_again(self, granularity: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call ``function``, which the backward calls again if that is what is recomputed."""
        if self.recompute == granularity and torch.is_grad_enabled():
            return recomputed(function, *args)
        return function(*args)

    def _added(self, x: Tensor, output: Tensor, words: Tensor | None) -> Tensor:
        """Return the residual ``x`` and the layer's ``output`` after dropout, times its multiplier."""
        dropped = keyed_dropout(output, self.config.hidden_dropout, words)
        return torch.add(x, dropped, alpha=self.config.residual_multiplier)
