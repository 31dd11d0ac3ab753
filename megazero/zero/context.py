"""State shared by an engine's gathers and reductions."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.comm.hops import Channel
from megazero.zero.agreement import IssueHash
from megazero.zero.policy import Policy
from megazero.zero.rounding import Rounding


@dataclass(frozen=True)
class Context(Channel):
    """State that the chains of one engine share, beside counters and the arena.

    rounding: that of the whole engine. issued: the hash of all collectives that this rank has issued in the step.
    """

    policy: Policy
    rounding: Rounding
    issued: IssueHash
