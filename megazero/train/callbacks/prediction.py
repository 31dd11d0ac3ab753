"""Prints the planner's prediction beside the measurements, when the training is over."""

from __future__ import annotations

from collections import deque

from megazero.train.callbacks.callback import Callback, TrainedStep
from megazero.train.forecast import Forecast

STEP_TIMES = 1000  # of the latest iterations


class Prediction(Callback):
    def __init__(self, forecast: Forecast) -> None:
        self.forecast = forecast
        self.step_seconds: deque[float] = deque(maxlen=STEP_TIMES)

    def after_step(self, step: TrainedStep) -> None:
        self.step_seconds.append(step.seconds)

    def closing(self) -> None:
        if line := self.forecast.beside(self.run.mesh, self.step_seconds):
            self.run.note(line)
