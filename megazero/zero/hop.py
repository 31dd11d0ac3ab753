"""What a reduction is made of: which micro-batch it takes, and its collectives."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.comm.codec import Codec
from megazero.mesh.mesh import Axis


@dataclass(frozen=True)
class Turn:
    """Says which micro-batch's gradients a reduction takes. The first overwrites ``grad``, the last goes on to OS.

    index: the number of the micro-batch in the step. exact: codecs are off in this step.
    """

    index: int
    last: bool
    exact: bool = False

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def single(self) -> bool:
        return self.first and self.last


@dataclass(frozen=True)
class Hop:
    """One collective of a reduction: it goes over ``axis``, from level - 1 to ``level``, in the codec's format.

    fused: the sum goes straight into the next hop's messages. feedback: the rounding is fed back.
    whole: the own row is a message, too. So it is for fused hops and the one after, since no buffer has the sum,
        and for exact rows that can be sent from where they lie. Else the own row is neither copied nor rounded.
    """

    axis: Axis
    level: int
    codec: Codec
    fused: bool = False
    whole: bool = False
    feedback: bool = False
