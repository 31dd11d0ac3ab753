"""The one executor of asynchronous chains of hops.

A chain is a generator that issues collectives one after another and yields each one's Work; what stands
between two yields (encode, decode, sum) runs when the collective before it has finished. A lane holds the
chains in flight, first in first out. On gloo a chain moves on when it is polled (at every module hook) or
waited for; on CUDA it runs through at once on the lane's stream, where waiting is an event, not a host wait.

Every rank must issue the collectives of one communicator in the same order, whatever its timing. So a chain
states beforehand which axes it will use (``plan``), and may use an axis only when no older chain still has to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Chain = Generator[dist.Work, None, None]


class CommunicationError(RuntimeError):
    """A collective failed or timed out; the message names rank, lane, unit and axis."""


@dataclass(eq=False)
class Ticket:
    """A chain in flight. ``keep`` references collective inputs until the chain's event has passed."""

    label: str
    plan: tuple[str, ...]
    chain: Chain
    keep: tuple[torch.Tensor, ...] = ()
    work: dist.Work | None = None
    issued: int = 0
    done: bool = False
    event: Any = None


class Lane:
    """Chains of one direction ('gather' or 'reduce'). ``timed``: context manager factory for host waits."""

    def __init__(self, name: str, device: torch.device, rank: int, timed: Callable[[str], Any]) -> None:
        self.name = name
        self.rank = rank
        self.timed = timed
        self.tickets: deque[Ticket] = deque()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.stalls: list[tuple[Any, Any]] = []  # CUDA event pairs around the compute stream's waits

    def submit(
        self, label: str, plan: tuple[str, ...], chain: Chain, keep: tuple[torch.Tensor, ...] = ()
    ) -> Ticket:
        """Start a chain. ``keep``: tensors of the compute stream that the chain reads."""
        ticket = Ticket(label, plan, chain, keep)
        if self.stream is not None:
            self._run_through(ticket)
        else:
            self.tickets.append(ticket)
            self.poll()
        return ticket

    def poll(self) -> None:
        """Advance every chain as far as finished collectives and the order of axes allow."""
        if not self.tickets:
            return
        reserved: set[str] = set()  # axes that older chains still have to use
        older: set[str] = set()  # units of older chains: their sums come first
        for ticket in self.tickets:
            while not ticket.done and (ticket.work is None or ticket.work.is_completed()):
                if ticket.issued < len(ticket.plan) and ticket.plan[ticket.issued] in reserved:
                    break
                if ticket.issued and ticket.label in older:
                    break
                self._advance(ticket)
            if not ticket.done:
                reserved.update(ticket.plan[ticket.issued :])
                older.add(ticket.label)
        while self.tickets and self.tickets[0].done:
            self.tickets.popleft()

    def wait(self, ticket: Ticket) -> None:
        """Return when the chain's results may be used on the current stream."""
        if self.stream is not None:
            self._wait_event(ticket)
            return
        if ticket.done:
            return
        self.poll()
        if ticket.done:
            return
        with self.timed(f"exposed_{self.name}"):
            while not ticket.done:
                self._finish_work(next(t for t in self.tickets if not t.done))
                self.poll()

    def drain(self) -> None:
        """Wait for every chain."""
        while self.tickets:
            self.wait(self.tickets[0])
            if self.stream is not None:
                self.tickets.popleft()
            else:
                self.poll()  # takes finished chains off the front

    def take_stalls(self) -> float:
        """Seconds the compute stream stood waiting since the last call (CUDA; synchronises)."""
        total = 0.0
        for before, after in self.stalls:
            after.synchronize()
            total += before.elapsed_time(after) / 1e3
        self.stalls.clear()
        return total

    def _finish_work(self, ticket: Ticket) -> None:
        try:
            if ticket.work is not None:
                ticket.work.wait()
        except RuntimeError as error:
            at = ticket.plan[ticket.issued - 1] if ticket.issued else "start"
            raise CommunicationError(
                f"rank {self.rank}: {self.name} of unit {ticket.label!r} failed on axis {at!r}, hop "
                f"{ticket.issued} of {len(ticket.plan)}: {error}. A peer died, stalls, or the link is down: look "
                "at the other ranks' logs; raise the time-out if the link is only slow"
            ) from error

    def _advance(self, ticket: Ticket) -> None:
        self._finish_work(ticket)
        ticket.work = next(ticket.chain, None)
        if ticket.work is None:
            ticket.done = True
            assert ticket.issued == len(ticket.plan), (ticket.label, ticket.plan, ticket.issued)
        else:
            ticket.issued += 1

    def _run_through(self, ticket: Ticket) -> None:
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            while not ticket.done:
                self._advance(ticket)
            ticket.event = torch.cuda.Event()
            ticket.event.record()
        self.tickets.append(ticket)
        while len(self.tickets) > 1 and self.tickets[0].event.query():
            self.tickets.popleft()

    def _wait_event(self, ticket: Ticket) -> None:
        stream = torch.cuda.current_stream()
        if ticket.event.query() or self.timed is no_timing:
            stream.wait_event(ticket.event)
            ticket.keep = ()  # its memory is the compute stream's, which now comes after the chain
            return
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(ticket.event)
        after.record(stream)
        ticket.keep = ()
        self.stalls.append((before, after))


def no_timing(_: str) -> Any:
    """``timed`` for engines that nobody watches."""
    return nullcontext()
