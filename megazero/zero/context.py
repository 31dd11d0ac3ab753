"""State shared by an engine's gathers and reductions."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.comm.hops import Channel
from megazero.kernels.arena import Frame
from megazero.zero.agreement import IssueHash
from megazero.zero.policy import Policy
from megazero.zero.rounding import Rounding


@dataclass(frozen=True)
class Context:
    """State that the chains of one engine share.

    rounding, channel: those of the whole engine. issued: the hash of all collectives that this rank has issued in the
    step.
    """

    policy: Policy
    rounding: Rounding
    channel: Channel
    issued: IssueHash

    def frame(self) -> Frame:
        """Return a new frame of transient buffers on this rank's device."""
        return self.channel.frame()
