"""When gradients are reduced: unit by unit as they complete, in one order on every rank, behind the backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megazero.comm.lane import Lane, Ticket
from megazero.comm.traffic import Traffic
from megazero.mesh.mesh import Axis
from megazero.zero.ends import ends_plan, sum_ends
from megazero.zero.order import OrderHash
from megazero.zero.policy import Policy
from megazero.zero.reduction import MicroBatch, reduce, reduce_plan
from megazero.zero.rounding import Rounding
from megazero.zero.unit import Unit


class Reducing:
    """Submits reductions in the reverse of the forward's order of first use, whichever gradients come first."""

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
        self.lane, self.rounding, self.traffic, self.issued = lane, rounding, traffic, issued
        self.micro_batches = 0
        self.exact = False  # gradient codecs are off in this step
        self.index = {u: i for i, u in enumerate(units)}
        self.queue: deque[Unit] = deque()  # units of this backward, in the order of submission
        self.complete: set[Unit] = set()
        self.pending: deque[Ticket] = deque()

    def open(self, units: Sequence[Unit]) -> None:
        """A backward begins whose units are reduced in this order."""
        self.queue.extend(u for u in units if u.trainable)

    def completed(self, unit: Unit) -> None:
        """The unit's last gradient of this micro-batch has arrived."""
        self.complete.add(unit)
        self._submit()

    def close(self) -> None:
        """The backward ends: parameters without gradient contribute zeros."""
        self.complete.update(self.queue)
        self._submit()

    def join_ends(self, ends: Axis) -> None:
        """Add up tied parameters' sums of the pipeline's two ends; done last, since the other end may be late."""
        for unit in self.units:
            if unit.tied and unit.trainable:
                for ticket in self.pending:  # a chain may begin before older ones of its unit have ended
                    if ticket.label == unit.name:
                        self.lane.wait(ticket)
                self.issued.add(f"t{self.index[unit]}")
                chain = sum_ends(unit, ends, self.exact, self.rounding, self.traffic)
                self.lane.follow()
                self.pending.append(self.lane.submit(unit.name, ends_plan(ends), chain))

    def wait(self) -> None:
        while self.pending:
            self.lane.wait(self.pending.popleft())
        self.lane.drain()

    def abort(self) -> None:
        """Finish what is on its way and forget the rest of the step."""
        self.wait()
        self.queue.clear()
        self.complete.clear()

    def _submit(self) -> None:
        while self.queue and self.queue[0] in self.complete:
            unit = self.queue.popleft()
            self.complete.discard(unit)
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        which = MicroBatch(unit.backwards, unit.backwards == self.micro_batches - 1, self.exact)
        if unit.levels.g or which.last:
            unit.fill_missing()
        staging, unit.staging = unit.staging, None
        unit.pending = set(unit.trainable)
        unit.backwards += 1
        plan = reduce_plan(unit, which.last, self.axes)
        chain = reduce(unit, staging, which, self.axes, self.rounding, self.traffic)
        self.issued.add(f"r{self.index[unit]}{which.last}")
        if not plan:
            deque(chain, maxlen=0)
            return
        keep = () if staging is None else (staging,)
        self.lane.follow()  # the gradients are the compute stream's latest
        self.pending.append(self.lane.submit(unit.name, plan, chain, keep))
        # The bound is on staging memory; where there is none (G = 1) the backward need not wait.
        while staging is not None and len(self.pending) > self.policy.pending_reductions:
            self.lane.wait(self.pending.popleft())
