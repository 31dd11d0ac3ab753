"""The decoder: embedding, layers and head. Activations between them are [s, b, h].

Each of the three kinds of module is a unit of ZeRO: its parameters are gathered together when the module is called.
So all calls go through ``__call__``, and nothing reads another unit's parameters. Layers behind the last one, which
predict further tokens (models/multi_token.py), run inside the head's call, so that a forward gathers the head once.
Under tied embeddings the head holds the embedding's Parameter object. Where they are on different pipeline ranks, the
head holds one of its own, with the same values; with further tokens the last stage has the embedding as its own, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.checkpoint.placement import Places
from megazero.config.model.rules import check_model
from megazero.config.model.section import ModelConfig
from megazero.config.model.spec import padded_spec
from megazero.config.options.sections import RECOMPUTE
from megazero.cp import ContextParallel
from megazero.families.layer_kinds import layer_kind
from megazero.models.dropout import NO_DROPOUT, dropout_of_layers, key_words, keyed_dropout, sharded_key
from megazero.models.experts import Experts, MixtureOfExperts
from megazero.models.initialization import init_tensor
from megazero.models.layer import DecoderLayer, soft_cap
from megazero.models.multi_token import Further, FurtherLayer, FurtherLosses
from megazero.models.norm import make_norm
from megazero.models.placements import bias_placements, decoder_placements
from megazero.models.positions import Documents, Positions
from megazero.moe import Balance, BalanceLosses, Decision, ExpertParallel
from megazero.pp.partition import StageSpec, partition
from megazero.products.product import PLAIN
from megazero.tp import (
    PIECES,
    TensorParallel,
    VocabParallelEmbedding,
    VocabShard,
    chunked_loss,
    column_parallel,
    sequence_slice,
    vocab_parallel_cross_entropy,
)

Decisions = MutableMapping[int, Decision]  # of one micro-batch, by the layer's number
# Of a hidden state behind its norm: that of each layer that predicts a further token, the labels and their weights.
Predict = Callable[[Tensor], Iterator[tuple[Tensor, Tensor, Tensor]]]
_EMBEDDING = -1  # the embedding's layer number in dropout keys; -2, ...: in further predictions
_EMBEDDING_WEIGHT = "embedding.tokens.weight"


class Embedding(nn.Module):
    """Token embedding, with learned positions where the configuration has them."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, cp: ContextParallel, **factory: Any) -> None:
        super().__init__()
        self.config, self.tp, self.cp = config, tp, cp
        shard = VocabShard.of(config.vocabulary, config.padded_vocab_size(tp.size), tp)
        self.tokens = VocabParallelEmbedding(shard, config.hidden_size, tp, **factory)
        self.positions = (
            nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size, **factory))
            if config.position_embedding_type == "learned_absolute"
            else None
        )

    def forward(
        self,
        tokens: Tensor,
        dropout_key: int | None = None,
        documents: Documents | None = None,
        ahead: int = 0,
    ) -> Tensor:
        """Embed tokens, int [b, s]. Returns [s, b, h], or [s / size, b, h] under sequence parallel. All tokens are
        a context-parallel rank's own, those that lie ``ahead`` of each.
        """
        length = tokens.shape[1] * self.cp.size
        x = _scaled(self.tokens(tokens.t()), self.config.embedding_multiplier)
        if self.config.scale_embeddings:
            x = x * _rounded(math.sqrt(self.config.hidden_size), x.dtype)
        if self.positions is not None:
            if length > self.positions.shape[0]:
                raise ValueError(
                    f"sequence length {length} exceeds the {self.positions.shape[0]} learned positions; "
                    "shorten the sequence or raise max_position_embeddings"
                )
            own = sequence_slice(tokens.shape[1], self.tp)
            if documents is None or documents.position_ids is None:
                x = x + self.cp.own(self.positions[:length])[own].unsqueeze(1)
            else:
                x = x + F.embedding(documents.position_ids.t()[own], self.positions)
        if dropout_key is None or not self.training:
            return x
        key = sharded_key(
            (dropout_key, _EMBEDDING - ahead, 0), self.tp, self.cp, sharded=self.tp.sharded_sequence
        )
        return keyed_dropout(x, self.config.hidden_dropout, key_words([key], x.device)[0])


