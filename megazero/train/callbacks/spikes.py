"""Detects spikes of the loss or of the gradient's norm (--rollback-on-spike).

Loss and norm of an iteration are compared with the medians of the last good iterations. One iteration beyond a bound
may be noise; several in a row are a spike. The numbers are the same on all ranks, so all ranks decide alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from megazero.config.options.skipping import SkippingConfig
from megazero.train.callbacks.callback import Callback, TrainedStep


class SpikeMonitor(Callback):
    """Keeps the losses and norms of the last ``spike_window`` good iterations, and counts the bad ones since.

    Until the window is full nothing is a spike: a run that begins is not yet steady. found: why the last iteration
    makes a spike, or None.
    """

    def __init__(self, config: SkippingConfig) -> None:
        self.config = config
        self.losses, self.norms = (deque[float](maxlen=config.spike_window) for _ in range(2))
        self.found: str | None = None
        self.forget()

    def after_step(self, step: TrainedStep) -> None:
        """Look for a spike, unless the step was skipped or nobody asks for it."""
        norm = step.info.updated_norm if self.config.rollback_on_spike else None
        self.found = None if norm is None else self.observe(step.iteration, step.loss, norm)

    def forget(self) -> None:
        """Reset the count: the next iteration does not follow the last one."""
        self.beyond = 0  # iterations in a row, up to the last one, that were beyond a bound
        self.began = 0  # the first of them; between them others may have been left out or skipped

    def observe(self, iteration: int, loss: float, norm: float) -> str | None:
        """Take the loss (nats per token) and the norm of an iteration with an update.

        Returns the values beyond a bound, in words, if this makes a spike, else None.
        """
        found = "; ".join(self._faults(loss, norm))
        if found:
            self.beyond, self.began = self.beyond + 1, self.began or iteration
        else:
            self.forget()
            self.losses.append(loss)
            self.norms.append(norm)
        return found if self.beyond >= self.config.spike_iterations else None

    def _faults(self, loss: float, norm: float) -> list[str]:
        config = self.config
        if len(self.losses) < config.spike_window:
            return []
        usual, usual_norm, faults = median(self.losses), median(self.norms), []
        if not loss <= usual + config.spike_loss_bound:
            faults.append(
                f"loss {loss:.4g} (usual: {usual:.4g}, --spike-loss-bound {config.spike_loss_bound:g})"
            )
        if not norm <= usual_norm * config.spike_norm_bound:
            faults.append(
                f"gradient norm {norm:.4g} (usual: {usual_norm:.4g}, --spike-norm-bound {config.spike_norm_bound:g})"
            )
        return faults

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in JSON types. It is empty if spikes are not looked for."""
        if not self.config.rollback_on_spike:
            return {}
        return {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "beyond": self.beyond,
            "began": self.began,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. It is empty in checkpoints of runs that did not look for spikes.

        If this run does not look for them, ``state`` is ignored: a count above 0 would stay and stop the saves.
        """
        if not self.config.rollback_on_spike:
            return
        self.losses = deque(state.get("losses", ()), maxlen=self.config.spike_window)
        self.norms = deque(state.get("norms", ()), maxlen=self.config.spike_window)
        self.began = int(state.get("began", 0))
        self.beyond = int(state.get("beyond", 0)) if self.began else 0
