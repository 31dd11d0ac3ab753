"""When units are gathered and dropped: at use, ahead of use by the recorded order, never behind. One per engine.

What a gather must come after on CUDA. Its chain runs on a stream of the lane, behind what the compute stream had been
given at the lane's last ``follow`` and not behind what it was given since: a gather may run beside all compute that
was enqueued before it. ``follow`` is called at every drop, and when gathers begin outside of a step (``begin_step``,
evaluation, ``gathered``, ``refresh``, a forward between steps). That is enough:

- Memory. Buffers that come and go (full, copy, passing messages) are allocated inside chains, so the allocator takes
  them from blocks that were allocated on the same stream before. Such a block came free in a chain of that stream
  (then the order of the stream is enough) or by a drop. Before a drop the compute stream has waited for every chain
  that wrote or read the buffer, and all that reads it has been enqueued: what follows the drop follows those.
- Data. Master weights, R, residuals and codecs change on the compute stream, between the last drop of a step and the
  next time that gathers begin, with nothing in flight (``drop_all``). Chains of one unit follow each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from megazero.comm.lane import Lane
from megazero.comm.traffic import Traffic
from megazero.mesh.mesh import Axis
from megazero.zero.movement import gather, gather_plan
from megazero.zero.order import EVALUATION, OrderHash, Program, Segment
from megazero.zero.policy import Policy
from megazero.zero.released import hide, show
from megazero.zero.rounding import Rounding
from megazero.zero.unit import Unit


class Gathering:
    """Keeps the units gathered that are in use, and what comes next on its way."""

    def __init__(
        self,
        units: Sequence[Unit],
        axes: Sequence[Axis],
        policy: Policy,
        lane: Lane,
        rounding: Rounding,
        traffic: Traffic,
        issued: OrderHash,
    ) -> None:
        self.units, self.axes, self.policy = units, axes, policy
        self.lane, self.rounding, self.traffic = lane, rounding, traffic
        self.issued, self.program = issued, Program()
        self.index = {u: i for i, u in enumerate(units)}
        self.ahead: set[Unit] = set()  # gathered or on the way before use

    @property
    def evaluating(self) -> bool:
        return self.program.current == Segment(EVALUATION)

    def use(self, units: Sequence[Unit]) -> None:
        """A module needs these units now: note it, start what comes next, return when they are gathered."""
        self.program.use(tuple(self.index[u] for u in units))
        self.ahead.difference_update(units)
        for unit in units:
            if not unit.ready and unit.ticket is None:
                self._launch(unit)
        self.prefetch()
        for unit in units:
            self.ensure(unit)

    def ensure(self, unit: Unit) -> None:
        """Gathered, without a word in the order (recompute, reading from outside)."""
        if not unit.ready:
            if unit.ticket is None:
                self._launch(unit)
            if unit.ticket is not None:
                self.lane.wait(unit.ticket)
                unit.ticket = None
            assert unit.ready, f"unit {unit.name}: copy {unit.copy_version}, master {unit.master_version}"
        show(unit)

    def prefetch(self) -> None:
        """Start gathers of what comes next: all that the next module needs, beyond it within the policy's bytes.

        The next module is the first one that needs what is not here, or was started ahead of it.
        """
        # Bounded in uses, too: a long evaluation is one segment of many forwards.
        modules = islice(self.program.upcoming(), 2 * len(self.units))
        awaited = ([u for u in map(self.units.__getitem__, needs) if self._awaited(u)] for needs in modules)
        coming = (units for units in awaited if units)
        following = next(coming, [])
        budget = self.policy.prefetch_bytes
        budget -= sum(u.gather_bytes for u in self.ahead.difference(following))
        self._start(following)
        for units in coming:
            for unit in units:
                if unit not in self.ahead:
                    budget -= unit.gather_bytes
                    if budget < 0:
                        return
                    self._start([unit])

    def release(self, unit: Unit) -> None:
        """Drop the gathered parameters unless someone uses them now or next."""
        if not unit.levels.p or unit.active or unit.in_backward or unit.pinned or unit.ticket is not None:
            return
        keep = self.policy.keep_gathered and not self.evaluating and self.program.returns_to(unit.part)
        if keep or self.program.next_is(self.index[unit]):
            hide(unit)
        elif unit.full_present:
            self.lane.follow()
            unit.drop_full()

    def drop_all(self) -> None:
        """Finish what is on its way and drop every gathered buffer (not the P copies)."""
        self.lane.drain()
        self.lane.follow()
        self.ahead.clear()
        for unit in self.units:
            unit.ticket = None
            if unit.levels.p and not unit.pinned:
                unit.drop_full()

    def _awaited(self, unit: Unit) -> bool:
        """It has to be gathered for a later module, or is on its way to one."""
        return unit in self.ahead or not unit.ready and unit.ticket is None

    def _start(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit not in self.ahead:
                self._launch(unit)
                self.ahead.add(unit)

    def _launch(self, unit: Unit) -> None:
        plan = gather_plan(unit, self.axes)
        chain = gather(unit, self.axes, self.rounding, self.traffic)
        self.issued.add(f"g{self.index[unit]}")
        if plan:
            unit.ticket = self.lane.submit(unit.name, plan, chain)
        else:
            deque(chain, maxlen=0)
