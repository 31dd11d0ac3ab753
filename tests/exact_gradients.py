"""Callbacks that change how gradients are sent while a run is trained."""

from __future__ import annotations

from megazero.train.callbacks.callback import Callback
from megazero.zero.guard import Guard


class ExactFrom(Callback):
    """Sends gradients exactly from an iteration on."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_step(self, iteration: int) -> None:
        self.run.engine.exact_gradients = iteration >= self.iteration


class Bounds(Callback):
    """Bounds the rounding errors, by kind, beyond which units are sent exactly: as Policy's bounds do."""

    def __init__(self, **bounds: float) -> None:
        self.bounds = bounds

    def start(self) -> None:
        (guard,) = (part for part in self.run.engine.parts if isinstance(part, Guard))
        assert self.bounds.keys() <= guard.bounds.keys()
        guard.bounds |= self.bounds


def exact_from(iteration: int) -> tuple[str, ...]:
    """The value of --callbacks for gradients that are exact from an iteration on."""
    return (f'{__name__}:ExactFrom {{"iteration": {iteration}}}',)


def bounds(**bounds: float) -> tuple[str, ...]:
    """The value of --callbacks for bounds on rounding errors: of weights, gradients."""
    said = ", ".join(f'"{name}": {value}' for name, value in bounds.items())
    return (f"{__name__}:Bounds {{{said}}}",)
