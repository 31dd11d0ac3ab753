"""When units are gathered and dropped: at use, ahead of use by the recorded order, never behind. One per engine."""

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

    def use(self, unit: Unit) -> None:
        """The unit is needed now: note it, start what comes next, return when it is gathered."""
        self.program.use(self.index[unit])
        self.ahead.discard(unit)
        if not unit.ready and unit.ticket is None:
            self._launch(unit)
        self.prefetch()
        self.ensure(unit)

    def ensure(self, unit: Unit) -> None:
        """Gathered, without a word in the order (recompute, reading from outside)."""
        if unit.ready:
            return
        if unit.ticket is None:
            self._launch(unit)
        if unit.ticket is not None:
            self.lane.wait(unit.ticket)
            unit.ticket = None
        assert unit.ready, f"unit {unit.name}: copy {unit.copy_version}, master {unit.master_version}"

    def prefetch(self) -> None:
        """Start gathers of the units that come next, within the policy's bytes."""
        budget = self.policy.prefetch_bytes - sum(u.gather_bytes for u in self.ahead)
        # Bounded in uses, too: a long evaluation is one segment of many forwards.
        for index in islice(self.program.upcoming(), 2 * len(self.units)):
            unit = self.units[index]
            if unit.ready or unit.ticket is not None:
                continue
            budget -= unit.gather_bytes
            if budget < 0:
                return
            self._launch(unit)
            self.ahead.add(unit)

    def release(self, unit: Unit) -> None:
        """Drop the gathered parameters unless someone uses them now or next."""
        if not unit.levels.p or unit.active or unit.in_backward or unit.pinned or unit.ticket is not None:
            return
        keep = self.policy.keep_gathered and not self.evaluating and self.program.returns_to(unit.part)
        if not keep and not self.program.next_is(self.index[unit]):
            unit.drop_full()

    def drop_all(self) -> None:
        """Finish what is on its way and drop every gathered buffer (not the P copies)."""
        self.lane.drain()
        self.ahead.clear()
        for unit in self.units:
            unit.ticket = None
            if unit.levels.p and not unit.pinned:
                unit.drop_full()

    def _launch(self, unit: Unit) -> None:
        plan = gather_plan(unit, self.axes)
        chain = gather(unit, self.axes, self.rounding, self.traffic)
        self.issued.add(f"g{self.index[unit]}")
        if plan:
            unit.ticket = self.lane.submit(unit.name, plan, chain)
        else:
            deque(chain, maxlen=0)
