"""What a user asks for: the words of every patch (``megazero.patches.options``), and one of Megatron's alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megazero.config.options.fields import option
from megazero.patches.options import MessageOptions, check, read_words

__all__ = ["PatchOptions", "check", "from_words"]


@dataclass(frozen=True)
class PatchOptions(MessageOptions):
    """What is sent how between Megatron's data-parallel ranks, and how that is watched."""

    zero_chunk_numel: int | None = option(
        None,
        "elements of a bucket that move together; hops of successive chunks run side by side (default: a quarter of "
        "the bucket, at least 2^18 for each data-parallel rank, at most 2^25)",
        low=1,
    )


def from_words(weights: str = "none", gradients: str = "none", **others: Any) -> PatchOptions:
    """Return the options that these words mean: ``read_words``."""
    return read_words(PatchOptions, weights, gradients, **others)
