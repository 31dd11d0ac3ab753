"""Callbacks that report: seconds of ranks, rounding, balance of experts, and the planner's prediction."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megazero.comm.watch import LossyGradients
from megazero.comm.wire import Codecs
from megazero.config.options.sections import TrainingConfig
from megazero.config.options.skipping import due
from megazero.data.tokenizer import Tokenizer
from megazero.ops.stragglers import RankSeconds, Stragglers
from megazero.train.callbacks.callback import Callback, Numbers, TrainedStep
from megazero.train.expert_balance import ExpertBalance
from megazero.train.forecast import Forecast
from megazero.train.qk_clip import QKClip
from megazero.train.tasks import Scorer, evaluate_tasks, find_tasks
from megazero.zero.rounding import GRADIENTS

STEP_TIMES = 1000  # of the latest iterations


class StragglerWatch(Callback):
    """Warns of stragglers. Exchanges RankSeconds of the iteration before: those of a step are complete at its end."""

    exchanged = MappingProxyType(dict.fromkeys(RankSeconds._fields, "each"))

    def __init__(self, stragglers: Stragglers) -> None:
        self.stragglers = stragglers

    def numbers(self) -> Mapping[str, float]:
        return self.stragglers.own._asdict()

    def after_step(self, step: TrainedStep) -> dict[str, Any]:
        columns = (step.numbers[name] for name in RankSeconds._fields)
        rows = [RankSeconds(*row) for row in zip(*columns, strict=True)]
        metrics, warnings = self.stragglers.take(rows, step.bill, step.seconds)
        for line in warnings:
            self.run.warn(line)
        return metrics


class RoundingWatch(Callback):
    """Warns once in a start if gradients lose too much by rounding. It only warns."""

    def __init__(self, codecs: Codecs[Any]) -> None:
        self.gradients = LossyGradients(codecs)

    def after_step(self, step: TrainedStep) -> None:
        if line := self.gradients.take(step.info.errors.get(GRADIENTS)):
            self.run.warn(line)


class PartReport(Callback):
    """Adds what a part of the step has found to the iteration's line: the balance of experts, the largest score."""

    def __init__(self, part: ExpertBalance | QKClip) -> None:
        self.part = part

    def after_step(self, step: TrainedStep) -> dict[str, Any]:
        return self.part.metrics()


class FurtherReport(Callback):
    """Adds the mean loss of further tokens to the iteration's line."""

    exchanged = MappingProxyType({"loss": "sum", "tokens": "sum"})

    def numbers(self) -> Numbers:
        further = self.run.decoder.further
        loss, tokens = (0.0, 0.0) if further is None else further.take().unbind()
        return {"loss": loss, "tokens": tokens}

    def after_step(self, step: TrainedStep) -> dict[str, Any]:
        return {"mtp_loss": step.numbers["loss"] / max(step.numbers["tokens"], 1.0)}


class TasksReport(Callback):
    """Evaluates tasks behind the validation data."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, training: TrainingConfig) -> None:
        self.scorer, self.tokenizer, self.training = scorer, tokenizer, training

    def start(self) -> None:
        find_tasks(self.training.tasks, self.run.mesh.rank == 0)

    def evaluate(self) -> dict[str, float] | None:
        iteration, every = self.run.progress.iteration, self.training.eval_interval
        if not due(self.training.eval_tasks_interval or every, iteration - every, iteration):
            return None
        return evaluate_tasks(
            replace(self.scorer, interrupted=self.run.asked_to_stop),
            self.tokenizer,
            self.training.tasks,
            self.training.eval_tasks_limit,
        )


class Prediction(Callback):
    """Prints the planner's prediction beside the measurements, when the training is over."""

    def __init__(self, forecast: Forecast) -> None:
        self.forecast = forecast
        self.step_seconds: deque[float] = deque(maxlen=STEP_TIMES)

    def after_step(self, step: TrainedStep) -> None:
        if step.seq_length == self.run.config.model.seq_length:  # which is predicted
            self.step_seconds.append(step.seconds)

    def closing(self) -> None:
        if line := self.forecast.beside(self.run.mesh, self.step_seconds):
            self.run.note(line)
