"""The options of this patch: those of every patch (``megazero.patches.options``), and those of Megatron's alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megazero.config.layout.wire import Wire
from megazero.config.options.fields import option, option_of
from megazero.config.options.sections import ZeroConfig
from megazero.patches.options import MessageOptions


@dataclass(frozen=True)
class PatchOptions(MessageOptions):
    """The formats of messages between Megatron's data-parallel ranks, and checks of these messages."""

    zero_gradient_rounding: str | None = option_of(ZeroConfig, "zero_gradient_rounding")
    zero_gradient_feedback_beta: float = option(
        0.0,
        "error feedback: share of the residual that stays when a step's rounding error is averaged in (LoCo; 0: the "
        "residual is the step's error)",
        low=0,
        below=1,
    )
    zero_gradient_feedback_reset: int = option(
        0, "error feedback: updates after which residuals are dropped (LoCo); 0: never", low=0
    )
    zero_quantized_gradients_until_step: int | None = option(
        None, "updates after which gradients are sent exactly, those before a resume included", low=1
    )
    zero_weight_error_bound: float | None = option(
        None,
        "relative rounding error of a bucket's weights (norm of the error / norm) past which they are sent exactly "
        "from the next step on (default: no bound)",
        above=0,
    )
    zero_gradient_error_bound: float | None = option(
        None,
        "relative rounding error of a bucket's gradients past which they are sent exactly from the next step on "
        "(default: no bound)",
        above=0,
    )
    zero_chunk_numel: int | None = option(
        None,
        "elements of a bucket that move together; hops of successive chunks run side by side (default: a quarter of "
        "the bucket, at least 2^18 for each data-parallel rank, at most 2^25)",
        low=1,
    )

    @property
    def wire(self) -> Wire:
        """Return the formats that are asked for; residuals of error feedback may be averages."""
        average = (self.zero_gradient_feedback_beta, self.zero_gradient_feedback_reset)
        beta, reset = average if super().wire.feedback else (0.0, 0)
        return replace(super().wire, feedback_beta=beta, feedback_reset=reset)

    @property
    def bounded(self) -> bool:
        """Return whether a bucket's errors decide how it is sent."""
        return self.zero_weight_error_bound is not None or self.zero_gradient_error_bound is not None
