"""The one executor of asynchronous chains of hops.

A chain is a generator that issues collectives one after another and yields each one's Work. The code between
two yields (encode, decode, sum) runs when the collective before it has finished. A lane holds the chains in
flight, first in first out.

On gloo a chain advances when it is polled (at every module hook) or waited for. No thread drives it: a chain that is
not polled does not advance.

On CUDA a chain runs through at once on one of the lane's streams, where waiting is an event, not a host wait. It
waits for the compute that was enqueued when ``follow`` was last called. Successive chains alternate between the
streams, so that the hop of one inside the node overlaps another's across nodes. Chains of one unit run in order.

Every rank must issue the collectives of one communicator in the same order, whatever its timing; else
collectives of different chains would meet, or the ranks would hang. So a chain states beforehand which axes
it will use (``plan``), and it may use an axis only when no older chain still has to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megazero.comm.hops import HopSpec, Moves
from megazero.comm.timing import Label, Stalls, no_label, no_timing
from megazero.mesh.waiting import waiting

Chain = Moves[None]
PATIENCE = timedelta(seconds=10)  # after which ``Lane.overdue`` is asked what is wrong
STREAMS = 2  # one chain in its hop inside the node, one across nodes
# Priority of streams whose kernels start before waiting ones of 0. A chain's kernels are small and one after the
# other: behind matrix products, which fill the device, each would wait for a wave of theirs.
AHEAD = -1


class Differ(RuntimeError):
    """Ranks have issued different collectives. The message names the units."""


class CommunicationError(RuntimeError):
    """A collective failed or timed out. The message names the rank, the lane, the unit and the axis."""


def _nothing() -> None:
    """Release nothing: the chain reads no compute-stream memory that is freed."""


@dataclass(eq=False)
class Ticket:
    """A chain in flight. ``release`` is called when the current stream has waited for it, possibly twice."""

    label: str
    plan: tuple[HopSpec, ...]
    chain: Chain
    release: Callable[[], object] = _nothing
    work: dist.Work | None = None
    issued: int = 0
    done: bool = False
    event: Any = None
    landed: tuple[Any, ...] = ()  # CUDA, when timed: an event after every hop


class Lane:
    """Holds and advances the chains of one direction ('gather' or 'reduce').

    timed: a factory of context managers for host waits. It is called with 'exposed_' and the name of the hop
        that is waited for.
    """

    def __init__(self, name: str, device: torch.device, rank: int, timed: Callable[[str], Any]) -> None:
        self.name = name
        self.device, self.rank = device, rank
        self.timed = timed
        self.label: Label = no_label  # a profiler's, while it records
        # Called with True when a collective has failed, with False while one is waited for; it may raise.
        self.overdue: Callable[[bool], None] = lambda failed: None
        self.tickets: deque[Ticket] = deque()
        cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device, priority=AHEAD) for _ in range(STREAMS)] if cuda else []
        self.latest: dict[str, Any] = {}  # CUDA: event of each unit's last chain
        self.stalls = Stalls()

    def follow(self) -> None:
        """On CUDA, make chains submitted from now on wait for all compute enqueued so far."""
        if self.streams:
            event = torch.cuda.current_stream(self.device).record_event()
            for stream in self.streams:
                stream.wait_event(event)

    def submit(
        self, label: str, plan: tuple[HopSpec, ...], chain: Chain, release: Callable[[], object] = _nothing
    ) -> Ticket:
        """Start a chain. ``release`` frees the compute stream's buffers that the chain reads."""
        ticket = Ticket(label, plan, chain, release)
        if self.streams:
            self._run_through(ticket)
        else:
            self.tickets.append(ticket)
            self.poll()
        return ticket

    @property
    def busy(self) -> bool:
        """Whether chains are in flight that move on when they are polled."""
        return bool(self.tickets) and not self.streams

    def poll(self) -> None:
        """Advance every chain as far as finished collectives and the order of axes allow.

        A chain stops in front of an axis that an older chain still has to use: how fast collectives finish
        differs from rank to rank, but their order on an axis must not. After its first collective a chain
        also waits for older chains of its unit, because their sums come first. On CUDA chains have run through:
        ``drain`` has to find them here until the device is done with them.
        """
        if self.streams or not self.tickets:
            return
        reserved: set[str] = set()  # axes that older chains still have to use
        older: set[str] = set()  # units of older chains: their sums come first
        for ticket in self.tickets:
            while not ticket.done and (ticket.work is None or ticket.work.is_completed()):
                if ticket.issued < len(ticket.plan) and ticket.plan[ticket.issued].axis in reserved:
                    break
                if ticket.issued and ticket.label in older:
                    break
                self._advance(ticket)
            if not ticket.done:
                reserved.update(hop_spec.axis for hop_spec in ticket.plan[ticket.issued :])
                older.add(ticket.label)
        while self.tickets and self.tickets[0].done:
            self.tickets.popleft()

    def wait(self, ticket: Ticket) -> None:
        """Return when the chain's results may be used on the current stream."""
        if self.streams:
            self._wait_event(ticket)
        else:
            self._wait_works(ticket)
        ticket.release()

    def _wait_works(self, ticket: Ticket) -> None:
        if not ticket.done:
            self.poll()
        while not ticket.done:
            first = next(t for t in self.tickets if not t.done)
            with waiting, self.timed(f"exposed_{first.plan[max(first.issued - 1, 0)].hop}"):
                self._finish_work(first)
                self.poll()

    def drain(self) -> None:
        """Wait for every chain."""
        while self.tickets:
            self.wait(self.tickets[0])
            if self.streams:
                self.tickets.popleft()
            else:
                self.poll()  # takes finished chains off the front

    def _finish_work(self, ticket: Ticket) -> None:
        try:
            while ticket.work is not None and not self._landed(ticket.work):
                self.overdue(False)
        except Differ:
            raise
        except RuntimeError as error:
            self.overdue(True)
            spec = ticket.plan[max(ticket.issued - 1, 0)]
            raise CommunicationError(
                f"rank {self.rank}: {self.name} of unit {ticket.label!r} failed on axis {spec.axis!r}, hop "
                f"{spec.hop} ({ticket.issued} of {len(ticket.plan)}): {error}. A peer died, stalls, used other "
                "units (its log then speaks of a mismatch), or the link is down: look at the other ranks' logs; "
                "raise the time-out if the link is only slow"
            ) from error

    def _landed(self, work: dist.Work) -> bool:
        """Wait for a collective, on gloo for a while. Returns whether it has ended; raises what it failed with."""
        if not self.streams:
            with suppress(RuntimeError):  # of the time, or the collective's own, which comes again
                work.wait(PATIENCE)
            if not work.is_completed():
                return False
        work.wait()
        return True

    def _advance(self, ticket: Ticket) -> None:
        self._finish_work(ticket)
        # The label names the hop about to start, or the last hop when only its result is processed.
        hop = ticket.plan[min(ticket.issued, len(ticket.plan) - 1)].hop if ticket.plan else self.name
        with self.label(hop, ticket.label):
            ticket.work = next(ticket.chain, None)
        if ticket.work is None:
            ticket.done = True
            assert ticket.issued == len(ticket.plan), (ticket.label, ticket.plan, ticket.issued)
        else:
            ticket.issued += 1

    def _run_through(self, ticket: Ticket) -> None:
        stream = self.streams[0]
        self.streams.append(self.streams.pop(0))
        if ticket.label in self.latest:
            stream.wait_event(self.latest[ticket.label])
        watched = self.timed is not no_timing
        landed: list[Any] = []
        with torch.cuda.stream(stream):
            while not ticket.done:
                self._advance(ticket)
                if watched and ticket.issued > len(landed):
                    landed.append(torch.cuda.Event(enable_timing=True))
                    landed[-1].record()
            ticket.event = torch.cuda.Event(enable_timing=watched)
            ticket.event.record()
        self.latest[ticket.label] = ticket.event
        ticket.landed = (*landed[1:], ticket.event) if landed else ()
        self.tickets.append(ticket)
        while len(self.tickets) > STREAMS and self.tickets[0].event.query():
            self.tickets.popleft()

    def _wait_event(self, ticket: Ticket) -> None:
        stream = torch.cuda.current_stream(self.device)
        if not ticket.event.query() and self.timed is not no_timing:
            before = torch.cuda.Event(enable_timing=True)
            before.record(stream)
            names = [f"exposed_{hop_spec.hop}" for hop_spec in ticket.plan]
            self.stalls.add(names, (before, *ticket.landed))
        stream.wait_event(ticket.event)
