"""What a callback is: a class whose methods are the moments of a run.

The trainer calls every moment of every callback on every rank, in the same order. So a callback may use collectives,
if it does so on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from megazero.config import RunConfig
from megazero.data.source import Dataset
from megazero.log.metrics import IterationMetrics
from megazero.mesh.mesh import Mesh
from megazero.models import Decoder
from megazero.train.state.progress import Progress
from megazero.zero import Engine, StepInfo

Numbers = Mapping[str, float | torch.Tensor]

# How the numbers that ranks exchange become one value: "each" keeps the tuple of all ranks' numbers, in rank order.
REDUCTIONS: Mapping[str, Callable[[tuple[float, ...]], Any]] = MappingProxyType(
    {"sum": sum, "max": max, "each": tuple}
)


class WatchedRun(Protocol):
    """What callbacks see of the run: the trainer."""

    config: RunConfig
    mesh: Mesh
    decoder: Decoder
    engine: Engine
    progress: Progress

    def note(self, text: str) -> None:
        """Print a line, on the first rank."""

    def warn(self, text: str) -> None:
        """Print a warning, on the first rank."""

    def stop(self, why: str) -> None:
        """Save and stop after the next iteration, in whose exchange the ranks agree. One rank is enough."""

    def asked_to_stop(self) -> bool:
        """Tell whether the run is to stop, the same on every rank. Collective."""

    def mean_loss(self, data_set: Dataset, stoppable: bool = True) -> float | None:
        """Return the loss over --eval-iters global batches. Collective. None if the run is to stop before the end."""


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One iteration that was trained.

    loss: the mean over the tokens of the global batch, in nats. info: the engine's account, with the gradient norm.
    samples: those of the global batch, of ``seq_length`` tokens. traffic: bytes that this rank sent, by hop
    (comm/hops.py: Traffic.take). bill: seconds by item (log/time_bill.py). numbers: those that this callback
    exchanged, reduced over the ranks. meeting: metrics of the replicas' meeting at its end.
    """

    iteration: int
    loss: float
    info: StepInfo
    samples: int
    seq_length: int
    seconds: float
    traffic: Mapping[str, int]
    bill: Mapping[str, float]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    meeting: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.samples * self.seq_length


class Callback:
    """Watches a run. Override the moments that are needed; the others do nothing.

    exchanged: the numbers that ranks exchange in every step, by name, each with its key of REDUCTIONS. They travel
    with the gradient norm, in the one exchange of a step. run: set before ``start``.
    """

    exchanged: Mapping[str, str] = MappingProxyType({})
    run: WatchedRun

    def start(self) -> None:
        """The model is loaded. Training begins."""

    def before_step(self, iteration: int) -> None:
        """Iteration ``iteration`` is trained next."""

    def numbers(self) -> Numbers:
        """Return this rank's value of each name in ``exchanged``, after the backward. Do not wait for the device:
        tensors are copied on it.
        """
        return {}

    def after_step(self, step: TrainedStep) -> Mapping[str, Any] | None:
        """The weights are updated. Return metrics for the iteration's line, or None."""

    def logged(self, metrics: IterationMetrics) -> None:
        """The line of an iteration is complete."""

    def evaluate(self) -> Mapping[str, float] | None:
        """The validation data were evaluated. Return results of further evaluations by name, or None."""

    def evaluated(self, at: Progress, name: str, loss: float) -> None:
        """A part of the data was evaluated. name: "test" for the test data, "" for the validation data."""

    def saved(self, iteration: int, path: Path, seconds: float) -> None:
        """A checkpoint is complete, so many seconds after its save began."""

    def closing(self) -> None:
        """The last iteration of this start is trained. The last save follows."""

    def state(self) -> Mapping[str, Any]:
        """Return what a checkpoint keeps, in JSON types. The first rank's is saved."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned, on every rank. A checkpoint without it does not call this."""
