"""The options of this patch: those of every patch (``megazero.patches.options``), and those of Megatron's alone."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.options.fields import option
from megazero.config.options.sections import QUANTISED
from megazero.patches.options import MessageOptions


@dataclass(frozen=True)
class PatchOptions(MessageOptions):
    """The formats of messages between Megatron's data-parallel ranks, and checks of these messages."""

    zero_quantized_gradients_until_step: int | None = option(
        None,
        "updates after which gradients are sent exactly, those before a resume included",
        low=1,
        needs=QUANTISED,
    )
    zero_chunk_numel: int | None = option(
        None,
        "elements of a bucket that move together; hops of successive chunks run side by side (default: a quarter of "
        "the bucket, at least 2^18 for each data-parallel rank, at most 2^25)",
        low=1,
    )
