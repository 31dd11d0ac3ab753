"""Tells all ranks the seconds of each, and warns of stragglers (ops/stragglers.py)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megazero.ops.stragglers import RankSeconds, Stragglers
from megazero.train.callbacks.callback import Callback, TrainedStep


class StragglerWatch(Callback):
    """Exchanges the RankSeconds of the iteration before: those of a step are complete when it is over."""

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
