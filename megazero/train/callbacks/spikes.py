"""Stops a run whose loss or gradient norm has left its usual range (--stop-on-spike).

PaLM's crew (Chowdhery et al. 2022, section 5.1) went back to a checkpoint from before a spike and left out the
batches that were seen before and during it; OPT's and BLOOM's did so, too. The error names the flags that do this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import median

from megazero.checkpoint import store
from megazero.config.options.skipping import IN_A_ROW, SkippingConfig
from megazero.ops.failures import NonFiniteLoss
from megazero.train.callbacks.callback import Callback, TrainedStep

USUAL = 100  # good iterations whose medians are the usual loss and norm; before there are so many, nothing is a spike


class LossSpike(NonFiniteLoss):
    """A spike, with the flags by which the next start leaves its samples out."""


class SpikeWatch(Callback):
    """Compares the loss (nats per token) and the norm of each update with the medians of the last good iterations.

    The numbers are the same on all ranks, so all ranks decide alike. Steps without an update are passed over.
    """

    def __init__(self, config: SkippingConfig) -> None:
        self.config = config
        self.losses, self.norms = deque[float](maxlen=USUAL), deque[float](maxlen=USUAL)
        self.beyond = list[int]()  # iterations in a row, up to the last one, that were beyond a bound

    def after_step(self, step: TrainedStep) -> None:
        """Raise LossSpike on every rank if this iteration makes a spike."""
        if step.info.skipped:
            return
        norm = step.info.grad_norm
        found = "; ".join(self._faults(step.loss, norm))
        if not found:
            self.beyond.clear()
            self.losses.append(step.loss)
            self.norms.append(norm)
            return
        self.beyond.append(step.iteration)
        if len(self.beyond) >= IN_A_ROW:
            raise LossSpike(f"iteration {step.iteration}: {found}, {IN_A_ROW} times in a row. {self._cure()}")

    def _faults(self, loss: float, norm: float) -> Iterator[str]:
        config = self.config
        if len(self.losses) < USUAL:
            return
        usual, usual_norm = median(self.losses), median(self.norms)
        if not loss <= usual + config.spike_loss_bound:
            yield f"loss {loss:.4g} (usual: {usual:.4g}, --spike-loss-bound {config.spike_loss_bound:g})"
        if not norm <= usual_norm * config.spike_norm_bound:
            bound = f"--spike-norm-bound {config.spike_norm_bound:g}"
            yield f"gradient norm {norm:.4g} (usual: {usual_norm:.4g}, {bound})"

    def _cure(self) -> str:
        save = self.run.config.checkpoint.save
        before = store.latest(save, self.beyond[0]) if save is not None else None
        if before is None:
            return f"No checkpoint of --save is from before iteration {self.beyond[0]}: begin anew, or lower --lr"
        step = store.read_manifest(before).step
        return (
            f"Start again with --load {save} --ckpt-step {step} --skip-train-iteration-range "
            f"{step + 1}-{self.beyond[-1]}: these samples are left out"
        )
