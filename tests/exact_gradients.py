"""Callbacks that change how gradients are sent while a run is trained."""

from __future__ import annotations

from megazero.train.callbacks.callback import Callback


class ExactFrom(Callback):
    """Sends gradients exactly from an iteration on."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_step(self, iteration: int) -> None:
        self.run.engine.exact_gradients = iteration >= self.iteration


def exact_from(iteration: int) -> tuple[str, ...]:
    """The value of --callbacks for gradients that are exact from an iteration on."""
    return (f'{__name__}:ExactFrom {{"iteration": {iteration}}}',)
