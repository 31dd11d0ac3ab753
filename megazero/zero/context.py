"""State shared by an engine's gathers and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megazero.comm.hops import Channel, HopSpec, hop_spec
from megazero.kernels.arena import Frame
from megazero.mesh.mesh import Axis
from megazero.zero.agreement import IssueHash
from megazero.zero.policy import Policy
from megazero.zero.rounding import Rounding

KINDS = ("refresh", "gather", "reduce")  # of the hops of an engine's chains


@dataclass(frozen=True)
class Context:
    """State that the chains of one engine share.

    axes: the data-parallel sub-axes, innermost first. rounding, channel: those of the whole engine.
    issued: the hash of all collectives that this rank has issued in the step.
    """

    axes: Sequence[Axis]
    policy: Policy
    rounding: Rounding
    channel: Channel
    issued: IssueHash

    def frame(self) -> Frame:
        """Return a new frame of transient buffers on this rank's device."""
        return self.channel.frame()

    def axis(self, level: int) -> Axis:
        """Return the sub-axis between level - 1 and ``level``."""
        return self.axes[level - 1]

    def hop_specs(self, kind: str, levels: Sequence[int]) -> tuple[HopSpec, ...]:
        """Return one collective of a kind ('refresh', 'gather', 'reduce') on each of these levels' axes, in order."""
        return tuple(self._hop_specs[kind, level] for level in levels)

    @cached_property
    def _hop_specs(self) -> dict[tuple[str, int], HopSpec]:
        levels = range(1, len(self.axes) + 1)
        return {(kind, m): hop_spec(kind, self.axis(m)) for kind in KINDS for m in levels}
