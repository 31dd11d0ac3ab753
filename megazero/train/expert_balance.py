"""The balance of experts in training: a step's loads and losses over all ranks, and the bias that follows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megazero.config import RunConfig
from megazero.config.options.sections import AUX, GLOBAL_AUX, SEQUENCE_AUX
from megazero.families.layer_kinds import layer_kinds
from megazero.models import Decoder
from megazero.moe import BalanceLosses
from megazero.moe.balance import move_bias
from megazero.zero import Engine, StepPart
from megazero.zero.scalars import NOTHING, Rows, Sums

_COLUMNS = 4  # the two losses, the worst load and its layer
_OF_LAYER = 3  # the same of each layer


def balance_losses(config: RunConfig, **options: Any) -> BalanceLosses:
    """Return the losses that the configuration's routers add. options: other fields of BalanceLosses."""
    training = config.training
    weights = training.balance_weights
    return BalanceLosses(
        over_samples=weights.get(SEQUENCE_AUX, 0.0),
        over_micro_batches=weights.get(AUX, 0.0),
        over_step=weights.get(GLOBAL_AUX, 0.0),
        z=training.moe_z_loss_coeff or 0.0,
        even=training.sinkhorn,
        samples=config.batch.micro_batch_size,
        **options,
    )


@dataclass(frozen=True)
class LayerBalance:
    """loss, z_loss: without their coefficients; 0 where none is added. load: the tokens of the fullest expert over
    the mean."""

    loss: float
    z_loss: float
    load: float


@dataclass(frozen=True)
class StepBalance:
    """Of all layers the means and the largest load, and that layer's number. layers: each by number, if asked for."""

    mean: LayerBalance
    fullest_layer: int
    layers: Mapping[int, LayerBalance]


class ExpertBalance(StepPart):
    """Takes part in the steps of an engine whose decoder has experts.

    Loads are added up over all ranks, in integers, so no layout changes a bias. each_layer: every layer's losses and
    load are exchanged, too. last: of the last step whose numbers were exchanged.
    """

    def __init__(self, decoder: Decoder, engine: Engine, rate: float, each_layer: bool = False) -> None:
        self.decoder, self.engine, self.mesh, self.rate = decoder, engine, engine.mesh, rate
        self.own, self.each_layer = decoder.balances(), each_layer
        every = layer_kinds(decoder.config, decoder.config.all_layers)
        self.numbers = [i for i, kind in enumerate(every) if kind.experts]
        self.columns = _COLUMNS + each_layer * _OF_LAYER * len(self.numbers)
        self.last: StepBalance | None = None
        decoder.balance_losses.scale = self._scale

    def metrics(self) -> dict[str, Any]:
        """Return the last step's numbers for a line of metrics.jsonl."""
        assert self.last is not None
        each = {f"{i}": self._named(layer) for i, layer in self.last.layers.items()}
        told = self._named(self.last.mean) | {"fullest_layer": self.last.fullest_layer}
        return {"experts": told | ({"layers": each} if each else {})}

    def _named(self, layer: LayerBalance) -> dict[str, float]:
        losses = self.decoder.balance_losses
        named = {"load": layer.load}
        if losses.weight:
            named["load_balancing_loss"] = layer.loss
        return named | ({"z_loss": layer.z_loss} if losses.z else {})

    @property
    def biases(self) -> list[torch.Tensor]:
        """The biases of this rank's layers that have one."""
        found = map(self.decoder.router_bias, self.own)
        return [bias for bias in found if bias is not None]

    def _scale(self) -> float:
        """Return what the step's divisor makes the share of one micro-batch."""
        return self.engine.divisor / (self.engine.micro_batches * self.mesh.batch_ranks)

    def write(self, row: torch.Tensor) -> None:
        """Write this rank's terms of the step's losses, and of all ranks the fullest expert. Collective."""
        config, device = self.decoder.config, row.device
        assert config.num_experts is not None
        loads = torch.zeros(len(self.numbers), config.num_experts, dtype=torch.int64, device=device)
        values = torch.zeros(len(self.numbers), 2, dtype=torch.float64, device=device)
        for i, balance in self.own.items():
            loads[self.numbers.index(i)] = balance.load
            values[self.numbers.index(i)] = balance.values
        self.loads = self.engine.combine(loads)
        values /= self.engine.micro_batches * self.mesh.batch_ranks
        fullest = self.loads.max(1).values * config.num_experts / self.loads.sum(1).double()
        row[:2] = values.mean(0)
        worst = fullest.max(0)
        row[2], row[3] = worst.values, worst.indices
        if self.each_layer:
            row[_COLUMNS:] = torch.cat([values, fullest.unsqueeze(1)], 1).flatten()

    def read(self, rows: Rows, sums: Sums) -> Mapping[str, Any]:
        losses = [sum(column) for column in zip(*rows, strict=True)]
        every, layers = rows[0], dict[int, LayerBalance]()
        for at, i in enumerate(self.numbers if self.each_layer else ()):
            first = _COLUMNS + at * _OF_LAYER
            layers[i] = LayerBalance(losses[first], losses[first + 1], every[first + 2])
        mean = LayerBalance(losses[0], losses[1], every[2])
        self.last = StepBalance(mean, self.numbers[int(every[3])], layers)
        return NOTHING

    def updated(self, made: bool) -> None:
        for i, balance in self.own.items():
            bias = self.decoder.router_bias(i)
            if made and bias is not None:
                move_bias(bias, self.loads[self.numbers.index(i)], self.rate)
            balance.clear()

    def aborted(self) -> None:
        for balance in self.own.values():
            balance.clear()


@contextmanager
def memory_explained(engine: Engine) -> Iterator[None]:
    """Say what experts may have to do with it where a forward or backward is out of memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        balance = engine.part(ExpertBalance)
        if balance is None or balance.last is None:
            raise
        raise torch.OutOfMemoryError(
            f"{error} In the step before, the fullest expert of layer {balance.last.fullest_layer} got "
            f"{balance.last.mean.load:.2f} times the mean of tokens, and no token is dropped: --moe-aux-loss-coeff "
            "evens them out, and a smaller --micro-batch-size leaves room"
        ) from error
