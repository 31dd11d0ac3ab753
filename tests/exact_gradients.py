"""Callbacks that change how gradients are sent while a run is trained."""

from __future__ import annotations

from dataclasses import replace

from megazero.train.callbacks.callback import Callback


class ExactFrom(Callback):
    """Sends gradients exactly from an iteration on."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_step(self, iteration: int) -> None:
        self.run.engine.exact_gradients = iteration >= self.iteration


class Bounds(Callback):
    """Bounds the rounding errors beyond which units are sent exactly."""

    def __init__(self, **bounds: float) -> None:
        self.bounds = bounds

    def start(self) -> None:
        self.run.engine.policy = replace(self.run.engine.policy, **self.bounds)  # type: ignore[arg-type]


def exact_from(iteration: int) -> tuple[str, ...]:
    """The value of --callbacks for gradients that are exact from an iteration on."""
    return (f'{__name__}:ExactFrom {{"iteration": {iteration}}}',)


def bounds(**bounds: float) -> tuple[str, ...]:
    """The value of --callbacks for bounds on rounding errors."""
    said = ", ".join(f'"{name}": {value}' for name, value in bounds.items())
    return (f"{__name__}:Bounds {{{said}}}",)
