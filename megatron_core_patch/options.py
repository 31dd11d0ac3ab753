"""What a user asks for: the words of every patch (``megazero.patches.options``), and those of Megatron's alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megazero.config.options.fields import option
from megazero.config.options.sections import ROUNDINGS
from megazero.patches.options import MessageOptions, check, read_words

__all__ = ["PatchOptions", "check", "from_words"]


@dataclass(frozen=True)
class PatchOptions(MessageOptions):
    """What is sent how between Megatron's data-parallel ranks, and how that is watched."""

    zero_gradient_rounding: str = option(
        "nearest",
        "how gradients are rounded: to nearest; at random, without bias; or to nearest, adding what was lost across "
        "nodes to the next step's gradient (error feedback; 4 bytes of each element that a rank sends across nodes)",
        choices=ROUNDINGS,
    )
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
    zero_gradient_error_bound: float | None = option(None, "the same for gradients", above=0)
    zero_chunk_numel: int | None = option(
        None,
        "elements of a bucket that move together; hops of successive chunks run side by side (default: a quarter of "
        "the bucket, at least 2^18 for each data-parallel rank, at most 2^25)",
        low=1,
    )

    @property
    def bounded(self) -> bool:
        """Return whether a bucket's errors decide how it is sent."""
        return self.zero_weight_error_bound is not None or self.zero_gradient_error_bound is not None


def from_words(weights: str = "none", gradients: str = "none", **others: Any) -> PatchOptions:
    """Return the options that these words mean: ``read_words``."""
    return read_words(PatchOptions, weights, gradients, **others)
