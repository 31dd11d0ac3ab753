"""What a user asks for: the words of every patch (``megazero.patches.options``), and one of FSDP2's alone."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.layout.wire import EXACT_NUMEL
from megazero.config.options.fields import option
from megazero.patches.options import MessageOptions


@dataclass(frozen=True)
class Fsdp2Options(MessageOptions):
    """What is sent how between FSDP2's ranks, and how that is watched."""

    zero_exact_numel: int = option(
        EXACT_NUMEL,
        "parameters with at most this many elements on a tensor-parallel rank are sent exactly, as are those that "
        "tensor-parallel ranks replicate",
        low=0,
    )
