"""Loss scaling for fp16: losses are multiplied by a scale before the backward, and gradients divided by it after.

fp16 has no numbers below 6e-8: without a scale small gradients become zero. With a scale that is too large they
overflow; then the norm is not finite, every rank skips the update, and the dynamic scale falls. The rule is that of
Megatron: from the ``hysteresis``-th overflow since the scale last grew, each overflow halves the scale; ``window``
steps in a row without an overflow double it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megazero.config.options.sections import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5
MOVING = ("scale", "growth_tracker", "hysteresis_tracker")  # of a dynamic scale
SKIPPED = ("skipped_iterations", "skipped_samples")


@dataclass
class LossScaling:
    """The loss scale of a run, which is the same on all ranks.

    It is None where losses are not scaled (bf16, fp32, fp64).

    dynamic: the scale moves between ``minimum`` and the most that does not overflow. growth_tracker: the steps since
    the last overflow or growth. hysteresis_tracker: the overflows that are left until the scale falls.
    skipped_iterations, skipped_samples: these count the steps in which nothing was updated, and their samples; the
    learning rate does not move on in them.
    """

    scale: float | None = None
    dynamic: bool = False
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    growth_tracker: int = 0
    hysteresis_tracker: int = 2
    skipped_iterations: int = 0
    skipped_samples: int = 0

    @classmethod
    def of(cls, precision: PrecisionConfig) -> LossScaling:
        """Return the state at the beginning of a configuration's run."""
        if precision.params_dtype != "fp16":
            return cls()
        return cls(
            scale=precision.loss_scale or precision.initial_loss_scale,
            dynamic=not precision.loss_scale,
            minimum=precision.min_loss_scale,
            window=precision.loss_scale_window,
            hysteresis=precision.hysteresis,
            hysteresis_tracker=precision.hysteresis,
        )

    @property
    def can_fall(self) -> bool:
        """Whether a lower scale may cure an overflow."""
        return self.dynamic and self.scale is not None and self.scale > self.minimum

    def factors(self, tokens: float, ranks: int) -> tuple[float, float]:
        """Return the factor and the divisor of a step.

        The factor multiplies the summed losses; the divisor turns their gradients into those of the mean loss.

        tokens: the tokens of the global batch. ranks: the number of data-parallel ranks. Gradients in fp16 are those
        of a rank's own mean loss times the scale, as in Megatron, so that the same scale overflows at the same
        gradients.
        """
        if self.scale is None:
            return 1.0, tokens
        return self.scale * ranks / tokens, self.scale * ranks

    def update(self, overflow: bool, samples: int) -> None:
        """Update the scale after a step of so many ``samples``.

        overflow: the step's norm was not finite, so it was skipped.
        """
        if self.scale is None:
            return
        if overflow:
            self.skipped_iterations += 1
            self.skipped_samples += samples
        if not self.dynamic:
            return
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * BACKOFF, self.minimum)
            return
        self.growth_tracker += 1
        if self.growth_tracker >= self.window:  # above it after a resume with a shorter window
            self.growth_tracker, self.hysteresis_tracker = 0, self.hysteresis
            self.scale *= GROWTH

    def skipped(self, by_samples: bool) -> int:
        """Return how much the schedule of the learning rate leaves out, in samples or in iterations."""
        return self.skipped_samples if by_samples else self.skipped_iterations

    def metrics(self) -> dict[str, float]:
        """Return the scale of the next step, if there is one, for a line of the metrics."""
        return {} if self.scale is None else {"loss_scale": self.scale}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. It has JSON types, and is empty where losses are not scaled."""
        return {} if self.scale is None else {name: getattr(self, name) for name in (*MOVING, *SKIPPED)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. A static scale stays the configuration's. A state without a scale changes nothing."""
        if self.scale is None or not state:
            return
        for name in (*MOVING, *SKIPPED) if self.dynamic else SKIPPED:
            setattr(self, name, type(getattr(self, name))(state[name]))
