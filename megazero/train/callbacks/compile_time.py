"""Tells what torch.compile compiled: all graphs in the first step, unless lengths of samples change."""

from __future__ import annotations

from megazero.models.compilation import CompileTime
from megazero.train.callbacks.callback import Callback, TrainedStep
from megazero.train.state.progress import Progress


class CompileNews(Callback):
    def __init__(self) -> None:
        self.spent = CompileTime()

    def after_step(self, step: TrainedStep) -> None:
        self._tell(step.iteration)

    def evaluated(self, at: Progress, name: str, loss: float) -> None:
        self._tell(at.iteration)

    def _tell(self, iteration: int) -> None:
        if line := self.spent.news():
            self.run.note(f"{line} (iteration {iteration})")
