"""The learning rate and the weight decay as pure functions of how far training has come.

Values equal megatron-core's OptimizerParamScheduler (compared bit for bit in the tests). As there, all lengths are in
samples; of a run whose length is in iterations, each iteration counts as the full global batch. Iteration n (counted
from 0) uses the values at the progress made *before* it, so with a warm-up from 0 the first iteration has rate 0, as
in Megatron. A warm-up that is a fraction of the decay need not be whole. Nothing is stored: a resumed run has the
values of the uninterrupted one by construction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megazero.config import RunConfig
from megazero.config.options.optimizers import FALLING, WSD_FALLING

# Marks of an optimizer's group: its rate is that of --decoupled-lr, or a multiple of --lr's; it has no weight decay.
DECOUPLED, FACTOR, UNDECAYED = "decoupled", "factor", "undecayed"


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up, then decay from `peak` to `minimum`.

    Lengths are in samples, and `batch` is how many of them one unit of the caller's progress has.

    consumed <= warmup (if warmup > 0): from `warmup_init` to `peak` in a straight line.
    After `decay`: `minimum` (style constant: `peak` for ever).
    Between, by `style`, with r = (consumed - warmup) / (decay - warmup):

    ======================  ==================================================================
    constant                peak
    FALLING's               minimum + (peak - minimum) * FALLING[style](r): linear, cosine
    inverse-square-root     max(minimum, peak * sqrt(max(warmup, 1) / max(consumed, 1)))
    WSD                     peak until decay - wsd_decay, then over the last `wsd_decay`, with
                            w = (consumed - decay + wsd_decay) / wsd_decay, minimum +
                            (peak - minimum) * WSD_FALLING[wsd_style](w)
    ======================  ==================================================================

    It trusts its values: the configuration refuses illegal ones.
    """

    peak: float
    decay: int
    minimum: float = 0.0
    warmup: float = 0
    warmup_init: float = 0.0
    style: str = "linear"
    wsd_decay: int = 0
    wsd_style: str = "exponential"
    batch: int = 1

    @classmethod
    def of(cls, config: RunConfig, *, decoupled: bool = False) -> LearningRate:
        """The learning rate of a resolved configuration. Progress is in the unit of its ``lr_lengths``.

        decoupled: that of the embedding and the head. It has the same shape between peak and minimum of its own.
        """
        optimizer, lengths = config.optimizer, config.lr_samples
        peak, minimum = optimizer.lr, optimizer.min_lr
        if decoupled and optimizer.decoupled_lr is not None:
            peak = optimizer.decoupled_lr
            minimum = minimum if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        return cls(
            peak=peak,
            decay=lengths.decay,
            minimum=minimum,
            warmup=lengths.warmup,
            warmup_init=optimizer.lr_warmup_init,
            style=optimizer.lr_decay_style,
            wsd_decay=lengths.wsd_decay,
            wsd_style=optimizer.lr_wsd_decay_style,
            batch=lengths.batch,
        )

    def times(self, factor: float) -> LearningRate:
        """Return the rate with another peak and minimum. A warm-up begins where this one's does, as in Megatron."""
        return replace(self, peak=factor * self.peak, minimum=factor * self.minimum)

    def __call__(self, progress: float) -> float:
        """The learning rate of the step that is taken after `progress` iterations or samples."""
        consumed = progress * self.batch
        if self.warmup > 0 and consumed <= self.warmup:
            return self.warmup_init + (self.peak - self.warmup_init) * float(consumed) / float(self.warmup)
        if self.style == "constant":
            return self.peak
        if consumed > self.decay:
            return self.minimum
        if self.style == "inverse-square-root":
            return max(self.minimum, self.peak * max(self.warmup, 1) ** 0.5 / max(consumed, 1) ** 0.5)
        return self.minimum + self._fraction(consumed) * (self.peak - self.minimum)

    def _fraction(self, consumed: float) -> float:
        """The factor of (peak - minimum), for the styles that scale it."""
        if self.style != "WSD":
            return FALLING[self.style]((consumed - self.warmup) / (self.decay - self.warmup))
        into = consumed - (self.decay - self.wsd_decay)
        return 1.0 if into <= 0 else WSD_FALLING[self.wsd_style](into / self.wsd_decay)