class Head(nn.Module):
    """Holds the final norm, the projection to the vocabulary, and the loss.

    ``weight`` is [vocabulary rows of this rank, h]. It is the embedding's Parameter when tied. ``loss_chunk``: of how
    many tokens logits are held for a weighted loss; None: of all. ``pieces``: of the loss (tp/cross_entropy.py).
    ``further``: takes the losses of further tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        tied: nn.Parameter | None,
        z_loss: float = 0.0,
        loss_chunk: int | None = None,
        further: FurtherLosses | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        tp = replace(tp, product=PLAIN)  # logits are computed as they are
        self.config, self.tp, self.z_loss, self.loss_chunk = config, tp, z_loss, loss_chunk
        self.further = further
        self.pieces = PIECES
        self.shard = VocabShard.of(config.vocabulary, config.padded_vocab_size(tp.size), tp)
        self.norm = make_norm(config, **factory)
        if tied is None:
            tied = nn.Parameter(torch.empty(self.shard.rows, config.hidden_size, **factory))
        self.weight = tied

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
        loss_scale: float = 1.0,
        predict: Predict | None = None,
    ) -> Tensor:
        """``x`` is [s, b, h], or its slice under sequence parallel. ``labels`` is int [b, s].

        Returns the loss of each token [b, s] in at least fp32, or, given ``loss_weights`` [b, s], the sum of the
        losses times these. Without labels it returns this rank's part of the padded vocabulary's logits,
        [b, s, rows]. ``loss_scale`` is the gradient that the backward of the sum will start from. ``predict``: runs
        layers that predict further tokens; the sum has the gradients of their losses, too.
        """
        x = self.norm(x)
        out = self._loss(x, labels, loss_weights, loss_scale)
        for hidden, own_labels, weights in () if predict is None else predict(x):
            assert self.further is not None
            own = self._loss(hidden, own_labels, weights * self.further.weight, loss_scale)
            out = self.further.add(out, own, weights.sum())
        return out

    def _loss(
        self, x: Tensor, labels: Tensor | None, loss_weights: Tensor | None, loss_scale: float
    ) -> Tensor:
        """Return what ``forward`` does, of ``x`` behind a norm."""
        x = _scaled(x, 1 / self.config.logits_scaling)  # narrower than the logits
        chunk = self.loss_chunk
        if labels is not None and loss_weights is not None and chunk is not None and chunk < labels.numel():
            given = labels.t(), loss_weights.t(), lambda logits, own: self._losses(self._capped(logits), own)
            return chunked_loss(x, self.weight, *given, self.tp, size=chunk, scale=loss_scale)
        (logits,) = column_parallel(x, [(self.weight, None)], self.tp)
        logits = self._capped(logits)
        if labels is None:
            return logits.transpose(0, 1)
        losses = self._losses(logits, labels.t()).t()
        return losses if loss_weights is None else (losses * loss_weights).sum()

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.final_logit_softcapping
        return soft_cap(logits, cap) if cap else logits

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        z_loss = self.z_loss if self.training else 0.0
        return vocab_parallel_cross_entropy(logits, labels, self.shard, self.tp, z_loss, self.pieces)


class Decoder(nn.Module):
    """A decoder-only transformer on one tensor-parallel rank. It is whole, or some of its pipeline stages.

    It is built with uninitialised parameters on any device, meta included. ``initialize``, ``load_hf_state_dict`` or
    the ZeRO engine (through ``initializer``) fills them.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel | None = None,
        cp: ContextParallel | None = None,
        *,
        ep: ExpertParallel | None = None,
        recompute: str = "none",
        attention_backend: str = "auto",
        z_loss: float = 0.0,
        loss_chunk: int | None = None,
        balance: BalanceLosses | None = None,
        mtp_loss_scaling_factor: float = 0.1,
        stages: Sequence[StageSpec] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """``config`` is a model section whose sizes are all known, of a run or from ``make_model``.

        ep: the ranks that share the experts.
        recompute: what the backward computes again instead of keeping it: "none", the "selective" core of attention,
            "mlp" (or experts) with its norms, or "full" layers.
        attention_backend: what computes attention (--attention-backend).
        z_loss: the weight of log(Z)^2 in the losses that are trained on (--z-loss-strength).
        loss_chunk: of how many tokens logits are held at once where ``loss_weights`` are given; None: of all.
        balance: the losses that routers of experts add in training; None: none.
        mtp_loss_scaling_factor: the weight of the mean loss of further tokens.
        stages: the pipeline stages that this rank holds. The default is one that is the whole model.
        Raises ValueError when the configuration cannot be built over ``tp``.
        """
        super().__init__()
        self.config = config
        self.tp = tp = tp if tp is not None else TensorParallel()
        self.cp = cp = cp if cp is not None else ContextParallel()
        self.ep = ep = ep if ep is not None else ExpertParallel()
        check_model(config, tp.size, cp.heads.size, cp.size)
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute = {recompute!r} is none of {', '.join(RECOMPUTE)}")
        self.stages = tuple(stages or partition(config.num_layers, 1, further=config.mtp_num_layers))
        factory = {"device": device, "dtype": dtype}
        self.positions = Positions(config, attention_backend, cp)
        self.first, self.last = (any(s.embedding for s in self.stages), any(s.head for s in self.stages))
        embeds = any(s.embeds for s in self.stages)
        self.embedding = Embedding(config, tp, cp, **factory) if embeds else None
        # By number in the whole model, so that names do not depend on the layout.
        own, losses = [i for s in self.stages for i in s.layers], balance or BalanceLosses()
        kinds = {str(i): layer_kind(config, i) for i in own}
        self.layers = nn.ModuleDict(
            {
                n: (DecoderLayer if int(n) < config.num_layers else FurtherLayer)(
                    config, kind, tp, cp, ep, recompute, losses, **factory
                )
                for n, kind in kinds.items()
            }
        )
        self.balance_losses = losses
        tied = None
        if self.embedding is not None and not config.untie_embeddings_and_output_weights:
            tied = self.embedding.tokens.weight
        layers = config.mtp_num_layers
        self.further = FurtherLosses(mtp_loss_scaling_factor / layers) if layers and self.last else None
        self.head = Head(config, tp, tied, z_loss, loss_chunk, self.further, **factory) if self.last else None
        self.specs = padded_spec(config, tp.size, ep.size).held(self.stages)
        built = [(name, tuple(p.shape)) for name, p in self.named_parameters()]
        assert built == [(name, p.local_shape(tp.size)) for name, p in self.specs.items()]

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        dropout_key: int | None = None,
        documents: Documents | None = None,
        loss_weights: Tensor | None = None,
        loss_scale: float = 1.0,
        decisions: Decisions | None = None,
        further: Further | None = None,
    ) -> Tensor:
        """Run a decoder that is whole. ``tokens`` and ``labels`` are int [b, s], a context-parallel rank's own.

        labels: labels[:, i] is the token after tokens[:, i] (nothing is shifted here).
        dropout_key: names the micro-batch, differently on each data-parallel rank. Training with dropout needs it.
        documents: those packed in the samples. Needed if positions or attention follow documents.
        loss_weights, loss_scale: as ``Head.forward``'s.
        decisions: which experts the tokens go to, by the layer's number. Those that are not there are taken, and left
            there.
        further: the labels of further tokens, and their weights; with those of ``loss_weights`` they are trained on.
        Returns the same as ``Head.forward``.
        """
        (whole,) = self.stages
        return self.run_stage(
            whole, tokens, labels, dropout_key, documents, loss_weights, loss_scale, decisions, further
        )

    def run_stage(
        self,
        stage: StageSpec,
        x: Tensor,
        labels: Tensor | None = None,
        dropout_key: int | None = None,
        documents: Documents | None = None,
        loss_weights: Tensor | None = None,
        loss_scale: float = 1.0,
        decisions: Decisions | None = None,
        further: Further | None = None,
    ) -> Tensor:
        """Run one of ``stages``. ``x`` is tokens [b, s] for the model's first stage, else what the stage before
        returned.

        Returns activations [s, b, h] (their slice under sequence parallel). The last stage returns as
        ``Head.forward``.
        """
        config = self.config
        if self.training and dropout_key is None and max(config.hidden_dropout, config.attention_dropout) > 0:
            raise ValueError("training with dropout needs a dropout_key; pass one, or call eval() first")
        if stage.embedding:
            assert self.embedding is not None
            x = self.embedding(x, dropout_key, documents)
        given = dropout_key, documents, decisions
        x = self.run_layers(stage.main, x, *given)
        if stage.head:
            assert self.head is not None
            predict: Predict | None = None
            if self.training and further is not None and labels is not None:
                predict = partial(self._predict, labels, further, *given)
            x = self.head(x, labels, loss_weights, loss_scale, predict)
        return x

    def _predict(
        self,
        tokens: Tensor,
        further: Further,
        dropout_key: int | None,
        documents: Documents | None,
        decisions: Decisions | None,
        x: Tensor,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Do as ``Predict`` says: each layer embeds the labels of the one before, the first those of the head."""
        assert self.embedding is not None
        behind = range(self.config.num_layers, len(self.config.all_layers))
        labels = zip(further.labels.unbind(-1), further.weights.unbind(-1), strict=True)
        for ahead, (index, (own, weights)) in enumerate(zip(behind, labels, strict=True), 1):
            embedded = self.embedding(tokens, dropout_key, None, ahead)
            x = self.run_layers([index], x, dropout_key, documents, decisions, embedded)
            yield x, own, weights
            tokens = own

    def run_layers(
        self,
        indices: Iterable[int],
        x: Tensor,
        dropout_key: int | None = None,
        documents: Documents | None = None,
        decisions: Decisions | None = None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """Run the layers of these numbers on activations ``x`` [s, b, h], or their slice under sequence parallel.
        The result has the same shape. Tables of positions and masks are made before, once for all of them,
        and so are the keys of their dropout. ``embedded``: what one that predicts a further token takes beside ``x``.
        """
        kinds = {index: layer_kind(self.config, index) for index in indices}
        length = x.shape[0] * (self.tp.size if self.tp.sharded_sequence else 1) * self.cp.size
        tables = self.positions.tables(kinds.values(), length, x, documents)
        dropout = {}
        if self.training and dropout_key is not None:
            dropout = dropout_of_layers(self.config, self.tp, self.cp, dropout_key, kinds, x.device)
        decisions = {} if decisions is None else decisions
        for index, kind in kinds.items():
            decision = decisions.setdefault(index, Decision()) if kind.experts else None
            given = x if embedded is None else (embedded, x)
            x = self.layers[str(index)](given, tables[kind], dropout.get(index, NO_DROPOUT), decision)
        return x

    @torch.no_grad()
    def full_logits(self, tokens: Tensor) -> Tensor:
        """Return the true vocabulary's logits [b, s, vocab_size], gathered over the tp axis, without gradient."""
        local = self(tokens)
        if self.tp.size > 1:
            parts = self.tp.start_gather(local.permute(2, 1, 0)).wait()
            local = parts.permute(2, 1, 0)
        return local[..., : self.config.vocabulary]

    def units(self, joined: int = 1) -> list[tuple[nn.Module, ...]]:
        """Return the modules whose parameters are gathered together, in order of use: ``joined`` layers, or one
        other module."""
        return [unit for part in self.units_of_parts(joined) for unit in part]

    def units_of_parts(self, joined: int) -> list[list[tuple[nn.Module, ...]]]:
        """Return ``units`` of each of ``stages``. Where its layers do not divide, the last of them are fewer."""
        parts = []
        for stage, modules in zip(self.stages, self.parts(), strict=True):
            first = int(stage.embeds)
            last = first + len(stage.layers)
            runs = [tuple(modules[i : min(i + joined, last)]) for i in range(first, last, joined)]
            parts.append([*((m,) for m in modules[:first]), *runs, *((m,) for m in modules[last:])])
        return parts

    def parts(self) -> list[list[nn.Module]]:
        """Return the modules of each of ``stages``, in order of use."""
        return [
            [
                *([self.embedding] if stage.embeds and self.embedding is not None else []),
                *(self.layers[str(index)] for index in stage.layers),
                *([self.head] if stage.head and self.head is not None else []),
            ]
            for stage in self.stages
        ]

    def experts_of(self, modules: Iterable[nn.Module]) -> tuple[Experts, ...]:
        """Return the experts of those of these modules that are layers with some."""
        return tuple(inner for m in modules for inner in m.modules() if isinstance(inner, Experts))

    def tied_ends(self) -> dict[str, str]:
        """Map the name here of the parameter that the pipeline's other end holds, too, to its common name."""
        if self.first == self.last:
            return {}
        return {name: _EMBEDDING_WEIGHT for name, p in self.specs.items() if p.tied}

    def balances(self) -> dict[int, Balance]:
        """Map the numbers of the layers with experts that are held here to the balance of these."""
        mixtures = ((int(i), layer.mlp) for i, layer in self.layers.items())
        return {i: each.balance for i, each in mixtures if isinstance(each, MixtureOfExperts)}

    def router_bias(self, layer: int) -> Tensor | None:
        """Return the bias fp32 [experts] that a layer with experts chooses them by, if it has one."""
        mixture = self.layers[f"{layer}"].mlp
        assert isinstance(mixture, MixtureOfExperts)
        return mixture.router.e_score_correction_bias

    def initialize(self, seed: int) -> None:
        """Fill the parameters with the values of ``initializer(self, seed)``. They must not be on meta."""
        value = initializer(self, seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(value(name))

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors held here that checkpoints have: parameters, and then routers' biases."""
        yield from self.named_parameters()
        yield from self.named_buffers()

    def placements(self) -> dict[str, Places]:
        """Map each of ``stored`` to its place in the family's Hugging Face tensors, tied weights once."""
        whole = {**decoder_placements(self.config, self.tp, ep=self.ep), **bias_placements(self.config)}
        tied = self.tied_ends()
        return {name: whole[tied.get(name, name)] for name, _ in self.stored()}

    def no_weight_decay(self) -> set[str]:
        """Return the norms and biases, which get no weight decay."""
        return {name for name, p in self.specs.items() if p.vector}

    def padded(self) -> dict[str, int]:
        """Map the parameters whose rows are words to how many of their elements are not padding."""
        config, tp = self.config, self.tp
        shard = VocabShard.of(config.vocabulary, config.padded_vocab_size(tp.size), tp)
        words = {n: p for n, p in self.named_parameters() if self.specs[n].vocabulary}
        return {name: shard.valid * (p.numel() // shard.rows) for name, p in words.items()}


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


@lru_cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=dtype, device="cpu").item()


def initializer(decoder: Decoder, seed: int) -> Callable[[str], Tensor]:
    """Return a function from parameter name to this rank's fp32 initial tensor (on the CPU)."""
    placements = decoder.placements()
    return lambda name: init_tensor(seed, decoder.specs[name], placements[name])
